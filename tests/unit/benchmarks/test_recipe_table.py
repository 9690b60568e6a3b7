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
    assert settings.seed == 3 and settings.method == {"alone": "local", "control-drift": "scaffold"}.get(
        arm, "fedavg" if "control" in arm else "perfedsde"
    )


def test_the_second_control_trains_twice_as_long() -> None:
    usual = config.load("quickstart", []).training.epochs
    assert config.load("quickstart", recipe.changes_of("control-twice", "quickstart", [])).training.epochs == 2 * usual
