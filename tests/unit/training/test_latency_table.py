"""Latency tables: what they foretell, what they are refused for, and budgets that use them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.seeds import rng
from fedloom.spaces.budget import Bounded
from fedloom.testing import Played
from fedloom.training.latency_table import make_table, read_table, write_table
from support.checks import Fedloom, check_refused

Tiny = Callable[..., Settings]


@pytest.fixture
def played(tiny: Tiny) -> Played:
    return Played(tiny("method=fedavg"))


@pytest.fixture
def table(played: Played, tmp_path: Path) -> Path:
    """Of a device that takes a millisecond for 100,000 multiply-accumulates, and half a millisecond more for every gene of a kind."""
    space = played.tools.space

    def takes(architecture: Architecture) -> float:
        return space.cost(architecture).macs / 1e5 + 0.5 * sum(choice == 1 for choice in architecture.choices[:4])

    write_table(tmp_path / "device.json", make_table(space, takes, 150, "made up"))
    return tmp_path / "device.json"


def test_a_table_foretells_networks_that_it_never_saw(played: Played, table: Path) -> None:
    space, foretold = played.tools.space, read_table(table, played.tools.space)
    content = json.loads(table.read_text())
    assert content["measured"] == 152 and content["error_ms"] < 0.05 * content["mean_ms"] and table.stat().st_size < 20_000
    for seed in range(20):
        one = space.sample(rng("unseen", seed))
        takes = space.cost(one).macs / 1e5 + 0.5 * sum(choice == 1 for choice in one.choices[:4])
        assert foretold(one) == pytest.approx(takes, rel=0.1)


def test_a_budget_by_table_measures_nothing_here(tiny: Tiny, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.assemble.builder.measure_latency", lambda *facts: pytest.fail("measured here"))
    limit = f"budget.latency_table={table}", "budget.latency_ms=6"
    played = Played(tiny("method=fedavg", "fedavg.architecture=smallest", *limit))
    space, foretold = played.tools.space, read_table(table, played.tools.space)
    assert isinstance(space, Bounded) and space.repeatable
    assert all(foretold(space.sample(rng(seed))) <= 6 for seed in range(10))
    assert Played(tiny("method=fedavg", "fedavg.architecture=random", *limit)).state.architecture  # repeats, so it is allowed
    tiers = Played(tiny("method=fedavg", f'budget.latency_table=["{table}",""]', "budget.latency_ms=[6,0]")).tools.fleet
    assert tiers and isinstance(tiers.tiers[0].space, Bounded) and not isinstance(tiers.tiers[1].space, Bounded)
    with pytest.raises(InvalidConfig, match=r"budget.latency_ms\[0\]"):
        Played(tiny("method=fedavg", "fedavg.architecture=largest", f'budget.latency_table=["{table}",""]', "budget.latency_ms=[6,0]"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "{}", "is not a latency table"),
        (lambda text: "what", "is not a latency table"),
        (lambda text: text.replace("table 1", "table 9"), "it is none"),
        (lambda text: text.replace("mobilenetv3", "darts"), "--size 8 --channels 1 --classes 10"),
        (lambda text: json.dumps({**json.loads(text), "weights": ["a"] * len(json.loads(text)["weights"])}), "no numbers"),
        (lambda text: json.dumps({**json.loads(text), "weights": [1.0]}), "was measured for another space"),
    ],
)
def test_other_files_are_refused(change: Callable[[str], str], words: str, played: Played, table: Path) -> None:
    table.write_text(change(table.read_text()))
    with pytest.raises(InvalidConfig, match=words):
        read_table(table, played.tools.space)
    table.unlink()
    with pytest.raises(InvalidConfig, match="There is no latency table"):
        read_table(table, played.tools.space)


def test_the_command(fedloom_: Fedloom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.commands.latency.measure_latency", lambda supernet, architecture, device: 2.0)
    shape = "--size", 8, "--channels", 1, "--out", tmp_path / "phone.json"
    outcome = fedloom_("latency", "quickstart", "--count", 20, *shape)
    assert outcome.code == 0 and "22 networks of mobilenetv3 took 2.00 ms on average" in outcome.out
    assert json.loads((tmp_path / "phone.json").read_text())["image"] == [1, 8, 10]
    check_refused(fedloom_("latency", "quickstart", *shape), InvalidConfig, "exists. Choose another --out")
