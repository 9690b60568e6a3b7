"""Drop-out: who is not there follows from the seed, trains and receives nothing, and is back at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.core.errors import InvalidConfig
from fedloom.core.hardware import Hardware, there
from fedloom.engine.run import Watcher
from fedloom.engine.store import Store

Tiny = Callable[..., Settings]
FLEET = ("method=fedavg", "clients=3", "participants=3", "rounds=3", "budget.tiers=[0,0,1]", "hardware.gmacs=[1,1]")


def test_it_happens_as_often_as_is_said() -> None:
    rounds = range(2000)
    absent = sum(not there(Hardware(dropout=0.3), 1, number, "a") for number in rounds) / len(rounds)
    assert abs(absent - 0.3) < 0.04
    assert all(there(Hardware(), 1, number, "a") for number in rounds)
    assert not any(there(Hardware(dropout=1.0), 1, number, "a") for number in rounds)
    draws = [[there(Hardware(dropout=0.5), seed, number, name) for number in range(50)] for seed, name in ((1, "a"), (1, "b"), (2, "a"))]
    assert draws[0] != draws[1] and draws[0] != draws[2]


@pytest.mark.parametrize("secure", [False, True])
def test_a_tier_that_is_never_there_has_no_line_but_its_last(tiny: Tiny, nobody: Watcher, tmp_path: Path, secure: bool) -> None:
    more = ("privacy.secure=true", "privacy.least=2") if secure else ()
    result = new_run(tiny(*FLEET, "hardware.dropout=[0,1]", *more), tmp_path / "run", nobody)
    ledger = list(Store(tmp_path / "run").read_ledger())
    assert {entry.client for entry in ledger if not entry.final} == {"client-000", "client-001"}
    assert len([entry for entry in ledger if not entry.final]) == 6
    assert [client.name for client in result.clients] == ["client-000", "client-001", "client-002"]
    assert {entry.client: entry.tier for entry in ledger} == {"client-000": 0, "client-001": 0, "client-002": 1}


def test_a_run_goes_on_when_nobody_is_there(tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    result = new_run(tiny(*FLEET, "hardware.dropout=[1,1]"), tmp_path / "run", nobody)
    assert result.finished and result.rounds == 3 and len(result.clients) == 3


def test_probabilities_only(tiny: Tiny) -> None:
    with pytest.raises(InvalidConfig, match=r"hardware.dropout\[0\] must be at least 0 and at most 1"):
        tiny("hardware.dropout=[1.5]")
