"""The tables of docs/explain/search.md are what the records say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import recipe

from fedloom import config

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def one(*accuracies: float, left: float = 0.0) -> dict[str, Any]:
    return {"accuracy": {f"client-{n}": value for n, value in enumerate(accuracies)}, "left": left, "gmacs": 1200.0, "seconds": 1.0}


def test_every_record_is_on_the_page() -> None:
    page, names = (ROOT / "docs" / "explain" / "search.md").read_text(), sorted(path.stem for path in RESULTS.glob("recipe-*.json"))
    assert names
    for name in names:
        assert recipe.table(json.loads((RESULTS / f"{name}.json").read_text())) in page, (
            f"print it with benchmarks/recipe.py --tables {name}"
        )


def test_arms_are_paired_with_the_control_over_the_seeds_that_both_have() -> None:
    control = {"0": one(0.5, 0.6), "1": one(0.7, 0.9)}
    record = {"arms": {"control": control, "all": {"0": one(0.6, 0.8, left=0.5), "2": one(0.0, 0.0, left=0.5)}, "alone": {}}}
    *_, first, second = recipe.table(record).splitlines()
    assert first == "| control | 2 | 67.50 |  |  |  |  | 0% | 1,200 |"
    assert second == "| all | 2 | 35.00 | +15.00 | -48.53 to +78.53 | 0.5 | 1 of 1 | 50% | 1,200 |"


@pytest.mark.parametrize("arm", list(recipe.ARMS))
def test_every_arm_is_a_valid_run(arm: str) -> None:
    settings = config.load("quickstart", recipe.changes_of(arm, "quickstart", ["seed=3"]))
    assert settings.seed == 3 and settings.method == {"alone": "local", "control-drift": "scaffold", "control-frozen": "scaffold"}.get(
        arm, "fedavg" if "control" in arm else "perfedsde"
    )


def test_the_second_control_trains_twice_as_long() -> None:
    usual = config.load("quickstart", []).training.epochs
    assert config.load("quickstart", recipe.changes_of("control-twice", "quickstart", [])).training.epochs == 2 * usual


def test_a_record_is_made_in_pieces() -> None:
    def piece(command: str, arms: dict[str, Any], **settings: list[str]) -> dict[str, Any]:
        return {"command": command, "preset": {"rounds": 7, "training.rate": 0.1}, "settings": settings, "environment": {}, "arms": arms}

    before = piece("first", {"control": {"10": one(0.5), "2": one(0.4)}}, control=["method=fedavg"])
    now = piece("second", {"control": {"3": one(0.7), "2": one(0.6)}, "all": {"3": one(0.9)}}, control=["method=fedavg"], all=[])
    both = recipe.joined(before, now)
    assert both["command"] == "first; second" and both["settings"] == {"control": ["method=fedavg"], "all": []}
    assert [*both["arms"]["control"]] == ["2", "3", "10"] and both["arms"]["control"]["2"] == one(0.6)
    assert both["arms"]["all"] == {"3": one(0.9)} and recipe.joined(both, now)["command"] == "first; second"
    with pytest.raises(SystemExit, match="other settings for control"):
        recipe.joined(before, piece("third", {}, control=["method=fedavg", "rounds=5"]))
    with pytest.raises(SystemExit, match=r"another training\.rate, so"):
        recipe.joined(before, {**now, "preset": {"rounds": 7, "training.rate": 0.2}})
    with pytest.raises(SystemExit, match="no word about its preset"):
        recipe.joined({name: value for name, value in before.items() if name != "preset"}, now)


def test_a_record_says_what_its_preset_sets() -> None:
    preset = recipe.preset_of("cifar100")
    assert preset["data.name"] == "cifar100" and preset["split.alpha"] == 0.1 and preset["rounds"] == 200  # own, and of its base
    assert tuple(preset["training.finetune_rates"]) == config.load("cifar100", []).training.finetune_rates
