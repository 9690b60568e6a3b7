"""Accuracy against simulated time, by hand-computed values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.analyses.pace import reached
from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.core.errors import DamagedRun, InvalidConfig
from fedloom.core.progress import Moment, Progress
from fedloom.core.result import LedgerEntry
from fedloom.engine.run import Watcher
from support.checks import Fedloom, check_refused

Tiny = Callable[..., Settings]
ENTRY = LedgerEntry("a", 0, False, 1, 1, (), {"train": 1.5, "test": 0.5}, "", 0.5, 0.5, 1, 1, 1.0, 1.0, simulated_seconds=2.0)
ENTRIES = [
    ENTRY,
    replace(ENTRY, client="b", test_accuracy=0.7, simulated_seconds=5.0),
    replace(ENTRY, client="c", round=1, test_accuracy=0.9),
    replace(ENTRY, round=1, test_accuracy=None, simulated_seconds=9.0),  # had too little memory: what it achieved before still holds
    replace(ENTRY, round=2, test_accuracy=0.8),
    replace(ENTRY, round=3, final=True, test_accuracy=1.0, simulated_seconds=100.0),
]
MOMENTS = [
    Moment(1, 5.0, pytest.approx(0.6), 2, 4.0, 2, 2),  # type: ignore[arg-type]
    Moment(2, 14.0, pytest.approx(0.7), 3, 8.0, 4, 4),  # type: ignore[arg-type]
    Moment(3, 16.0, pytest.approx(0.8), 3, 10.0, 5, 5),  # type: ignore[arg-type]
]


def test_rounds_are_as_long_as_their_slowest_and_accuracies_the_latest() -> None:
    assert Progress.of(ENTRIES).moments == MOMENTS and Progress.of([]).moments == Progress.of(ENTRIES[-1:]).moments == []


def test_the_time_to_an_accuracy() -> None:
    moments = Progress.of(ENTRIES).moments
    assert [reached(moments, accuracy) for accuracy in (0.0, 0.65, 0.79, 0.81)] == [moments[0], moments[1], moments[2], None]


@pytest.fixture
def runs(tiny: Tiny, nobody: Watcher, tmp_path: Path) -> list[Path]:
    for method in ("fedavg", "perfedrlnas"):
        new_run(tiny(f"method={method}", "hardware.gmacs=[0.01, 1]"), tmp_path / method, nobody)
    return [tmp_path / "fedavg", tmp_path / "perfedrlnas"]


def test_the_command(runs: list[Path], fedloom_: Fedloom) -> None:
    outcome = fedloom_("analyse", "pace", *runs, "--reach", "0.999", "--out", "there")
    assert outcome.code == 0 and "fedavg" in outcome.out and "never" in outcome.out
    written = json.loads(Path("there/pace.json").read_text())
    assert written["schema"] == "fedloom.pace/1" and list(written["runs"]) == ["fedavg", "perfedrlnas"]
    for run in runs:
        moments, cost = written["runs"][run.name]["moments"], json.loads((run / "result.json").read_text())["cost"]
        assert [moment["round"] for moment in moments] == [1, 2]
        assert moments[-1]["seconds"] == pytest.approx(cost["simulated_seconds"], abs=2e-3)
    assert sorted(path.name for path in Path("there").iterdir()) == ["pace.json", "pace.png", "pace.svg"]
    assert fedloom_("analyse", "pace", runs[0]).code == 0 and (runs[0] / "analyses" / "pace.svg").exists()


def test_a_run_whose_scoring_was_not_counted_is_named(runs: list[Path], fedloom_: Fedloom) -> None:
    assert "did not count the time of scoring" not in fedloom_("analyse", "pace", *runs).out
    ledger = runs[1] / "ledger.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    for line in lines:
        del line["scored_macs"]
    ledger.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    told = fedloom_("analyse", "pace", *runs).out
    assert "perfedrlnas was made by a version that did not count the time of scoring" in told and "fedavg was made" not in told


def test_what_has_no_rounds_is_refused(runs: list[Path], tiny: Tiny, nobody: Watcher, fedloom_: Fedloom, tmp_path: Path) -> None:
    new_run(tiny("method=local"), tmp_path / "local", nobody)
    check_refused(fedloom_("analyse", "pace", tmp_path / "local"), InvalidConfig, "has no rounds to look at")
    check_refused(fedloom_("analyse", "pace", *runs, "--reach", "nan"), InvalidConfig, "--reach must be a finite number, got nan")
    check_refused(fedloom_("analyse", "pace", tmp_path / "nothing"), DamagedRun, "is not a run folder")
