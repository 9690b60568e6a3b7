"""Comparisons over the values of a setting, and the tables that they write."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom import comparing, config
from fedloom.comparing import Sweep
from fedloom.core.errors import InvalidConfig, UnusableFolder
from fedloom.core.progress import Moment
from fedloom.report.comparison import comparison_card, sweep_card
from fedloom.report.comparison_files import courses_file, table_file
from fedloom.report.terminal.comparison import comparison_notes
from support.checks import Fedloom, check_refused


def made(*accuracies: float, best: float | None = None) -> dict[str, Any]:
    clients = [{"name": f"client-{number}", "test_accuracy": accuracy} for number, accuracy in enumerate(accuracies)]
    statistics = {"last_participation_mean": 0.5, "last_participation_std": 0.25, "best_ever_mean": best, "best_ever_std": 0.05}
    accuracy = {"mean": sum(accuracies) / len(accuracies), "std": 0.1, **(statistics if best else {})}
    return {"accuracy": accuracy, "clients": clients, "cost": {"seconds": 10.0, "bytes_up": 3_000_000}}


LOW, HIGH = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95), (0.55, 0.66, 0.77, 0.88, 0.99, 1.0)
RESULTS = {"fedavg": {0: made(*LOW, best=0.9)}, "fed_rep": {0: made(*HIGH, best=0.95)}, "local": {0: made(*reversed(LOW), best=0.8)}}


# -- sweeps -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "values", "folders"),
    [
        ("split.alpha=0.1, 0.3,1", ("0.1", "0.3", "1"), ("split.alpha=0.1", "split.alpha=0.3", "split.alpha=1")),
        ("space=darts,nasvit", ('"darts"', '"nasvit"'), ("space=darts", "space=nasvit")),
        ("training.flip=true,false", ("true", "false"), ("training.flip=true", "training.flip=false")),
        ("training.rate=0.1,fast", ("0.1", '"fast"'), ("training.rate=0.1", "training.rate=fast")),  # so 0.1 is not the one to refuse
        ("darts.x=[1, 2],[2]", ("[1, 2]", "[2]"), ()),  # digests
    ],
)
def test_values_of_a_sweep(text: str, values: tuple[str, ...], folders: tuple[str, ...]) -> None:
    sweep = Sweep.read(text)
    assert sweep.values == values
    found = tuple(map(sweep.folder, values))
    assert found == folders or ("[" in text and len(set(found)) == 2 and all(re.fullmatch(r"darts\.x=\w{12}", one) for one in found))


def test_every_value_has_its_runs_and_its_block(orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path, tmp_path: Path) -> None:
    orders({"local-0": {"accuracies": [0.75, 1.0]}})
    command = ("compare", tiny_file, "--methods", "fedavg,local", "--over", "split.alpha=0.1,1", "--jobs", 2)
    shown = fedloom_(*command, "--table", "all.csv", "--table", "all.md", "--table", "all.tex")
    assert shown.code == 0, shown.err
    base = tmp_path / "runs" / "compare-tiny"
    assert sorted(str(path.parent.relative_to(base)) for path in base.rglob("result.json")) == [
        *("split.alpha=0.1/fedavg-0", "split.alpha=0.1/local-0", "split.alpha=1/fedavg-0", "split.alpha=1/local-0"),
    ]
    assert re.findall(r"^split.alpha = (\S+)$", shown.out, re.MULTILINE) == ["0.1", "1"] and "split.alpha=1/local-0: " in shown.out
    assert "corrected for 2 comparisons (Holm)" in shown.out
    rows = list(csv.DictReader((tmp_path / "all.csv").open()))
    assert [(row["split.alpha"], row["method"], row["difference_points"]) for row in rows] == [
        *(("0.1", "fedavg", ""), ("0.1", "local", "25.000"), ("1", "fedavg", ""), ("1", "local", "25.000")),
    ]
    assert (tmp_path / "all.md").read_text().startswith("| split.alpha | method |")

    # the runs are there now, and are not made again
    for run in comparing.plan(str(tiny_file), [], ["fedavg", "local"], 1, Sweep.read("split.alpha=0.1,1")):
        assert config.load(run.command[4], run.command[5:]).split.alpha == float(run.value)
        (run.folder / "config.toml").write_text(config.to_toml(config.load(run.command[4], run.command[5:])))
    again = fedloom_(*command, "--json")
    card = json.loads(again.out)
    assert again.err.count("finished before") == 4 and [block["value"] for block in card["blocks"]] == ["0.1", "1"]
    assert card["over"] == "split.alpha" and card["folder"] == "runs/compare-tiny"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--over", "split.alpha"], ["names no values"]),
        (["--over", "method=local,fedavg"], ["cannot change method", "--methods"]),
        (["--over", "seed=1,2"], ["cannot change seed", "--seeds"]),
        (["--over", "split.alpha=1,1"], ["has 1 twice"]),
        (["--over", "split.alpha=1,2", "split.alpha=3"], ["split.alpha is set and swept over"]),
        (["--over", "split.alfa=1,2"], ["Unknown key", "alpha"]),
        (["--over", "split.alpha=0.3,abc"], ["split.alpha must be a number, got 'abc'"]),
        (["--over", "split.alpha=0.3,,1"], ["split.alpha must be a number, got ''"]),
        (["--table", "all.xls"], ["all.xls names no kind of table", ".csv, .md, .tex"]),
        (["--courses", "all.txt"], ["--courses all.txt must end in .csv"]),
    ],
)
def test_refusals(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    check_refused(fedloom_("compare", tiny_file, "--methods", "local", *arguments), InvalidConfig, *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--table", "--courses"])
def test_a_file_that_cannot_be_written_is_refused_before_the_runs(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.csv").mkdir()
    for place, why in (("file/all.csv", "is not a folder"), ("folder.csv", "it is a folder")):
        check_refused(fedloom_("compare", tiny_file, "--methods", "local", option, place), UnusableFolder, place, why, "another place")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.csv"] and (tmp_path / "file").read_text() == "mine"


# -- corrections ----------------------------------------------------------------------------------------------
def test_all_differences_of_a_table_are_corrected_together() -> None:
    """Six pairs of one sign have p = 2 / 64; the clearest of two comparisons counts twice, that of eight in four blocks eight times."""
    _, better, mixed = (method["difference"] for method in comparison_card(RESULTS)["methods"])
    assert better["p"] == pytest.approx(2 / 64) and better["p_holm"] == pytest.approx(4 / 64)
    assert mixed["p"] == mixed["p_holm"] == 1
    swept = sweep_card("split.alpha", {value: RESULTS for value in ("0.1", "0.3", "1", "10")})
    assert swept["blocks"][0]["methods"][1]["difference"]["p_holm"] == pytest.approx(16 / 64)


# -- files ------------------------------------------------------------------------------------------------------
def test_three_kinds_of_one_table() -> None:
    card = comparison_card(RESULTS)
    numbers = list(csv.DictReader(table_file(Path("t.csv"), card).splitlines()))
    assert numbers[1]["method"] == "fed_rep" and numbers[1]["accuracy_percent"] == "80.833" and numbers[1]["best_ever_mean"] == "95.000"
    assert (numbers[1]["p"], numbers[1]["p_holm"], numbers[0]["p"]) == ("0.031250", "0.062500", "")
    assert (numbers[1]["last_participation_mean"], numbers[1]["last_participation_std"]) == ("50.000", "25.000")
    text = table_file(Path("t.md"), card)
    assert "| fed_rep | 80.83 ± 10.00 | 50.00 ± 25.00 | 95.00 ± 5.00 | 10 | 3.0 | +6.67 | " in text and "± seeds" not in text
    assert "corrected for 2 comparisons (Holm)" in text and "they select nothing here" in text
    latex = table_file(Path("t.tex"), card)
    assert r"fed\_rep & 80.83 $\pm$ 10.00 & " in latex and r"95 \% interval" in latex
    begin, *lines, end = [line for line in latex.splitlines() if not line.startswith("%")]
    assert begin == r"\begin{tabular}{lrrrrrrrr}" and end == r"\end{tabular}"
    assert {line.count(" & ") for line in lines if line != r"\hline"} == {8}


def test_a_mean_over_fewer_seeds_says_so() -> None:
    """Seed 1 of local failed: its mean is of seed 0 alone, which no column shows."""
    results = {"fedavg": {0: made(0.5), 1: made(0.6)}, "local": {0: made(0.5)}}
    told = "Runs failed, so not every mean is over all seeds: local{} without seed 1."
    assert told.format("") in comparison_notes(comparison_card(results))
    swept = sweep_card("split.alpha", {"0.1": results, "1": {"fedavg": {0: made(0.5)}, "local": {0: made(0.4)}}})
    for ending in ("md", "tex"):
        assert told.format(" at split.alpha = 0.1") in table_file(Path(f"t.{ending}"), swept)
    whole = comparison_card({method: {0: runs[0]} for method, runs in results.items()})
    assert "Runs failed" not in comparison_notes(whole) + table_file(Path("t.md"), whole)


def test_a_failed_method_and_results_of_earlier_versions() -> None:
    card = comparison_card({"fedavg": {}, "local": {0: made(0.5)}})
    assert "| fedavg | failed |" in table_file(Path("t.md"), card) and "best ever" not in table_file(Path("t.md"), card)
    assert table_file(Path("t.csv"), card).splitlines()[1].startswith("fedavg,0,,")


def test_courses() -> None:
    moments = [Moment(1, 2.0, 0.5, 3, 4.0, 10, 20), Moment(2, 3.0, 0.75, 4, 8.0, 30, 40)]
    rows = list(csv.DictReader(courses_file({("0.1", "fedavg", 7): moments}, "split.alpha").splitlines()))
    assert rows[1] == {
        **{"split.alpha": "0.1", "method": "fedavg", "seed": "7", "round": "2", "accuracy_percent": "75.000", "clients": "4"},
        **{"seconds": "8.0", "simulated_seconds": "3.0", "bytes_up": "30", "bytes_down": "40"},
    }
    assert (
        courses_file({("", "fedavg", 0): []})
        == "method,seed,round,accuracy_percent,clients,seconds,simulated_seconds,bytes_up,bytes_down\n"
    )
