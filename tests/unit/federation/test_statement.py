"""What a site is told has left it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedloom.core.boundary import Upload
from fedloom.core.errors import DamagedRun
from fedloom.core.messages import FINISH, TRAIN, Instruction, Report, payload_bytes
from fedloom.core.words import ranges
from fedloom.federation.site.statement import Departure, mend, read_log, statement

UPLOADS = {"update": Upload("what training changed", like="weights"), "examples": Upload("how many", low=1)}


def test_a_departure_says_what_left() -> None:
    instruction = Instruction("north", 4, TRAIN, 0)
    report = Report("north", 4, {"update": {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}}, {"examples": 12})
    departure = Departure.of(report, instruction, "f" * 64)
    assert departure.fields == {"update": 20, "examples": len('{"examples": 12}')}
    assert departure.bytes == payload_bytes(report) == sum(departure.fields.values())
    assert json.loads(departure.to_json())["round"] == 4 and departure.at.endswith("+00:00")


def test_a_statement_adds_up() -> None:
    parts = [Departure("t", round, TRAIN, {"update": 1000, "examples": 16}, 1016, f"of {round}") for round in (0, 1, 1, 4)]
    parts.append(Departure("t", 5, FINISH, {}, 0, "of 5"))
    text = statement("digits", "north", UPLOADS, parts, {"It is another one": 11})
    assert text.startswith("What left north in the federation digits\n")
    assert "5 reports with 4,064 bytes of content left this site, in 3 rounds (1-2, 5)." in text
    assert "  update: 4,000 bytes: what training changed\n  examples: 64 bytes: how many\n" in text
    assert "1 of them had left before: the server asked again, and was sent the same bytes again." in text
    assert "11 instructions of the server were refused, with no report:\n  11 times: It is another one\n" in text
    assert "did not leave" in text and "left.jsonl lists each of them" in text


def test_a_statement_of_nothing_and_of_what_was_not_declared() -> None:
    assert statement("digits", "north", {}, [], {}) == "What left north in the federation digits\n\nNothing.\n"
    undeclared = [Departure("t", 0, TRAIN, {"labels": 8}, 8, "x")]
    assert "  labels: a field the method does not declare" in statement("digits", "north", UPLOADS, undeclared, {})


@pytest.mark.parametrize(
    "content", ["torn", '{"at":"t"}', "[1]", '{"at":"t","round":0,"action":"train","fields":{},"bytes":0,"sha256":"","x":1}']
)
def test_a_log_that_was_changed(tmp_path: Path, content: str) -> None:
    (tmp_path / "left.jsonl").write_text(content + "\n")
    with pytest.raises(DamagedRun, match="must not be changed by hand"):
        read_log(tmp_path / "left.jsonl", "digits north")


def testranges() -> None:
    for numbers, text in (([], "none"), ([1], "1"), ([1, 2, 3], "1-3"), ([1, 3, 4, 9], "1, 3-4, 9")):
        assert ranges(numbers) == text


def test_only_a_torn_line_is_mended(tmp_path: Path) -> None:
    log = tmp_path / "left.jsonl"
    mend(log)
    assert not log.exists()
    for before, after in ((b"", b""), (b"a\n", b"a\n"), (b"a\nb", b"a\n"), (b"b", b"")):
        log.write_bytes(before)
        mend(log)
        assert log.read_bytes() == after
