"""PerFedSDE-NAS whose anchor is corrected for drift: SCAFFOLD on the anchor, without its second upload."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from fedloom.config import Settings
from fedloom.core.errors import InvalidConfig
from fedloom.testing import Played
from fedloom.training.drift import CONTROL, Drift, remembered
from fedloom.training.local import SupernetJob, Trainer
from support.perfedsde import ANCHORED
from support.untrained import FakeGenerator, fake_generator

Tiny = Callable[..., Settings]
# An epoch is one step on all images, in any order. Where rates fall from epoch to epoch, ways and gradients compare only roughly.
WHOLE = ("training.batch=100", "training.crop=0", "training.schedule=constant", "participants=2", "rounds=4")
DRIFT = ("method=perfedsde", "perfedsde.anchor=medium", "perfedsde.drift=true", "perfedsde.iterations=2", *WHOLE)
ALONE = (*DRIFT, "perfedsde.warmup=1", "perfedsde.restarts=false")  # nothing but the anchor is trained


@pytest.fixture(autouse=True)
def generators() -> Iterator[list[FakeGenerator]]:
    with fake_generator() as loaded:
        yield loaded


def anchor_of(played: Played) -> dict[str, np.ndarray]:
    """The anchor's network as the server has it."""
    method = played.method
    return dict(method.tools.network_of(method.supernet_of(played.state), method._anchor))


def after(rounds: int, settings: Settings) -> Played:
    played = Played(settings)
    for _ in range(rounds):
        played.round()
    return played


@pytest.mark.parametrize("execution", ["sliced", "masked"])
def test_with_the_anchor_alone_it_is_scaffold(execution: str, tiny: Tiny) -> None:
    """The largest network: its kernels are the supernet's own, and not made of larger ones by a matrix that is trained too."""
    how = (f"training.execution={execution}", "perfedsde.anchor=largest", "scaffold.architecture=largest")
    ours, plain = after(3, tiny(*ALONE, *how)), after(3, tiny(*ALONE, "perfedsde.drift=false", *how))
    theirs = after(3, tiny("method=scaffold", "training.epochs=2", *WHOLE, *how))
    found, free, expected = anchor_of(ours), anchor_of(plain), dict(theirs.state.weights)
    assert found.keys() == expected.keys()

    def apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
        return float(np.sqrt(sum(np.square(one[name] - other[name]).sum() for name in one)))

    assert apart(found, expected) < 0.01 * apart(free, expected), "its steps are corrected as SCAFFOLD's are"


@pytest.mark.parametrize("execution", ["sliced", "masked"])
def test_with_the_anchor_alone_and_a_frozen_classifier_it_is_scaffold_with_one(execution: str, tiny: Tiny) -> None:
    how = (f"training.execution={execution}", "perfedsde.anchor=largest", "scaffold.architecture=largest")
    frozen = (*how, "perfedsde.classifier=frozen", "scaffold.classifier=frozen")
    ours, theirs = after(3, tiny(*ALONE, *frozen)), after(3, tiny("method=scaffold", "training.epochs=2", *WHOLE, *frozen))
    first, found, expected = anchor_of(Played(tiny(*ALONE, *frozen))), anchor_of(ours), dict(theirs.state.weights)
    way, error = (sum(np.square(expected[name] - one[name]).sum() for name in expected) for one in (first, found))
    assert error < 1e-4 * way
    for name in filter(ours.method.tools.supernet.in_head, first):
        assert np.array_equal(found[name], first[name]) and np.array_equal(expected[name], first[name]), "it never moves"
        assert first[name].ndim == 1 or 0.5 < np.abs(first[name]).max() * first[name].shape[1] ** 0.5 < 1, "it is drawn like a linear layer"


def test_nothing_more_leaves_and_the_memory_has_the_own_way(tiny: Tiny) -> None:
    played = Played(tiny(*DRIFT, "participants=3"))
    first = played.round()
    assert all("control" not in instruction.arrays for instruction in played.instructions), "before there is one"
    played.round()
    anchored = played.method.tools.supernet.regions(played.method._anchor)
    for instruction in played.instructions[3:]:  # of its anchor, and no more
        assert {name: array.shape for name, array in instruction.arrays["control"].items()} == {
            name: played.state.weights[name][region].shape for name, region in anchored.items()
        }
    for answer in played.answers:
        assert set(answer.report.arrays) == {"update", "coverage"} and set(answer.report.facts) == {"examples"}
        assert remembered(answer.memory.arrays) and "population" in answer.memory.arrays
    drift = played.method._drift(0, {})
    for answer in first:  # nothing was corrected: the way is the update over the sum of the rates
        for name, way in remembered(answer.memory.arrays).items():
            part = answer.report.arrays["update"][name][played.method.tools.supernet.regions(drift.anchor)[name]]
            assert way == pytest.approx(part / sum(drift.rates), abs=1e-6), name


def test_the_server_carries_the_mean_of_all_clients_until_the_last_round(tiny: Tiny) -> None:
    played = Played(tiny(*DRIFT, "rounds=3"))
    for number in range(2):
        before, weights = remembered(played.state.carried), played.state.weights
        answers = played.round()
        moved = {name: played.state.weights[name] - array for name, array in weights.items()}
        rates, carried = played.method._drift(number, {}).rates, remembered(played.state.carried)
        assert carried.keys() == weights.keys()
        for name, now in carried.items():
            known = before[name] if before else np.zeros_like(now)
            mixed, trained = known / 3 + 2 / 3 * moved[name] / sum(rates), moved[name] != 0  # two of three clients
            assert now[trained] == pytest.approx(mixed[trained], abs=1e-5), name
            covered = np.any([answer.report.arrays["coverage"][name] for answer in answers], axis=0)
            assert np.array_equal(np.where(covered, 0, now), np.where(covered, 0, known)), f"{name}, where nobody trained it"
    unheard = played.method.absorb(played.state, [])  # a round in which nobody reported is the last one here
    assert not unheard.carried
    silent = Played(tiny(*DRIFT, "rounds=3"))
    silent.round()
    kept = remembered(silent.method.absorb(silent.state, []).carried)
    assert all(np.array_equal(array, kept[name]) for name, array in remembered(silent.state.carried).items())
    played.round()
    assert not played.state.carried
    answer = played.farewell("client-000")
    assert not any(name.startswith(CONTROL) for name in answer.memory.arrays), "nobody needs it any more"


def test_the_slope_lies_on_the_anchor_and_makes_up_for_the_way(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[SupernetJob] = []
    train = Trainer._train_supernets
    monkeypatch.setattr(Trainer, "_train_supernets", lambda self, given: (heard.extend(given), train(self, given))[1])
    played = Played(tiny(*DRIFT, *ANCHORED, "participants=1", "clients=2"))
    played.round()
    assert all(not tensor.any() for job in heard if job.slope for tensor in job.slope.values()), "zero in the first round"
    heard.clear()
    (instruction,) = played.method.plan(played.state, played.federation.names)
    memory = played.memories.get(instruction.client)
    played.answer(instruction)
    method, shared = played.method, instruction.arrays["control"]
    anchored = method.tools.supernet.regions(method._anchor)
    own, drift = remembered(memory.arrays) if memory else {}, method._drift(1, {})
    momentum = method.tools.training.momentum
    far = drift.rates[0] + drift.rates[1] * (1 + momentum)  # of gradients of one: one step an epoch, momentum goes on
    for job in heard:
        assert job.slope
        for name, slope in job.slope.items():
            outside = torch.ones_like(slope)
            if name in anchored:
                outside[anchored[name]] = 0
                lead = (own[name] if own else 0) - shared[name]
                assert slope[anchored[name]].numpy() == pytest.approx(lead * sum(drift.rates) / far, abs=1e-5), name
            assert not (slope * outside).any(), name


@pytest.mark.parametrize("budget", ["budget.parameters=[90000,0]", "budget.supernet=[120000,0]"])
def test_where_budgets_differ_each_anchor_has_its_own_part(budget: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest network fits into one budget and not into the other."""
    heard: list[SupernetJob] = []
    train = Trainer._train_supernets
    monkeypatch.setattr(Trainer, "_train_supernets", lambda self, given: (heard.extend(given), train(self, given))[1])
    changes = ("perfedsde.anchor=largest", budget, "participants=3", "perfedsde.warmup=1")
    played = after(1, tiny(*DRIFT, *changes))
    method, carried = played.method, remembered(played.state.carried)
    instructions = method.plan(played.state, played.federation.names)
    anchors = {instruction.client: method.at(instruction.client)._anchor for instruction in instructions}
    assert len(set(anchors.values())) == 2
    for instruction in instructions:
        heard.clear()
        regions = method.tools.supernet.regions(anchors[instruction.client])
        for name, array in instruction.arrays["control"].items():
            assert np.array_equal(array, carried[name][regions[name]]), name
        memory = remembered(played.memories[instruction.client].arrays)
        assert {name: array.shape for name, array in memory.items()} == {
            name: carried[name][region].shape for name, region in regions.items()
        }
        played.answer(instruction)
        assert heard and all(job.slope for job in heard)
        for name, slope in heard[0].slope.items() if heard[0].slope else ():
            outside = torch.ones_like(slope)
            if name in regions:
                outside[regions[name]] = 0
            assert not (slope * outside).any(), name
        assert any(slope.any() for slope in heard[0].slope.values()) if heard[0].slope else False


def test_restarts_make_shorter_ways(tiny: Tiny) -> None:
    played = Played(tiny(*DRIFT))
    anchor, tools = played.method._anchor, played.method.tools
    shared = {name: np.ones_like(array) for name, array in tools.part_of(tools.initial_supernet(0), anchor).items()}
    on, anew = (Drift(tools, anchor, [0.1, 0.1], restarts, shared).slope(3) for restarts in (False, True))
    for name, slope in on.items():
        assert (anew[name].abs() >= slope.abs()).all() and (not slope.any() or (anew[name] < slope).any()), name


def test_what_it_cannot_do_is_refused(tiny: Tiny) -> None:
    for change, said in (
        ("perfedsde.anchor=", "there is none"),
        ("training.rate=0", "training.rate above 0"),
        ("training.optimiser=adamw", "training.optimiser=sgd"),
    ):
        with pytest.raises(InvalidConfig, match=said):
            Played(tiny(*DRIFT, change))
