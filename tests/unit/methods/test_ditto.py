"""Ditto: the client's own network and its pull, by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedloom.config import Settings
from fedloom.testing import Played

ONE_STEP = ("training.batch=100", "training.schedule=constant", "training.rate=0.1", "training.crop=0", "participants=3")
TUNED = ("training.choice=evidence", "training.evidence=1e9")  # whatever the validation images say


def play(tiny: Callable[..., Settings], pull: float) -> Played:
    return Played(tiny("method=ditto", f"ditto.pull={pull}", *ONE_STEP, *TUNED))


def test_the_own_network_is_pulled_towards_what_was_received(tiny: Callable[..., Settings]) -> None:
    free, held = play(tiny, 0), play(tiny, 0.5)
    for one, other in zip(free.round(), held.round(), strict=True):
        received = held.instructions[0].arrays["weights"]
        for name, own in other.memory.arrays.items():  # the first step is fedavg's: both start from what was received
            assert own == pytest.approx(received[name] + other.report.arrays["update"][name], abs=1e-6), name
            assert np.array_equal(own, one.memory.arrays[name])
    before = dict(held.memories)
    for one, other in zip(free.round(), held.round(), strict=True):
        received, known = held.instructions[-1].arrays["weights"], before[other.report.client].arrays
        apart = {name: array - received[name] for name, array in known.items()}
        assert max(np.abs(way).max() for way in apart.values()) > 1e-3
        for name, way in apart.items():
            assert other.memory.arrays[name] - one.memory.arrays[name] == pytest.approx(-0.1 * 0.5 * way, abs=2e-6), name
            assert np.array_equal(other.report.arrays["update"][name], one.report.arrays["update"][name])  # the shared one is free


def test_the_end_tunes_the_own_network_near_the_shared_one(tiny: Callable[..., Settings]) -> None:
    """One epoch of one step at rate 0.02, from what the client remembers."""
    free, held = play(tiny, 0), play(tiny, 0.5)
    free.round(), held.round()
    client = held.federation.names[0]
    known, shared = held.memories[client].arrays, held.state.weights
    one, other = free.farewell(client), held.farewell(client)
    assert one.model is not None and other.model is not None and not other.report.arrays
    for name, own in known.items():
        pulled = other.model.arrays[name] - one.model.arrays[name]
        assert pulled == pytest.approx(-0.02 * 0.5 * (own - shared[name]), abs=1e-6), name
    assert held.method.epochs(5) == 10 and other.memory.arrays == known


def test_a_client_may_choose_another_pull_at_the_end(tiny: Callable[..., Settings]) -> None:
    """What it ends with is what the chosen lambda gives alone; each is tuned from the client's own network."""
    near = ("method=ditto", "ditto.pull=30", *ONE_STEP, "training.choice=accuracy", "training.finetune_epochs=4")
    ends = []
    for changes in ((), ("ditto.pulls=[0, 1]",), ("ditto.pull=0",), ("ditto.pull=1",)):
        played = Played(tiny(*near))
        for _ in range(2):
            played.round()
        other = Played(tiny(*near, *changes))
        instruction = played.method.farewell(played.state, client := played.federation.names[0])
        ends.append(other.answer(instruction, played.memories[client]))
    held, chosen, *alone = ends
    assert "finalist" not in held.diary.notes and chosen.diary.trained_macs == pytest.approx(held.diary.trained_macs * 3)
    same = [held, *alone][int(chosen.diary.notes["finalist"])]
    assert chosen.model is not None and same.model is not None
    for name, array in chosen.model.arrays.items():
        assert np.array_equal(array, same.model.arrays[name]), name
    scores = [one.diary.validation_accuracy for one in (held, *alone)]
    assert chosen.diary.validation_accuracy == max(scores)
