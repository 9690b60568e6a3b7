"""Fedloom from Python: the same runs as by command, and what they left as rows or data frames."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedloom
from fedloom import api, comparing
from fedloom.core.errors import DamagedRun, FedloomError, InvalidConfig


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The runs of a comparison without a process each, which would have to load torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", None)  # whether it is installed here or not
    monkeypatch.setattr(comparing, "execute", lambda runs, jobs, view, minutes: comparing.execute_side_by_side(runs, len(runs), view))


def test_the_package_itself_is_loaded_at_once() -> None:
    """Torch takes seconds, and `fedloom --help` and who wants the version need none of it."""
    code = "import fedloom, sys; print(fedloom.__version__, 'torch' in sys.modules, 'run' in dir(fedloom))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == f"{fedloom.__version__} False True\n"
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        fedloom.runs  # noqa: B018


@pytest.mark.usefixtures("in_this_process")
def test_a_run(tiny_file: Path, tmp_path: Path) -> None:
    heard: list[str] = []
    kinds = ("begin", "stage", "participation", "round_done", "end")
    watcher: Any = SimpleNamespace(**{kind: lambda *facts, kind=kind: heard.append(kind) for kind in kinds})
    result = fedloom.run(str(tiny_file), method="fedavg", seed=3, training={"rate": 0.05}, watcher=watcher)
    assert result.folder == Path("runs/tiny") and heard[0] == "begin" and heard[-1] == "end" and heard.count("round_done") == 2
    written = json.loads((tmp_path / "runs/tiny/result.json").read_text())
    assert written["method"] == "fedavg" and written["seed"] == 3 and "rate = 0.05" in (result.folder / "config.toml").read_text()
    assert result.clients == written["clients"] and result.accuracy == written["accuracy"] and result.facts == written
    ledger = [json.loads(line) for line in (result.folder / "ledger.jsonl").read_text().splitlines()]
    assert len(result.ledger) == len(ledger)
    row, entry = result.ledger[0], ledger[0]
    assert row["client"] == entry["client"] and row["seconds.train"] == entry["seconds"]["train"] and row["uploads"] == "examples, update"
    assert row["upload_bytes.update"] == entry["upload_bytes"]["update"] and "seconds" not in row
    network, facts = result.model("client-000")
    assert network(torch.zeros(1, 1, 8, 8)).shape == (1, len(facts["classes"]))
    again = fedloom.Result("runs/tiny")  # any run folder
    assert again.accuracy == result.accuracy and again == result
    assert fedloom.run(str(tiny_file), method="local", folder=tmp_path / "there").folder == tmp_path / "there"


def test_tables_are_data_frames_where_pandas_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: ("frame", rows)))
    assert api.table([{"a": 1}]) == ("frame", [{"a": 1}])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rounds": 3, "method": "fedavg"}, ["rounds=3", 'method="fedavg"']),
        ({"split": {"alpha": 0.3}, "run": {"track": False}}, ["split.alpha=0.3", "run.track=false"]),
        ({"plugins": ("a.py",), "weights": Path("w")}, ['plugins=["a.py"]', 'weights="w"']),
        ({"training.rate": 0.1}, ["training.rate=0.1"]),
    ],
)
def test_settings_as_on_the_command_line(settings: dict[str, Any], expected: list[str]) -> None:
    assert api.overrides(settings) == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rouns": 3}, "Did you mean 'rounds'"),
        ({"split": {"alpha": None}}, "split.alpha must be a number, text"),
        ({"weights": torch.zeros(1)}, "weights must be a number, text"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=said):
        fedloom.run("quickstart", folder=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_what_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(DamagedRun, match=f"`fedloom resume {tmp_path}` goes on"):
        fedloom.Result(tmp_path).clients  # noqa: B018


@pytest.mark.usefixtures("in_this_process")
def test_a_comparison(tiny_file: Path, tmp_path: Path) -> None:
    found = fedloom.compare(str(tiny_file), methods=["fedavg", "local"], run={"folder": "both"})
    assert found.folder == Path("both") and not found.failures
    fedavg, local = found.methods
    assert (fedavg["method"], local["method"]) == ("fedavg", "local") and fedavg["difference_mean"] is None
    accuracies = {row["method"]: row["accuracy"]["mean"] for row in (result.facts for result in found.results)}
    assert local["difference_mean"] == pytest.approx(accuracies["local"] - accuracies["fedavg"]) and local["difference_pairs"] == 3
    assert [(row["method"], row["name"]) for row in found.clients][:3] == [("fedavg", f"client-00{number}") for number in range(3)]
    found.write("table.tex")
    assert r"\begin{tabular}" in (tmp_path / "table.tex").read_text()
    with pytest.raises(InvalidConfig, match="names no kind of table"):
        found.write("table.doc")


@pytest.mark.usefixtures("in_this_process")
def test_a_comparison_where_runs_fail(tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(fails: Callable[[comparing.PlannedRun], bool]) -> Any:
        def run(runs: Sequence[comparing.PlannedRun], jobs: int, view: Any, minutes: float) -> list[comparing.Failure]:
            comparing.execute_side_by_side([one for one in runs if not fails(one)], 1, view)
            return [comparing.Failure(one, 7, "it broke") for one in runs if fails(one)]

        return run

    monkeypatch.setattr(comparing, "execute", execute(lambda run: run.method == "local"))
    found = fedloom.compare(str(tiny_file), methods=["fedavg", "local"])
    assert [failure.reason for failure in found.failures] == ["it broke"] and len(found.results) == 1
    monkeypatch.setattr(comparing, "execute", execute(lambda run: True))
    with pytest.raises(FedloomError, match="1 of 1 runs failed, first local-0: it broke"):
        fedloom.compare(str(tiny_file), methods=["local"])
