"""The tables of methods at scale in docs/explain/numbers.md are what the records say, and published rows stand apart from ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import baselines
import pytest
import recipe

from fedloom.core.errors import DamagedRun
from fedloom.files import ORDER
from fedloom.report.published import TITLE, published_beside
from support.report import ENVIRONMENT, made_up_run

ROOT = Path(__file__).parents[3]
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("baselines-*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_record_is_on_the_page(path: Path) -> None:
    record, page = json.loads(path.read_text()), (ROOT / "docs" / "explain" / "numbers.md").read_text()
    assert baselines.table(record) in page, f"print it with benchmarks/baselines.py --tables {path.stem}"
    assert path.name in page and record["command"] and record["environment"]["commit"][:7] in page


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """A comparison of three methods, of which one has not come to its end, and whose last part had more threads."""
    place = tmp_path / "compared"
    made_up_run(place / "fedavg-0", "fedavg", accuracies=(0.5, 0.6, 0.7, 0.8))
    other = {**ENVIRONMENT, "threads": 4}
    made_up_run(place / "ditto-0", "ditto", accuracies=(0.6, 0.7, 0.8, 0.9), overrides=["ditto.pull=0.5"], environment=other)
    made_up_run(place / "fedrep-0", "fedrep", finished=False)
    (place / ORDER).write_text(json.dumps({"methods": ["fedavg", "ditto", "fedrep"]}))
    return place


def test_a_comparison_becomes_a_record(compared: Path) -> None:
    record = baselines.record_of(compared)
    assert list(record["methods"]) == ["fedavg", "ditto"] and record["unfinished"] == ["fedrep-0"]
    ditto = record["methods"]["ditto"]["0"]
    assert ditto["accuracy"] == {"client-000": 0.6, "client-001": 0.7, "client-002": 0.8, "client-003": 0.9}
    assert ditto["seconds"] == 12.5 and ditto["bytes_up"] > 0 and ditto["environment"] == {"threads": 4}
    assert "environment" not in record["methods"]["fedavg"]["0"] and record["environment"] == ENVIRONMENT
    assert record["settings"]["clients"] == 4 and record["settings"]["split.rule"] == "plato"
    assert not [key for key in record["settings"] if key.partition(".")[0] in ("fedavg", "ditto", "run", "data") and "folder" in key]
    assert record["own_settings"]["ditto"]["ditto.pull"] == 0.5 and not [key for key in record["own_settings"]["fedavg"] if "ditto" in key]


def test_a_record_becomes_a_table_in_which_published_rows_stand_apart(compared: Path) -> None:
    record = json.loads(json.dumps({**baselines.record_of(compared), "dataset": "cifar10"}))
    ours, theirs = baselines.table(record).split(f"{TITLE}.")
    assert "| ditto | 75.00 ± 11.18 |" in ours and "+10.00" in ours and "p, Holm" in ours and "fedrep" not in ours
    rows = published_beside({"cifar10"}, (), ["fedavg", "ditto"])
    assert len(rows) > 4 and all(f"| {one.method} | {one.what} | {one.shown} | cifar10 | {one.source} |" in theirs for one in rows)
    assert not [one for one in rows if one.shown in ours or one.source in ours]


def test_runs_on_different_splits_are_refused(compared: Path) -> None:
    made_up_run(compared / "local-0", "local", overrides=["split.size=30"])
    with pytest.raises(DamagedRun, match="different splits"):
        baselines.record_of(compared)


def test_records_are_printed_and_written(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (recipe, baselines):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["baselines.py", str(compared), "baselines-mine", "--command", "fedloom compare mine", "--commit", "abc"]
    )
    baselines.main()
    record = json.loads((tmp_path / "baselines-mine.json").read_text())
    assert record["command"] == "fedloom compare mine" and record["environment"]["commit"] == "abc"
    told = capsys.readouterr().out
    assert baselines.table(record) in told and "fedrep-0 has no result" in told
    monkeypatch.setattr("sys.argv", ["baselines.py", "--tables"])
    baselines.main()
    assert f"baselines-mine: fedloom compare mine\n\n{baselines.table(record)}\n" in capsys.readouterr().out


def test_a_comparison_can_be_made_in_pieces(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recipe, baselines):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    words = ["baselines.py", str(compared), "baselines-mine", "--commit"]
    monkeypatch.setattr("sys.argv", [*words, "one", "--command", "first"])
    baselines.main()
    shutil.rmtree(compared / "ditto-0")
    made_up_run(compared / "local-0", "local", accuracies=(0.1, 0.2, 0.3, 0.4))
    (compared / ORDER).write_text(json.dumps({"methods": ["fedavg", "fedrep", "local"]}))
    monkeypatch.setattr("sys.argv", [*words, "two", "--command", "second"])
    baselines.main()
    record = json.loads((tmp_path / "baselines-mine.json").read_text())
    assert list(record["methods"]) == ["fedavg", "ditto", "local"] and record["unfinished"] == ["fedrep-0"]
    assert record["command"] == "first; second" and record["environment"]["commit"] == "two"
    assert record["methods"]["ditto"]["0"]["environment"] == {"commit": "one", "threads": 4}, "where it differs from the rest"
    other = {**record, "settings": {**record["settings"], "rounds": 7}}
    with pytest.raises(SystemExit, match=r"other settings \(rounds\)"):
        baselines.joined(other, record)
