"""What every method promises, in every search space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.core.messages import Arrays
from fedloom.engine.store import Store
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import FixedNetwork
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.local import Local
from fedloom.spaces.base import SPACES
from fedloom.testing.methods import SEED, FirstRound, differences, played
from fedloom.testing.one_line import WholeMethodContract
from fedloom.testing.played import Played
from support.untrained import fake_generator

FIXED = ("fedavg", "fedrep", "ditto", "scaffold", "fedmn")  # methods on one fixed network that differ most
WITH_ATTENTION = {("fedtp", "networks"): ("fedtp.architecture=vit",)}  # which one of the named networks has
CHANGES = {
    "perfedsde": ("perfedsde.iterations=2", "perfedsde.population=5"),  # the second iteration searches on what the first found
    "spider": ("clients=3", "participants=2"),  # these two take longest
    "hapfnas": ("clients=3", "participants=2"),
}


@pytest.fixture(scope="module", autouse=True)
def untrained() -> Iterator[None]:
    """A generator that is fast, and there is one for every space."""
    with fake_generator():
        yield


def cases() -> Iterator[Any]:
    """Every method on every space. CI takes one space each, and some of those on one fixed network; `make slow` has the rest."""
    for method in METHODS.values():
        own = method.make.spaces or sorted(SPACES, key=lambda name: name != "mobilenetv3")
        for number, space in enumerate(own):
            late = number or (issubclass(method.make, FixedNetwork) and method.name not in FIXED)
            marks = [pytest.mark.slow] if late else []
            more = (*CHANGES.get(method.name, ()), *WITH_ATTENTION.get((method.name, space), ()))
            changes = (f"method={method.name}", f"space={space}", *more)
            yield pytest.param(("", *changes), marks=marks, id=f"{method.name} on {space}")


MOMENTUM, LAST = "averaging.momentum=0.5", "averaging.last=2"


def shared(state: Any) -> Arrays:
    """What the server averages."""
    found: Arrays = getattr(state, "weights", None) or state.supernet
    return found


class TestEveryMethod(WholeMethodContract):
    played = played(list(cases()))

    @pytest.fixture(params=["once", pytest.param("again", marks=pytest.mark.slow)])
    def attempt(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    def test_who_shares_a_supernet(self, played: FirstRound) -> None:
        shared = played.method.supernet_of(played.state)
        assert bool(shared) != isinstance(played.method, FixedNetwork | Local)
        searches = bool(shared) and not isinstance(played.method, HeteroFL)  # which shares parts of one fixed network
        assert played.method.search in (("client", "server") if searches else ("none",))

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

    def test_a_server_with_momentum_ends_with_the_mean_of_its_last_weights(self, played: FirstRound, tmp_path: Path) -> None:
        if not played.instructions:
            return  # it has no rounds
        three = ("rounds=3", "participants=2", "hapfnas.supernet_share=0.3")  # hapfnas averages subnets in the last two
        usual, pushed, both = (Played(played.load(*three, *more)) for more in ((), (MOMENTUM,), (MOMENTUM, LAST)))
        for _ in range(2):
            both.round()
        known = both.state
        assert {f"{kind}/{name}" for kind in ("velocity", "mean") for name in shared(known)} == set(known.carried)
        Store(tmp_path).save_state(known, 2)
        assert not differences(Store(tmp_path).load_state(both.method.start(SEED)), known)
        reports = [both.answer(instruction).report for instruction in both.method.plan(known, both.federation.names)]
        field = "weights" if hasattr(known, "weights") else "supernet"
        nothing = replace(known, **{field: {name: np.zeros_like(array) for name, array in shared(known).items()}})
        change = shared(usual.method.absorb(nothing, reports))  # from zero on, so that rounding hides nothing
        plainly, further, end = (one.method.absorb(known, reports) for one in (usual, pushed, both))
        moved = 0
        for name, before in shared(known).items():
            still = change[name] == 0  # nobody trained these entries
            assert np.array_equal(shared(further)[name][still], before[still]), name
            moved += int((shared(further)[name] != shared(plainly)[name]).sum())
            assert shared(end)[name] == pytest.approx((before + shared(further)[name]) / 2, abs=1e-6), name
        assert moved > 0 and end.carried == {}
        farewell = both.method.farewell(end, both.federation.names[0])
        assert both.answer(farewell).model is not None
