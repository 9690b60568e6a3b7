"""Messages survive the way through bytes, and nothing else is taken for one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fedloom.core.errors import BadMessage
from fedloom.core.messages import FINISH, TRAIN, Instruction, Report
from fedloom.federation.wire.messages import expected, from_bytes, to_bytes
from fedloom.files import packed

ARRAYS = {"update": {"a.b/c": np.arange(6, dtype=np.float32).reshape(2, 3), "d": np.array(2.5)}, "coverage": {"a": np.array([True, False])}}
REPORT = Report("client-0", 3, ARRAYS, {"examples": 7, "share": 0.5, "said": "ja"})
INSTRUCTION = Instruction("client-0", 3, TRAIN, 2**63, {"weights": ARRAYS["update"], "nothing": {}}, {"architecture": "x:1"})
MOST = 10_000


def same(one: Any, other: Any) -> bool:
    arrays = {group: {name: (a.dtype, a.shape, a.tobytes()) for name, a in named.items()} for group, named in one.arrays.items()}
    others = {group: {name: (a.dtype, a.shape, a.tobytes()) for name, a in named.items()} for group, named in other.arrays.items()}
    plain = ["client", "round", "facts"] + (["action", "seed"] if isinstance(one, Instruction) else [])
    return type(one) is type(other) and arrays == others and all(getattr(one, name) == getattr(other, name) for name in plain)


@pytest.mark.parametrize("message", [REPORT, INSTRUCTION, Report("x", 0), Instruction("x", 0, FINISH, 0)])
def test_there_and_back(message: Any) -> None:
    data = to_bytes(message)
    assert same(from_bytes(type(message), data, len(data)), message)
    assert to_bytes(from_bytes(type(message), data, MOST)) == data


def test_too_large_torn_and_changed_bytes_are_refused() -> None:
    data = to_bytes(REPORT)
    with pytest.raises(BadMessage, match=f"has {len(data):,} bytes, more than the {len(data) - 1:,}"):
        from_bytes(Report, data, len(data) - 1)
    for length in range(len(data)):
        with pytest.raises(BadMessage):
            from_bytes(Report, data[:length], MOST)
    for place in range(0, len(data), 3):
        changed = bytearray(data)
        changed[place] ^= 4
        with pytest.raises(BadMessage):
            from_bytes(Report, bytes(changed), MOST)


@pytest.mark.parametrize("data", [b"", b"\x80\x04K\x01.", b"\xff" * 100, json.dumps({"message": "Report"}).encode()])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessage, match="none of Fedloom's"):
        from_bytes(Report, data, MOST)


GOOD = {
    **{"message": "Instruction", "federation": "", "client": "a", "round": 0, "action": TRAIN, "seed": 0},
    **{"groups": {"w": ["x"]}, "facts": {}},
}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"message": "Report"}, "no instruction"),
        ({"message": None}, "no instruction"),
        ({"client": 1}, "client is 1"),
        ({"round": -1}, "round is -1"),
        ({"round": True}, "round is True"),
        ({"round": 0.0}, "round is 0.0"),
        ({"seed": None}, "seed is None"),
        ({"action": "explode"}, "asks for 'explode'"),
        ({"groups": None}, "groups of arrays are None"),
        ({"groups": ["w"]}, "groups of arrays"),
        ({"groups": {"w": "x"}}, "groups of arrays"),
        ({"groups": {"w": ["x"], "v": None}}, "groups of arrays"),
        ({"groups": {}}, "'w/x' outside of its groups"),
        ({"groups": {"w": ["x", "y"]}}, "'w/y' outside of its groups, or names one that it has not"),
        ({"groups": {"w": ["x", "x"]}}, "'w/x' outside of its groups"),
        ({"groups": {"w": ["x", 1]}}, "'w/1' outside of its groups"),
        ({"facts": []}, "facts"),
        ({"facts": {"a": [1]}}, "facts"),
        ({"facts": {"a": None}}, "facts"),
    ],
)
def test_what_is_no_instruction(changes: dict[str, Any], said: str) -> None:
    arrays = {"w/x": np.zeros(2)}
    assert from_bytes(Instruction, packed(arrays, GOOD), MOST).arrays["w"]["x"].tolist() == [0, 0]
    with pytest.raises(BadMessage, match=said):
        from_bytes(Instruction, packed(arrays, {**GOOD, **changes}), MOST)


def test_arrays_keep_their_order() -> None:
    """Sums over them, such as the length of a gradient, depend on it in the last digit."""
    names = ["b", "a", "c/d", "aa"]
    message = Report("x", 0, {"update": {name: np.zeros(2, np.float32) for name in names}})
    assert list(from_bytes(Report, to_bytes(message), MOST).arrays["update"]) == names


def test_only_the_answer_that_was_asked_for_is_taken() -> None:
    assert expected(REPORT, INSTRUCTION, "client-0") is REPORT
    with pytest.raises(BadMessage, match="client-1 sent a report in the name of client-0"):
        expected(REPORT, INSTRUCTION, "client-1")
    with pytest.raises(BadMessage, match="answered round 2, but was asked for round 3"):
        expected(Report("client-0", 2), INSTRUCTION, "client-0")
