"""What docs/how-to/budgets.md says of a fleet is what was measured, and nobody in the record was over its budget."""

from __future__ import annotations

import json
from pathlib import Path

import fleet

ROOT = Path(__file__).parents[3]
LIMITS = (450e3, 900e3, float("inf"))


def test_the_table_is_that_of_the_record() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "fleet.json").read_text())
    text = (ROOT / "docs" / "how-to" / "budgets.md").read_text()
    assert fleet.table(record) in text, f"The page should have:\n{fleet.table(record)}"
    seeds = sorted({row["seed"] for row in record["rows"]})
    assert len(seeds) >= 2 and len(record["rows"]) == len(seeds) * len(fleet.NAMES), "every method has every seed"
    case = fleet.CASES["quickstart"]
    assert record["budget"] == [case.budget, case.part]
    for row in record["rows"]:
        assert all(most <= limit for most, limit in zip(row["most_macs"], LIMITS, strict=True)), row
        if row["method"] == "perfedsde":  # float32, of 80,000, 140,000 and all 253,298 parameters; drift sends at most as many again
            assert row["bytes_down"][0] <= 8 * 80e3 and row["bytes_down"][1] <= 8 * 140e3 < row["bytes_down"][2]
