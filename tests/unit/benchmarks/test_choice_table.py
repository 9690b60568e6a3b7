"""Means over runs of what a choice could give, and the records on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import choice
import numpy as np
import pytest

from fedloom.maths import choosing

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def row(points: float, own: float) -> dict[str, Any]:
    figures, ends = dict.fromkeys(choice.ROWS, points), {name: [-0.5, 9.5] for name in choice.ROWS}
    variances = {"architectures": 1.0, "own": own, "error": 4.0}
    return {"architectures": 3, "clients": 7, "points": figures, "intervals": ends, "variances": variances, "tested": 90.0}


def test_every_record_is_on_the_page() -> None:
    page = (ROOT / "docs" / "explain" / "search.md").read_text()
    for path in sorted(RESULTS.glob("choice-*.json")):
        assert choice.table(json.loads(path.read_text())) in page, f"print it with benchmarks/choice.py --tables {path.stem}"


def test_means_and_intervals_over_runs() -> None:
    table = choice.table({"rows": [row(1.0, 4.0), row(2.0, 0.0), row(3.0, -1.0)]})
    assert "| any other one, on average | +2.00 | -0.48 to +4.48 |" in table  # 2 ± 4.303 / √3
    mean, low, high = choice.interval([4.0, 0.0, -1.0])
    assert mean == 1.0 and low < 0 < high
    ends = [choosing.ceiling(value, 3) for value in (mean, low, high)]
    assert f"| {ends[0]:+.2f} | +0.00 to {ends[2]:+.2f} |" in table and ends[1] == 0
    assert "over 3 runs" in table and "The first: 90.00 %" in table and "architectures 1.00, own 1.00, error 2.00" in table


def test_of_one_run_intervals_are_over_its_clients() -> None:
    table = choice.table({"rows": [row(1.0, 4.0)]})
    assert "95 % over 7 clients" in table and table.count("| +1.00 | -0.50 to +9.50 |") == len(choice.ROWS)


def test_a_row_is_what_the_measurements_say() -> None:
    draw = np.random.default_rng(0)
    accuracies, losses = draw.random((4, 3, 2, 2)), draw.random((4, 3, 2))
    facts = dict.fromkeys(choice.FACTS, 1)
    made = choice.row_of({**facts, "accuracies": accuracies.tolist(), "losses": losses.tolist()})
    assert made["points"]["another"] == pytest.approx(100 * choosing.another(accuracies))
    assert made["points"]["by_validation_loss"] == pytest.approx(100 * choosing.lowest_loss(accuracies, losses))
    low, high = made["intervals"]["ceiling"]
    assert low <= made["points"]["ceiling"] <= high and set(made["points"]) == set(choice.ROWS)
    assert made["variances"]["own"] == pytest.approx(1e4 * choosing.spread(accuracies).own)
    assert made["tested"] == pytest.approx(100 * accuracies[:, 0].mean()) and made["clients"] == 4 and made["architectures"] == 3
