"""What docs/explain/secure.md says of the cost is what was measured, and within what was promised."""

from __future__ import annotations

import json
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
