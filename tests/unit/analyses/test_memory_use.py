"""Memory that clients have and networks take, by hand-computed values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.analyses.memory import Use, used
from fedloom.assemble import new_run, reopen_run
from fedloom.config import Settings
from fedloom.core.errors import InvalidConfig
from fedloom.core.hardware import Hardware, assigned
from fedloom.core.result import LedgerEntry
from fedloom.engine.run import Watcher
from support.checks import Fedloom, check_refused

Tiny = Callable[..., Settings]
ENTRY = LedgerEntry("a", 0, False, 1, 1, (), {}, "", 0.5, 0.5, 1, 1, peak_memory_mb=3.0, process_memory_mb=1.0)
HARDWARE = {"a": Hardware(tier=1, memory_mb=4.0), "b": Hardware(tier=0, memory_mb=2.0), "c": Hardware(tier=2)}


def test_what_fits_and_what_does_not() -> None:
    entries = [
        ENTRY,
        replace(ENTRY, client="b"),  # trained with more than it has: the method did not look
        replace(ENTRY, round=1, peak_memory_mb=0.0, notes={"out_of_memory": 1.0, "memory": 1.5}),  # was not trained
        replace(ENTRY, client="c", round=1, peak_memory_mb=1000.0),  # no limit
        replace(ENTRY, client="b", round=2, peak_memory_mb=2.0),  # just fits
        replace(ENTRY, round=3, final=True, peak_memory_mb=5.0),  # the end is no round
    ]
    found = used(entries, HARDWARE)
    assert found.over_by_round == (0.5, 0.5, 0.0)
    # rounds and the client's own network are two memories: a's rounds took 6 MB at most (1.5 of 4, not trained), its network 5
    assert found.clients == (Use("c", 2, 0.0, 1000.0, 0.0, 1, 0), Use("b", 0, 2.0, 3.0, 0.0, 2, 1), Use("a", 1, 4.0, 6.0, 5.0, 2, 1))
    assert used(entries[2:3], HARDWARE).clients == (Use("a", 1, 4.0, 6.0, 0.0, 1, 1),)


def test_a_measured_share_counts_also_where_it_fits() -> None:
    measured = replace(ENTRY, peak_memory_mb=5.0, notes={"out_of_memory": 0.0, "memory": 0.5})  # computed 5 MB, measured 2 of 4
    assert used([measured], HARDWARE).clients == (Use("a", 1, 4.0, 2.0, 0.0, 1, 0),)


@pytest.mark.parametrize("method", ["perfedrlnas", "fedavg"])
def test_the_command(method: str, tiny: Tiny, nobody: Watcher, fedloom_: Fedloom, tmp_path: Path) -> None:
    settings = tiny(f"method={method}", "hardware.memory_mb=[0.3, 1000]")
    new_run(settings, tmp_path / "run", nobody)
    outcome = fedloom_("analyse", "memory", tmp_path / "run", "--out", "there")
    assert outcome.code == 0 and "did not fit" in outcome.out
    written = json.loads(Path("there/memory.json").read_text())
    assert written["schema"] == "fedloom.memory/1" and len(written["over_by_round"]) == settings.rounds
    names = reopen_run(tmp_path / "run").federation.names
    limits = {name: own.memory_mb for name, own in assigned(settings.hardware, names, settings.seed).items()}
    assert {use["client"]: use["memory_mb"] for use in written["clients"]} == limits
    small = [use for use in written["clients"] if use["memory_mb"] == 0.3 and use["participations"]]
    assert small and all(use["over"] == use["participations"] for use in small)  # nothing is that small
    assert sorted(path.name for path in Path("there").iterdir()) == ["memory.json", "memory.png", "memory.svg"]


def test_runs_without_limits_are_refused(tiny: Tiny, nobody: Watcher, fedloom_: Fedloom, tmp_path: Path) -> None:
    new_run(tiny("method=fedavg"), tmp_path / "run", nobody)
    check_refused(fedloom_("analyse", "memory", tmp_path / "run"), InvalidConfig, "has a memory limit", "hardware.memory_mb=[…]")
