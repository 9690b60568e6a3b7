"""Reports that pass the door and are of no use to the method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.assemble.builder import make_tools
from fedloom.config import Settings
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import Instruction, Report, frozen
from fedloom.data.readers import read
from fedloom.federation.agreement import RoundSettings
from fedloom.federation.wire.messages import from_bytes
from fedloom.methods.base import METHODS
from support.toy_federation import (
    AGREED,
    NAMES,
    Federation,
    Toy,
    ToyState,
    changed,
    honest,
    same,
    sealed,
    with_update,
)

pytestmark = pytest.mark.usefixtures("no_pauses")


@pytest.fixture(scope="module")
def hapfnas(tiny: Callable[..., Settings]) -> Any:
    settings = tiny("method=hapfnas", "rounds=2", "participants=4", "clients=4")
    tools = make_tools(settings, read(settings.data), torch.device("cpu"))
    return METHODS["hapfnas"].make(settings.components["hapfnas"], tools)


def searched(method: Any, instruction: Instruction, choices: Any = None, cut: Any = None) -> Report:
    """As if it had found the smallest network of the space."""
    smallest = method.tools.space.named["smallest"]
    part = method.tools.part_of(instruction.arrays["weights"], smallest if cut is None else cut)
    update = {name: np.full_like(array, 0.01 * (1 + NAMES.index(instruction.client))) for name, array in part.items()}
    own = np.array(smallest.choices if choices is None else choices, np.int32)
    arrays = {"update": update, "architecture": {"choices": own}}
    return Report(instruction.client, instruction.round, arrays, {"examples": 12})


@pytest.mark.parametrize(
    "lie, why",
    [
        (lambda method: {"choices": [99] * len(method.tools.space.genes)}, "99"),
        (lambda method: {"choices": [-1] * len(method.tools.space.genes)}, "-1"),
        (lambda method: {"cut": method.tools.space.named["largest"]}, "does not have the arrays of its architecture"),
        (lambda method: {"choices": method.tools.space.named["largest"].choices}, "does not have the arrays of its architecture"),
    ],
    ids=["too high", "negative", "another's part", "another's name"],
)
def test_a_foreign_architecture_is_left_out(hapfnas: Any, lie: Callable[[Any], dict[str, Any]], why: str) -> None:
    """They pass the door, which knows shapes but no spaces; the method's refusal must not end the federation."""
    state = replace(hapfnas.start(0), round=1)  # from here on clients send what they found

    def answers(asked: bytes) -> bytes:
        instruction = instruction_in_large(asked)
        lies = lie(hapfnas) if instruction.client == "liar" else {}
        return sealed(searched(hapfnas, instruction, **lies), asked)

    federation = Federation(dict.fromkeys(NAMES, answers), RoundSettings(minimum=3, patience=0.1), hapfnas)
    after = federation.run(state)
    (line,) = federation.said
    assert line.startswith("liar, round 2: left out: ") and why in line
    expected = hapfnas.absorb(state, [searched(hapfnas, order) for order in hapfnas.plan(state, NAMES) if order.client != "liar"])
    assert set(after.architectures) == {"a", "b", "c"}
    assert all(np.array_equal(after.supernet[name], expected.supernet[name]) for name in expected.supernet)


def instruction_in_large(data: bytes) -> Instruction:
    return from_bytes(Instruction, data, 1 << 28, AGREED)


def test_what_is_the_settings_fault_still_ends_a_run() -> None:
    class Diverging(Toy):
        def absorb(self, state: ToyState, reports: Sequence[Report]) -> ToyState:
            raise InvalidConfig("The supernet diverged. Lower the rate")

    with pytest.raises(InvalidConfig, match="Lower the rate"):
        Federation(dict.fromkeys(NAMES, honest), method=Diverging()).run()


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_state_stays_finite_whatever_passes_every_bound() -> None:
    """With norm=0 and outlier=0 nobody looks at lengths, and the largest floats add up to infinity."""
    largest = with_update(lambda array: np.full_like(array, np.finfo(np.float32).max))
    federation = Federation(
        {**dict.fromkeys(NAMES[:3], honest), "liar": largest}, RoundSettings(minimum=3, patience=0.1, norm=0, outlier=0)
    )
    state = federation.run(ToyState(1, frozen({"w": np.full((2, 3), 3e38, np.float32), "v": np.ones(4, np.float32)})))
    assert all(np.isfinite(array).all() for array in state.weights.values())
    assert federation.said == ["liar, round 2: left out: weights would no longer be finite"]


def test_useless_reports_of_all_end_in_a_round_without_any() -> None:
    empty = changed(arrays=lambda report: {}, facts=lambda report: {})
    federation = Federation({"liar": empty}, RoundSettings(minimum=1, patience=0.1))
    state = federation.run()
    assert state.round == 2 and same(replace(state, round=0), Toy().start(0)) and len(federation.said) == 2
