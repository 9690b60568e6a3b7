"""The ledger's totals and result.json, from hand-made entries."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from fedloom.core.result import ClientResult, Ledger, LedgerEntry, RunResult, mean_and_std

ENTRY = LedgerEntry(
    client="client-0",
    round=0,
    final=False,
    bytes_down=100,
    bytes_up=40,
    uploads=("examples", "update"),
    seconds={"train": 1.5, "score": 0.25},
    architecture="toy:1-2",
    validation_accuracy=0.5,
    test_accuracy=0.75,
    trained_macs=1000,
    scored_macs=300,
    evaluated_architectures=7,
    peak_memory_mb=3.5,
    process_memory_mb=200.0,
    notes={"covered_share": 0.9},
    tier=1,
    simulated_seconds=8.0,
)
ENTRIES = [
    ENTRY,
    replace(ENTRY, client="client-1", test_accuracy=0.25, peak_memory_mb=2.0, simulated_seconds=20.0),
    replace(ENTRY, round=1, test_accuracy=None, uploads=("coverage", "examples"), seconds={"train": 0.5}),
    replace(ENTRY, round=2, final=True, bytes_up=0, uploads=(), test_accuracy=0.5, seconds={"finetune": 2.0}),
    replace(ENTRY, round=2, final=True, client="client-1", bytes_up=0, uploads=(), test_accuracy=1.0, evaluated_architectures=0),
]


def ledger() -> Ledger:
    made = Ledger()
    made.add(ENTRIES[:2])
    made.add(iter(ENTRIES[2:]))
    return made


def result(**changes: Any) -> RunResult:
    clients = tuple(
        ClientResult(entry.client, entry.test_accuracy or 0.0, 0.5, entry.architecture, 12, 34, 56, 78) for entry in ENTRIES if entry.final
    )
    whole = RunResult("toy-method", "toy", "digits", "clean", 3, 2, True, clients, ledger(), 12.34567, {"torch": "2.x"})
    return replace(whole, **changes)


def test_the_ledger_adds_up() -> None:
    made = ledger()
    assert (made.bytes_up, made.bytes_down) == (120, 500)
    assert (made.trained_macs, made.evaluated_architectures) == (5000, 28)
    assert made.peak_memory_mb == 3.5
    assert made.stages == {"train": 5.0, "score": 0.75, "finetune": 2.0}
    assert made.uploads == {"coverage", "examples", "update"}
    assert made.best_ever == {"client-0": 0.75, "client-1": 1.0}
    assert made.latest == {"client-0": 0.75, "client-1": 0.25}  # in rounds; the second time client-0 was not tested
    assert made.final == {"client-0": ENTRIES[3], "client-1": ENTRIES[4]}


def test_the_ledger_does_not_keep_entries_of_rounds() -> None:
    made = Ledger()
    made.add(ENTRIES[:3])
    assert made.final == {}


def test_a_line_is_read_back_as_it_was() -> None:
    for entry in ENTRIES:
        line = entry.to_json()
        assert "\n" not in line
        assert LedgerEntry.from_json(line) == entry


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, None) for name in json.loads(ENTRY.to_json()) if not name.endswith("_accuracy")),
        *(("client", 3), ("round", "1"), ("round", 1.0), ("round", True), ("final", 0), ("final", "no"), ("bytes_up", 1.5)),
        *(("uploads", {}), ("uploads", "update"), ("seconds", []), ("seconds", 1.5), ("architecture", 5), ("test_accuracy", "0.5")),
        *(("validation_accuracy", True), ("trained_macs", "many"), ("peak_memory_mb", "3.5"), ("process_memory_mb", []), ("notes", [])),
        *(("judged", 3), ("judged", {}), ("judged", {"classes": 2})),
        ("unheard_of", 1),
    ],
)
def test_a_line_with_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        LedgerEntry.from_json(json.dumps({**json.loads(ENTRY.to_json()), name: value}))


LATER = ("tier", "simulated_seconds", "late", "upload_bytes", "scored_macs", "upload_shapes")


@pytest.mark.parametrize("name", [name for name in json.loads(ENTRY.to_json()) if name not in LATER])
def test_a_line_with_a_value_missing_is_refused(name: str) -> None:
    line = {key: value for key, value in json.loads(ENTRY.to_json()).items() if key != name}
    with pytest.raises((ValueError, TypeError), match=name):
        LedgerEntry.from_json(json.dumps(line))


@pytest.mark.parametrize("line", ["", "{", "5", "null", "[]", '"x"'])
def test_a_line_that_is_no_entry_is_refused(line: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        LedgerEntry.from_json(line)


def test_whole_numbers_are_numbers() -> None:
    changes = {"validation_accuracy": 1, "test_accuracy": 0, "peak_memory_mb": 3, "process_memory_mb": 200}
    assert LedgerEntry.from_json(json.dumps({**json.loads(ENTRY.to_json()), **changes})) == replace(ENTRY, **changes)


def test_the_schema_key_by_key() -> None:
    written = json.loads(result().to_json())
    top = "schema method space dataset protocol seed rounds finished accuracy clients cost uploads environment"
    assert list(written) == top.split()
    three = ("", "last_participation_", "best_ever_")
    assert list(written["accuracy"]) == [f"{what}{number}" for what in three for number in ("mean", "std")]
    line = "name test_accuracy validation_accuracy architecture parameters macs train_examples test_examples"
    assert [list(client) for client in written["clients"]] == [line.split()] * 2
    cost = "seconds stages bytes_up bytes_down trained_macs scored_macs evaluated_architectures peak_memory_mb simulated_seconds"
    assert list(written["cost"]) == cost.split()


def test_the_values_by_hand() -> None:
    written = json.loads(result().to_json())
    assert written["schema"] == "fedloom.result/1"
    assert [written[key] for key in ("method", "space", "dataset", "protocol")] == ["toy-method", "toy", "digits", "clean"]
    assert [written[key] for key in ("seed", "rounds", "finished")] == [3, 2, True]
    # Final 0.5 and 1.0; best ever 0.75 and 1.0; population standard deviation.
    last = {"last_participation_mean": 0.5, "last_participation_std": 0.25}
    assert written["accuracy"] == {"mean": 0.75, "std": 0.25, **last, "best_ever_mean": 0.875, "best_ever_std": 0.125}
    assert written["clients"][1] == {
        "name": "client-1",
        "test_accuracy": 1.0,
        "validation_accuracy": 0.5,
        "architecture": "toy:1-2",
        "parameters": 12,
        "macs": 34,
        "train_examples": 56,
        "test_examples": 78,
    }
    assert written["cost"] == {
        "seconds": 12.346,
        "stages": {"finetune": 2.0, "score": 0.75, "train": 5.0},
        "bytes_up": 120,
        "bytes_down": 500,
        "trained_macs": 5000,
        "scored_macs": 1500,
        "evaluated_architectures": 28,
        "peak_memory_mb": 3.5,
        "simulated_seconds": 28.0,  # the slowest of the first round, then of the second; final ones are no round
    }
    assert written["uploads"] == ["coverage", "examples", "update"]
    assert written["environment"] == {"torch": "2.x"}


def test_a_result_before_the_end_has_no_accuracy() -> None:
    written = json.loads(result(clients=(), finished=False, ledger=Ledger()).to_json())
    assert len(written["accuracy"]) == 6 and set(written["accuracy"].values()) == {None}
    assert written["clients"] == [] and written["finished"] is False


def test_mean_and_std_by_hand() -> None:
    assert mean_and_std([]) == (None, None)
    assert mean_and_std([0.3]) == (0.3, 0.0)
    mean, std = mean_and_std([0.1, 0.2, 0.6])
    assert mean == pytest.approx(0.3)
    assert std == pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 3))
