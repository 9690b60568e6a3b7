"""The tables of docs/explain/generator-numbers.md: every cell is in a record, and what no record has is said to be missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import generator_tables
import pytest

from fedloom.generator.files import load_generator
from support.generator import CPU, tiny_space

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def quality(**changes: Any) -> dict[str, Any]:
    far = {"genes": {"largest": 0.01234, "mean": 0.005}, "pairs": {"largest": 0.02, "mean": 0.009}}
    one = {"steps": 12, "validity": 1.0, "uniqueness_in_500": 0.999, "novelty": 0.99995, "total_variation": far}
    many, few = one | {"drawn": 2000, "seconds_per_100": 0.00347}, one | {"drawn": 300, "steps": 1000, "seconds_per_100": 1.02}
    chance = {what: {which: {"mean": 0.003, "worst": 0.004} for which in ("largest", "mean")} for what in ("genes", "pairs")}
    found = {
        "samplers": {"dpm": many, "dpm_sde": many, "sde": few, "pc": few},
        "without_the_learned_correction": many,
        "exact": [{"drawn": 2000, **chance}, {"drawn": 300, **chance}],
    }
    return found | changes


def written(folder: Path, name: str, record: dict[str, Any]) -> Path:
    (folder / f"{name}.json").write_text(json.dumps(record))
    return folder


def cells(table: str, *starts: str) -> list[list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [line for line in lines if line[: len(starts)] == list(starts)]


def test_the_page_shows_what_the_records_say() -> None:
    page = (ROOT / "docs" / "explain" / "generator-numbers.md").read_text()
    for table in (generator_tables.quality_table(RESULTS), generator_tables.guidance_table(RESULTS)):
        assert table in page, "make the table again with benchmarks/generator_tables.py"


@pytest.mark.parametrize("name", ["mobilenetv3", "darts", "nasvit"])
def test_records_are_of_the_generators_that_are_shipped(name: str) -> None:
    """Guidance was measured at the strength that the file recommends, or at one that the sweep finds no better by a tenth of a point."""
    generator: Any = load_generator(tiny_space(name), "", "", CPU)
    found = json.loads((RESULTS / f"guidance-{name}.json").read_text())
    tried = {float(strength): one["mean"] for strength, one in found["sweep"].items() if strength != "random"}
    assert tried[found["strength"]] == max(tried.values())
    assert tried[found["strength"]] - tried[generator.strength] < 0.001
    for device in ("cpu", "cuda"):
        drawn = json.loads((RESULTS / f"generator-quality-{name}-{device}.json").read_text())["samplers"]["dpm"]
        assert drawn["total_variation"]["genes"]["largest"] == pytest.approx(
            generator.facts["card"]["marginals_total_variation"]["largest"], abs=1e-4
        )


def test_rows_of_quality(tmp_path: Path) -> None:
    written(tmp_path, "generator-quality-darts-cuda", quality())
    share = {"validity": 1.0, "uniqueness_in_500": 0.5, "novelty": 0.0}
    written(tmp_path, "generator-quality-darts-cpu", quality(guided={"digits": share}))
    table = generator_tables.quality_table(tmp_path)
    far = ["0.0123", "0.0050", "0.0200", "0.0090"]
    assert cells(table, "DARTS", "`dpm`, 12 steps") == [
        ["DARTS", "`dpm`, 12 steps", "2,000", "100 %", "99.9 %", "99.995 %", *far, "0.0035", "0.0035"]
    ]
    assert cells(table, "DARTS", "`sde`, 1000 steps")[0][-2:] == ["1.0", "1.0"]
    assert [row[2:7] for row in cells(table, "DARTS", "*exact draws*")] == [
        [number, "", "", "", "0.0030 (0.0040)"] for number in ("2,000", "300")
    ]
    assert cells(table, "DARTS", "`dpm`, guided by digits")[0][2:6] == ["500", "100 %", "50 %", "0 %"]
    assert cells(table, "DARTS", "`dpm`, guided by CIFAR-10")[0][2] == generator_tables.MISSING
    assert cells(table, "NASViT")[0][1] == generator_tables.MISSING


def test_rows_of_guidance(tmp_path: Path) -> None:
    paired = {key: {"mean": -0.001, "low": -0.003, "high": 0.001, "p": 0.25} for key in generator_tables.RIVALS}
    paired["guided by its data - random"] = {"mean": 0.0095, "low": 0.007, "high": 0.012, "p": 7.8e-9}
    arms = {pair.partition(" - ")[2]: {"mean": 0.628} for pair in paired} | {"random": {"mean": 0.6277}}
    written(tmp_path, "guidance-darts", {"arms": arms, "differences": paired})
    table = generator_tables.guidance_table(tmp_path)
    (random,), (largest,) = cells(table, "random architectures"), cells(table, "the largest architecture")
    assert random[1:] == [generator_tables.MISSING, "", "**+0.95** (0.70 to 1.20), p 8·10⁻⁹", "62.77", generator_tables.MISSING, ""]
    assert largest[3:] == ["−0.10 (−0.30 to 0.10), p 0.250", "62.80", generator_tables.MISSING, ""]
