"""What every method promises, in every search space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fedloom.methods.base import METHODS
from fedloom.spaces.base import SPACES
from fedloom.testing.methods import FirstRound, played
from fedloom.testing.one_line import WholeMethodContract
from support.untrained import fake_generator

LARGER = {"perfedsde": ("perfedsde.iterations=2", "perfedsde.population=5")}  # the second iteration searches on what the first found


@pytest.fixture(scope="module", autouse=True)
def untrained() -> Iterator[None]:
    """A generator that is fast, and there is one for every space."""
    with fake_generator():
        yield


def cases() -> Iterator[Any]:
    """Every method on every space. CI takes the flagship on two and the others on one space each; `make slow` has the rest."""
    for method in METHODS.values():
        own = method.make.spaces or sorted(SPACES, key=lambda name: name != "mobilenetv3")
        for number, space in enumerate(own):
            marks = [pytest.mark.slow] if number > (method.name == "perfedsde") else []
            changes = (f"method={method.name}", f"space={space}", *LARGER.get(method.name, ()))
            yield pytest.param(("", *changes), marks=marks, id=f"{method.name} on {space}")


class TestEveryMethod(WholeMethodContract):
    played = played(list(cases()))

    def test_who_shares_a_supernet(self, played: FirstRound) -> None:
        shared = played.method.supernet_of(played.state)
        assert bool(shared) == (type(played.method).__name__ not in ("FedAvg", "Local"))
