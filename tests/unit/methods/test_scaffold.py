"""SCAFFOLD: control variates and the steps that they correct, by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedloom.config import Settings
from fedloom.core.errors import InvalidConfig
from fedloom.maths.drift import control_change, reach
from fedloom.testing import Played

ONE_STEP = ("training.batch=100", "training.schedule=constant", "training.rate=0.1", "training.weight_decay=0", "participants=2")


def test_the_reach_of_steps() -> None:
    assert reach([0.1] * 5, 0.0) == pytest.approx(0.5)  # K eta
    assert reach([0.1, 0.2, 0.4], 0.5) == pytest.approx(0.1 * 1 + 0.2 * 1.5 + 0.4 * 1.75)
    pace = way = 0.0
    for rate in (0.1, 0.05):  # SGD with momentum, every gradient 2
        pace = 0.9 * pace + 2.0
        way += rate * pace
    assert way == pytest.approx(2.0 * reach([0.1, 0.05], 0.9))
    shared, update = {"w": np.array([0.5], np.float32)}, {"w": np.array([-way], np.float32)}
    assert control_change(shared, update, reach([0.1, 0.05], 0.9))["w"] == pytest.approx([2.0 - 0.5])


def play(tiny: Callable[..., Settings], *changes: str) -> Played:
    return Played(tiny("method=scaffold", *ONE_STEP, *changes))


def test_the_first_round_is_fedavg_and_leaves_the_mean_gradients(tiny: Callable[..., Settings]) -> None:
    """One step at rate 0.1: the control variate is the gradient, minus ten times the update; two of three clients took part."""
    plainly, played = Played(tiny("method=fedavg", *ONE_STEP)), play(tiny)
    answers = played.round()
    for one, other in zip(plainly.round(), answers, strict=True):
        for name, update in one.report.arrays["update"].items():
            assert np.array_equal(other.report.arrays["update"][name], update), name
            assert other.memory.arrays[name] == pytest.approx(-update / 0.1, rel=1e-5, abs=1e-6)
            assert np.array_equal(other.memory.arrays[name], other.report.arrays["control"][name])
    weights = [answer.report.facts["examples"] for answer in answers]
    for name, control in played.state.control.items():
        mean = np.average([answer.memory.arrays[name] for answer in answers], axis=0, weights=weights)
        assert control == pytest.approx(2 / 3 * mean, abs=1e-6), name
    assert max(np.abs(control).max() for control in played.state.control.values()) > 1e-3


def test_later_steps_are_corrected(tiny: Callable[..., Settings]) -> None:
    """Against the same client without memories of itself and of the server: the step differs by the rate times c - c_i."""
    played = play(tiny, "participants=3")
    played.round()
    for instruction in played.method.plan(played.state, played.federation.names):
        own, shared = played.memories[instruction.client], instruction.arrays["control"]
        corrected = played.answer(instruction)
        zero = {name: np.zeros_like(array) for name, array in shared.items()}
        plain = type(instruction)(**{**vars(instruction), "arrays": {**instruction.arrays, "control": zero}})
        free = played.method.answer(plain, played.site(instruction.client, type(own)(zero)))
        for name, control in shared.items():
            lean = corrected.report.arrays["update"][name] - free.report.arrays["update"][name]
            assert lean == pytest.approx(-0.1 * (control - own.arrays[name]), abs=2e-6), name
            # one step: the new control variate is the gradient at the received network, whatever corrected the step
            assert corrected.memory.arrays[name] == pytest.approx(free.memory.arrays[name], abs=1e-4), name
        assert max(np.abs(own.arrays[name] - control).max() for name, control in shared.items()) > 1e-3


def test_the_server_goes_as_far_as_it_is_told(tiny: Callable[..., Settings]) -> None:
    whole, half = play(tiny), play(tiny, "scaffold.server_rate=0.5")
    before = whole.state.weights
    whole.round(), half.round()
    for name, array in before.items():
        assert half.state.weights[name] - array == pytest.approx(0.5 * (whole.state.weights[name] - array), abs=1e-6), name
        assert np.array_equal(half.state.control[name], whole.state.control[name])


def test_the_end_keeps_the_memory_and_receives_no_control_variate(tiny: Callable[..., Settings]) -> None:
    played = play(tiny)
    (first, _) = played.round()
    answer = played.farewell(first.report.client)
    assert answer.memory == first.memory and set(played.instructions[-1].arrays) == {"weights"} and answer.model is not None


def test_a_rate_of_nothing_is_refused(tiny: Callable[..., Settings]) -> None:
    with pytest.raises(InvalidConfig, match=r"training\.rate is 0"):
        play(tiny, "training.rate=0")


def test_other_optimisers_are_refused(tiny: Callable[..., Settings]) -> None:
    with pytest.raises(InvalidConfig, match=r"training\.optimiser is adamw\. Set it to sgd"):
        play(tiny, "training.optimiser=adamw")
