"""The table of twenty rounds in the docs is what the records say."""

from __future__ import annotations

import json
from pathlib import Path

import rounds

ROOT = Path(__file__).parents[3]


def test_the_docs_have_the_table_of_the_records() -> None:
    assert rounds.table(ROOT / "benchmarks" / "results") in (ROOT / "docs" / "explain" / "numbers.md").read_text()


def test_a_record_becomes_a_row(tmp_path: Path) -> None:
    record = {
        "rounds": 20,
        "cost": {"seconds": 50.0},
        "median_seconds": {"round": dict.fromkeys(rounds.STAGES, 0.125)},
        "course": [{"round": number, "accuracy": number / 100} for number in range(1, 21)],
        "settings": {"engine": "processes", "processes": {"workers": 5}},
    }
    (tmp_path / "cifar10-paper-nasvit.json").write_text(json.dumps(record))
    first, second, third = rounds.table(tmp_path).splitlines()[2:]
    assert first.startswith("| MobileNetV3 | not measured yet |") and second.startswith("| DARTS | not measured yet |")
    assert third.startswith("| NASViT | 3.0 % | 8.0 % | 13.0 % | 18.0 % | 5 | 2.5 | 0.12 |")
    unfinished = {**record, "rounds": 7, "course": record["course"][:7]}
    (tmp_path / "cifar10-paper-darts.json").write_text(json.dumps(unfinished))
    second = rounds.table(tmp_path).splitlines()[3]
    assert second.startswith("| DARTS | 3.0 % | 6.5 % (2 of 5) |  |  | 5 | 7.1 |")
    assert len({line.count("|") for line in (first, second, third)}) == 1


def test_the_docs_have_the_figure_of_the_records() -> None:
    drawn = rounds.pictures(rounds.curves(ROOT / "benchmarks" / "results"))["svg"]
    assert drawn == (ROOT / "docs" / "explain" / "figures" / "rounds.svg").read_bytes()
