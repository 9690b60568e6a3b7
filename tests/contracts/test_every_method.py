"""What every method promises, in every search space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fedloom.methods.base import METHODS
from fedloom.spaces.base import SPACES
from fedloom.testing.methods import FirstRound, differences, played
from fedloom.testing.one_line import WholeMethodContract
from fedloom.testing.played import Played
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

    def test_validation_images_join_after_the_choice(self, played: FirstRound) -> None:
        """Under training.rejoin the chosen network is trained once more; the accuracy on validation images is from before."""
        tuned = ("training.choice=evidence", "training.evidence=1e9")  # the first rate, whatever it gives
        instruction, _ = played.newcomer()
        before, after = (Played(played.load(*tuned, f"training.rejoin={rejoin}")) for rejoin in ("false", "true"))
        site = after.site(instruction.client)
        honest, answer = before.answer(instruction), after.method.answer(instruction, site)
        assert answer.diary.validation_accuracy == honest.diary.validation_accuracy and answer.diary.notes == honest.diary.notes
        assert answer.diary.architecture == honest.diary.architecture and differences(answer.model, honest.model)
        assert answer.diary.trained_macs > honest.diary.trained_macs and site.clock.seconds["rejoin"] > 0
        assert answer.report == honest.report and not differences(answer.memory, honest.memory)
        unlike = replace(site.data.test, labels=(site.data.test.labels + 1) % 10, images=255 - site.data.test.images)
        again = after.method.answer(instruction, replace(site, data=replace(site.data, test=unlike)))
        assert not differences(again.model, answer.model)
        odd = replace(site.data.validation, images=255 - site.data.validation.images)
        assert differences(after.method.answer(instruction, replace(site, data=replace(site.data, validation=odd))).model, answer.model)
