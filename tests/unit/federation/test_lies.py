"""Whatever a site sends, a round ends with what the others said, and one line says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedloom.core.messages import TRAIN
from fedloom.engine.loop import say_farewell
from fedloom.federation.server.superlink import Reply
from fedloom.federation.wire.messages import to_bytes
from fedloom.federation.wire.signatures import signed
from support.toy_federation import (
    AGREED,
    KEYS,
    NAMES,
    Federation,
    Site,
    changed,
    honest,
    honest_report,
    instruction_in,
    of_the_honest,
    same,
    sealed,
    with_update,
)

pytestmark = pytest.mark.usefixtures("no_pauses")


def spoiled(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array[1, 2] = value
        return array

    return change


first: dict[str, bytes] = {}


def replayed(asked: bytes) -> bytes:
    """In the second round, what it sent in the first."""
    return first["sent"]


def for_another_instruction(asked: bytes) -> bytes:
    other = replace(instruction_in(asked), seed=8)
    return sealed(honest_report(other), to_bytes(other, AGREED))


def torn(asked: bytes) -> bytes:
    return honest(asked)[:-5]


def torn_inside(asked: bytes) -> bytes:
    plain = to_bytes(honest_report(instruction_in(asked)), AGREED)
    return signed(plain[:-5], asked, KEYS["liar"])


LIES: dict[str, tuple[Site, str]] = {
    "replayed": (replayed, "is not an answer to this round's instruction"),
    "an answer to another instruction": (for_another_instruction, "is not an answer to this round's instruction"),
    "oversized": (lambda asked: signed(b"x" * (1 << 20) + b"x", asked, KEYS["liar"]), "1,048,577 bytes, more than the 1,048,576"),
    "truncated": (torn, "The report is damaged"),
    "truncated, then signed": (torn_inside, "The report is damaged or none of Fedloom's"),
    "nothing": (lambda asked: b"", "The report is damaged"),
    "a signature of nothing": (lambda asked: b"\xff\xff", "The report is damaged"),
    "noise": (lambda asked: signed(b"\x80\x04K\x01.", asked, KEYS["liar"]), "none of Fedloom's"),
    "an instruction": (lambda asked: signed(asked, asked, KEYS["liar"]), "This is no report"),
    "another federation": (
        lambda asked: signed(to_bytes(honest_report(instruction_in(asked)), "another"), asked, KEYS["liar"]),
        "belongs to another federation",
    ),
    "another's key": (lambda asked: sealed(honest_report(instruction_in(asked)), asked, "a"), "was not signed with the site's key"),
    "another site's report": (changed(client=lambda report: "a"), "liar sent a report in the name of a"),
    "another round": (changed(round=lambda report: report.round - 1), "answered round 0, but was asked for round 1"),
    "a later round": (changed(round=lambda report: report.round + 5), "answered round 6, but was asked for round 1"),
    "NaN": (with_update(spoiled(np.nan)), r"update\[w\] holds values that are not finite"),
    "infinity": (with_update(spoiled(-np.inf)), r"update\[w\] holds values that are not finite"),
    "a wrong shape": (with_update(lambda array: array.T), r"update\[w\] has shape \(3, 2\), expected \(2, 3\)"),
    "a wrong type": (with_update(lambda array: array.astype(np.float64)), r"update\[w\] has type float64, expected float32"),
    "one array more": (with_update(lambda array: array, x=np.zeros(1, np.float32)), "'x' differs"),
    "one array less": (changed(arrays=lambda report: {"update": {"w": report.arrays["update"]["w"]}}), "'v' differs"),
    "a field of its own": (
        changed(arrays=lambda report: {**report.arrays, "labels": report.arrays["update"]}),
        "labels may not leave the client; the method declares examples, update",
    ),
    "a fact of its own": (changed(facts=lambda report: {**report.facts, "diagnosis": "flu"}), "diagnosis may not leave the client"),
    "a missing field": (changed(facts=lambda report: {}), "examples is missing"),
    "NaN examples": (changed(facts=lambda report: {"examples": float("nan")}), "examples is nan"),
    "no examples": (changed(facts=lambda report: {"examples": 0}), "examples is 0, it must be at least 1"),
    "more examples than there are": (changed(facts=lambda report: {"examples": 1e308}), r"examples is 1e\+308, it must be at most 1e\+09"),
    "examples as text": (changed(facts=lambda report: {"examples": "12"}), "examples is '12'"),
    "too large a norm": (
        with_update(lambda array: 100 * np.ones_like(array)),
        "update has a norm of 245, more than 10 times that of the weights it is about",
    ),
    "nothing at all": (changed(arrays=lambda report: {}, facts=lambda report: {}), r"of no use to the method \(KeyError: 'examples'\)"),
    "in another's name": (lambda asked: Reply("", "a", honest(asked)), "a answered in its name"),
    "from nobody": (lambda asked: Reply("", "", honest(asked)), "A stranger answered in its name"),
    "an error": (lambda asked: Reply("", "liar", error="no images left"), "no images left"),
    "an error in another's name": (lambda asked: Reply("", "b", error="no images left"), "b answered in its name"),
    "a forged line": (
        changed(facts=lambda report: {**report.facts, "x\nb, round 2: left out: \x1b[31mred": 1}),
        "x b, round 2: left out: \N{REPLACEMENT CHARACTER}.31mred may not leave",
    ),
    "a long line": (lambda asked: Reply("", "liar", error="word " * 1000), "word word.{1,500}…$"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_left_out_with_one_line_and_the_others_go_on(lie: str) -> None:
    send, why = LIES[lie]

    def liar(asked: bytes) -> Any:
        """Honest in the first round, so that it has something to replay."""
        if instruction_in(asked).round == 1:
            return send(asked)
        first["sent"] = honest(asked)
        return first["sent"]

    federation = Federation({**dict.fromkeys(NAMES[:3], honest), "liar": liar})
    assert same(federation.run(), of_the_honest())
    (line,) = federation.said
    assert re.match(r"liar, round 2: left out: ", line) and re.search(why, line), line
    assert line.isprintable() and len(line) <= 501
    rounds = [(entry.client, entry.round) for entry in federation.ledger]
    assert {("a", 0), ("b", 0), ("c", 0), ("liar", 0), ("a", 1), ("b", 1), ("c", 1)} <= set(rounds)
    assert all(entry.architecture == "" and entry.test_accuracy is None for entry in federation.ledger)


def test_all_honest() -> None:
    federation = Federation(dict.fromkeys(NAMES, honest))
    assert same(federation.run(), of_the_honest(liar_in=(0, 1)))
    assert federation.said == [] and len(federation.ledger) == 8
    entry = federation.ledger[0]
    assert entry.uploads == ("examples", "update") and entry.bytes_up == 40 + len('{"examples": 10.0}') and entry.bytes_down == 40


def test_a_farewell_must_bring_nothing() -> None:
    def talkative(asked: bytes) -> bytes:
        instruction = replace(instruction_in(asked), action=TRAIN)
        return sealed(honest_report(instruction), asked)

    federation = Federation({**dict.fromkeys(NAMES[:3], honest), "liar": talkative})
    state = federation.method.start(0)
    say_farewell(federation.method, federation.link, state, {"c"}, lambda: None)
    (line,) = federation.said
    assert "liar, the farewell: left out: The final participation must send nothing" in line
    assert [(entry.client, entry.final) for entry in federation.ledger] == [("a", True), ("b", True)]
