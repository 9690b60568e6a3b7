"""What docs/explain/secure.md says of the cost is what was measured, and within what was promised."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import secure

ROOT = Path(__file__).parents[3]


def test_the_table_is_that_of_the_record() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "secure.json").read_text())
    assert list(record["clients"]) == ["3", "10", "50"]
    text = (ROOT / "docs" / "explain" / "secure.md").read_text()
    assert secure.table(record) in text, f"The page should have:\n{secure.table(record)}"
    for own in record["clients"].values():
        assert own["within"], "at most twice the bytes, and two seconds of masking"
        assert own["entries"] > 6_400_000
        assert own.get("farthest_from_plain", 0) <= own.get("step", 1) / 2 + 2**-24  # and float32's own


def test_the_accuracies_are_those_of_the_records() -> None:
    rows = [json.loads((ROOT / f"benchmarks/results/quickstart-{name}.json").read_text())["rows"] for name in ("secure", "equal")]
    (one, other) = ({row["seed"]: 100 * row["mean"] for row in own} for own in rows)
    gaps = [one[seed] - other[seed] for seed in sorted(one)]
    assert sorted(one) == sorted(other) == [0, 1, 2]
    mean, wide = statistics.mean(gaps), 4.303 * statistics.stdev(gaps) / 3**0.5  # of Student's distribution, two degrees of freedom
    text = " ".join((ROOT / "docs" / "explain" / "secure.md").read_text().split())
    assert f"{statistics.mean(one.values()):.2f} %, against {statistics.mean(other.values()):.2f} %" in text
    assert f"{-mean:.2f} points less, 95 % interval of the paired difference from {wide - mean:.2f} less to {wide + mean:.2f} more" in text
