"""Simulated hardware: who has which, what a round takes there, and who is too late."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.assemble import new_run, reopen_run
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.hardware import Hardware, HardwareSettings, assigned
from fedloom.core.result import LedgerEntry
from fedloom.engine.run import Watcher
from fedloom.engine.store import Store
from support.checks import Fedloom, check_refused

Tiny = Callable[..., Settings]
SLOW_AND_FAST = "hardware.gmacs=[0.001, 10]"


def test_seconds_by_hand() -> None:
    hardware = Hardware(gmacs=2.0, mbits=8.0)
    assert hardware.seconds(10**9, 3 * 10**6) == pytest.approx(1.5 + 3.0)  # forward and backward; megabytes a second
    assert hardware.seconds(0, 0) == 0 and hardware.seconds(0, 0, 10**9) == 0.5  # forward alone


def test_memory_by_hand() -> None:
    assert Hardware(memory_mb=200.0).utilisation(50.0) == 0.25 and Hardware(memory_mb=200.0).utilisation(300.0) == 1.5
    assert Hardware().utilisation(1e9) == 0  # no limit


def test_tiers_are_as_even_as_they_can_be_and_follow_from_the_seed() -> None:
    settings = HardwareSettings(gmacs=(1.0, 10.0, 100.0), memory_mb=(50.0,), mbits=(5.0, 10.0, 20.0))
    clients = [f"client-{number}" for number in range(8)]
    found = assigned(settings, clients, 3)
    assert list(found) == clients and found == assigned(settings, clients, 3) != assigned(settings, clients, 4)
    tiers = [hardware.tier for hardware in found.values()]
    assert sorted(map(tiers.count, range(3))) == [2, 3, 3]
    expected = {tier: Hardware(tier, gmacs, 50.0, mbits) for tier, gmacs, mbits in ((0, 1.0, 5.0), (1, 10.0, 10.0), (2, 100.0, 20.0))}
    assert all(hardware == expected[hardware.tier] for hardware in found.values())
    assert assigned(HardwareSettings(), ["a"], 0) == {"a": Hardware()}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mbits", HardwareSettings(gmacs=(1.0, 2.0, 3.0), mbits=(1.0, 2.0))),
        ("gmacs", HardwareSettings(gmacs=(1.0, 2.0), memory_mb=(1.0, 2.0, 3.0))),
        ("gmacs", HardwareSettings(gmacs=())),
    ],
)
def test_lists_that_do_not_go_together_are_refused(name: str, settings: HardwareSettings) -> None:
    with pytest.raises(
        InvalidConfig, match=f"hardware.{name} has . numbers where there are . tiers. Give one for each tier, or one for all"
    ):
        assigned(settings, ["a", "b"], 0)


def test_the_command_refuses_them_before_anything_is_written(fedloom_: Fedloom, tiny_file: Path) -> None:
    outcome = fedloom_("run", tiny_file, "hardware.gmacs=[1, 2]", "hardware.mbits=[1, 2, 3]", "run.folder=there")
    check_refused(outcome, InvalidConfig, "hardware.gmacs has 2 numbers where there are 3 tiers")
    assert not Path("there").exists()
    check_refused(fedloom_("run", tiny_file, "hardware.gmacs=[0]"), InvalidConfig, "hardware.gmacs[0] must be at least 1e-06")


def run(settings: Settings, folder: Path, nobody: Watcher) -> tuple[dict[str, Any], list[LedgerEntry]]:
    new_run(settings, folder, nobody)
    return json.loads((folder / "result.json").read_text()), list(Store(folder).read_ledger())


@pytest.mark.parametrize("method", ["fedavg", "perfedsde", "perfedrlnas"])
def test_the_ledger_says_what_a_round_would_have_taken(tiny: Tiny, tmp_path: Path, nobody: Watcher, method: str) -> None:
    settings = tiny(f"method={method}", SLOW_AND_FAST, "hardware.mbits=[1]")
    result, ledger = run(settings, tmp_path, nobody)
    clients = sorted({entry.client for entry in ledger})
    hardware = assigned(settings.hardware, clients, settings.seed)
    assert len({entry.tier for entry in ledger}) == 2
    for entry in ledger:
        own = hardware[entry.client]
        assert entry.tier == own.tier and not entry.late
        seconds = own.seconds(entry.trained_macs, entry.bytes_down + entry.bytes_up, entry.scored_macs)
        assert entry.simulated_seconds == pytest.approx(seconds, abs=1e-4)
    assert result["cost"]["scored_macs"] == sum(entry.scored_macs for entry in ledger)
    rounds = [max(e.simulated_seconds for e in ledger if e.round == number and not e.final) for number in range(settings.rounds)]
    assert result["cost"]["simulated_seconds"] == pytest.approx(sum(rounds), abs=1e-3)


@pytest.mark.parametrize("changes", [("method=perfedsde", "perfedsde.racing=0.5"), ("method=perfedrlnas",)])
def test_scoring_takes_time(tiny: Tiny, tmp_path: Path, nobody: Watcher, changes: tuple[str, ...]) -> None:
    """Every architecture that is scored: its multiply-accumulates, for the images that score it and those that measure its statistics."""
    settings = tiny(*changes)
    _, ledger = run(settings, tmp_path, nobody)
    reopened = reopen_run(tmp_path)
    space = reopened.tools.space
    for entry in ledger[:2]:
        data = reopened.federation.data_of(entry.client)
        images = len(data.validation) + min(settings.training.calibration, len(data.train))
        if settings.method == "perfedrlnas":
            assert entry.scored_macs == images * space.cost(Architecture.parse(entry.architecture)).macs
        else:  # a race looks at half of the images first, then at all of them
            few, many = (entry.evaluated_architectures * space.cost(space.named[size]).macs for size in ("smallest", "largest"))
            assert 0.5 * few * len(data.validation) <= entry.scored_macs <= 2 * many * images


def test_a_deadline_counts_scoring(tiny: Tiny, tmp_path: Path, nobody: Watcher) -> None:
    _, free = run(tiny("method=perfedsde"), tmp_path / "free", nobody)
    own = Hardware()
    without = max(own.seconds(entry.trained_macs, entry.bytes_down + entry.bytes_up) for entry in free if not entry.final)
    shortest = min(entry.simulated_seconds for entry in free if not entry.final)
    assert without < shortest
    _, ledger = run(tiny("method=perfedsde", f"hardware.deadline={(without + shortest) / 2}"), tmp_path / "late", nobody)
    assert all(entry.late for entry in ledger if not entry.final)


def test_who_misses_the_deadline_is_not_waited_for(tiny: Tiny, tmp_path: Path, nobody: Watcher) -> None:
    settings = tiny("method=fedavg", "participants=3", SLOW_AND_FAST)
    free_result, free = run(settings, tmp_path / "free", nobody)
    slow = [entry for entry in free if entry.tier == 0 and not entry.final]
    deadline = min(entry.simulated_seconds for entry in slow) / 2
    assert deadline > max(entry.simulated_seconds for entry in free if entry.tier == 1)
    late_settings = tiny("method=fedavg", "participants=3", SLOW_AND_FAST, f"hardware.deadline={deadline}")
    result, ledger = run(late_settings, tmp_path / "late", nobody)
    assert all(entry.late == (entry.tier == 0 and not entry.final) for entry in ledger) and any(entry.late for entry in ledger)
    assert result["cost"]["simulated_seconds"] == pytest.approx(settings.rounds * deadline, abs=1e-3)
    assert len(result["clients"]) == 3  # all get their model in the end
    assert result["accuracy"] != free_result["accuracy"]  # the slow ones did not count
    nobody_left = tiny("method=perfedrlnas", "hardware.deadline=1e-9")
    _, none = run(nobody_left, tmp_path / "none", nobody)
    assert all(entry.late for entry in none if not entry.final)


def test_ledgers_without_these_numbers_are_still_read() -> None:
    entry = LedgerEntry("client-0", 1, False, 1, 2, ("update",), {"train": 1.0}, "", None, None, 3, 4, 5.0, 6.0)
    written = json.loads(entry.to_json())
    for name in ("tier", "simulated_seconds", "late"):
        del written[name]
    assert LedgerEntry.from_json(json.dumps(written)) == entry
    with pytest.raises(ValueError, match="late is 1"):
        LedgerEntry.from_json(json.dumps({**written, "late": 1}))
