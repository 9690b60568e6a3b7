"""Scalars for TensorBoard, Weights & Biases and MLflow: what the ledger has, by round."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedloom.config import RunSettings
from fedloom.core.errors import UnusableFormat
from fedloom.report.track import trackers
from support.checks import Fedloom, check_refused


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


@pytest.mark.skipif(not find_spec("tensorboard"), reason="tensorboard is not installed")
def test_what_is_written(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path) -> None:
    assert fedloom_("run", tiny_file, "run.folder=run", "run.track=true").code == 0
    entries = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    found = scalars(tmp_path / "run" / "tensorboard")
    for round in (0, 1):
        own = [entry for entry in entries if entry["round"] == round and not entry["final"]]
        mean = sum(entry["test_accuracy"] for entry in own) / len(own)
        assert found["accuracy/test mean"][round + 1] == pytest.approx(mean)
        assert found["megabytes/up"][round + 1] == pytest.approx(sum(entry["bytes_up"] for entry in own) / 1e6)
        assert found["seconds/train"][round + 1] == pytest.approx(sum(entry["seconds"]["train"] for entry in own), abs=1e-4)
    final = [entry["test_accuracy"] for entry in entries if entry["final"]]
    assert found["personal models/accuracy/test mean"] == {2: pytest.approx(sum(final) / len(final))}


def test_no_tensorboard_is_said_before_anything_is_written(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("torch.utils.tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, package, None)
    for tracker, install in (("tensorboard", "'fedloom[track]'"), ("wandb", "wandb"), ("mlflow", "mlflow")):
        refused = fedloom_("run", tiny_file, "run.folder=run", "run.track=true", f"run.tracker={tracker}")
        check_refused(refused, UnusableFormat, f"pip install {install}, or set run.track=false")
    assert not (tmp_path / "run").exists()


class Service(SimpleNamespace):
    """Stands in for both packages: what was asked of it, in order."""

    def __init__(self) -> None:
        super().__init__(asked=[], info=SimpleNamespace(run_id="number 7"))

    def __getattr__(self, name: str) -> Callable[..., Service]:
        def ask(*values: Any, **named: Any) -> Service:
            self.asked.append((name, *values, named))
            return self

        return ask


def test_weights_and_biases(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    assert fedloom_("run", tiny_file, "run.folder=mine", "run.track=true", "run.tracker=wandb").code == 0
    (begin, first), *logged, end = ((one[0], one[1:]) for one in service.asked)
    assert begin == "init" and first[-1]["name"] == "mine" and first[-1]["resume"] == "allow" and end[0] == "finish"
    assert [(name, facts[-1]["step"]) for name, facts in logged] == [("log", 1), ("log", 2), ("log", 2)]
    entries = [json.loads(line) for line in (tmp_path / "mine" / "ledger.jsonl").read_text().splitlines()]
    final = [entry["test_accuracy"] for entry in entries if entry["final"]]
    assert logged[-1][1][0]["personal models/accuracy/test mean"] == pytest.approx(sum(final) / len(final))


def test_mlflow_goes_on_with_the_run_that_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, "mlflow", service)
    for _ in range(2):
        (tracker,) = trackers(RunSettings(track=True, tracker="mlflow"), tmp_path)
        tracker.begin(2, 1, 0, 0)
        tracker.round_done(1, [])
    starts = [one[-1] for one in service.asked if one[0] == "start_run"]
    assert starts == [{"run_name": tmp_path.name}, {"run_id": "number 7"}]
    assert [one[-1] for one in service.asked if one[0] == "log_metrics"] == [{"step": 1}, {"step": 1}]
    assert trackers(RunSettings(), tmp_path) == []
