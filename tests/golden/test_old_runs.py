"""Run folders that earlier versions left behind still load, resume and export.

``runs/VERSION-finished`` is whole; ``runs/VERSION-stopped`` was killed in its second round, while a line of its ledger was being written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedloom
from fedloom.assemble import new_run, resume_run
from fedloom.assemble import simulation as assemble
from fedloom.config import Settings
from fedloom.core.result import LedgerEntry
from fedloom.engine.run import Watcher
from fedloom.methods.base import METHODS
from fedloom.models import load_model

RUNS = Path(__file__).parent / "runs"
FINISHED, STOPPED = (sorted(path.name for path in RUNS.glob(f"*-{which}")) for which in ("finished", "stopped"))


class Stop(BaseException):
    """Ends a run as a kill does."""


def copy(name: str, place: Path) -> Path:
    return Path(shutil.copytree(RUNS / name, place / name))


def lines(folder: Path) -> list[str]:
    """Whole lines of the ledger."""
    return [line for line in (folder / "ledger.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]


def listen(method: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    heard: list[tuple[str, int]] = []
    kind: Any = METHODS[method].make
    answer = kind.answer
    monkeypatch.setattr(kind, "answer", lambda self, asked, site: (heard.append((asked.client, asked.round)), answer(self, asked, site))[1])
    return heard


def test_this_version_has_its_runs(tiny: Callable[..., Settings], nobody: Watcher, renew: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    finished, stopped = RUNS / f"{fedloom.__version__}-finished", RUNS / f"{fedloom.__version__}-stopped"
    if renew and not finished.exists():
        environment = assemble.environment
        monkeypatch.setattr(assemble, "environment", lambda device: {**environment(device), "commit": "unknown"})
        new_run(tiny("method=local", "clients=1", "participants=1"), finished, nobody)

        def stop_in_second_round(entry: LedgerEntry) -> None:
            if entry.round == 1:
                raise Stop

        with pytest.raises(Stop):
            watcher = SimpleNamespace(**{**vars(nobody), "participation": stop_in_second_round})
            new_run(tiny("method=fedavg", "clients=2"), stopped, watcher)
        with open(stopped / "ledger.jsonl", "a") as file:
            file.write(lines(stopped)[0][:100])
        for folder in (finished, stopped):
            (folder / "state" / "lock").unlink()
    assert finished.is_dir() and stopped.is_dir(), "see tests/golden/conftest.py"


@pytest.mark.parametrize("name", FINISHED)
def test_a_finished_run_loads(name: str, nobody: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy(name, tmp_path)
    written = json.loads((folder / "result.json").read_text())
    heard = listen(written["method"], monkeypatch)
    result = resume_run(folder, nobody)
    assert heard == [] and result.finished
    again = json.loads(result.to_json())
    assert again["cost"].pop("simulated_seconds") == 0  # nothing was simulated then
    assert again["cost"].pop("scored_macs") == 0  # nor this
    for name in ("last_participation_mean", "last_participation_std"):  # was not told then
        again["accuracy"].pop(name)
    assert {key: again[key] for key in written if key != "environment"} == {key: written[key] for key in written if key != "environment"}
    for path in (RUNS / name).rglob("*"):
        assert path.is_dir() or (folder / path.relative_to(RUNS / name)).read_bytes() == path.read_bytes(), path


@pytest.mark.parametrize("name", FINISHED)
def test_a_personal_model_loads(name: str) -> None:
    (client,) = json.loads((RUNS / name / "result.json").read_text())["clients"]
    network, facts = load_model(RUNS / name / "clients" / client["name"] / "model.safetensors")
    assert facts["architecture"] == client["architecture"] and facts["classes"] == list("0123456789")
    assert sum(parameter.numel() for parameter in network.parameters()) == client["parameters"]
    image = facts["image"]
    logits = network(torch.zeros(2, image["channels"], image["size"], image["size"]))
    assert logits.shape == (2, image["classes"]) and logits.isfinite().all()


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_run_goes_on(name: str, nobody: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy(name, tmp_path)
    before = json.loads((folder / "result.json").read_text())
    done = [line for line in lines(folder) if json.loads(line)["round"] < before["rounds"]]
    assert before["rounds"] == 1 and not before["finished"] and len(done) == 2
    heard = listen(before["method"], monkeypatch)
    result = resume_run(folder, nobody)
    assert result.finished and result.rounds == 2 and len(result.clients) == 2
    assert [round for _, round in heard] == [1, 1, 2, 2]  # the second round and the final participation, not the first round
    kept = [json.loads(line) for line in lines(folder)]
    later = {"tier": 0, "simulated_seconds": 0.0, "late": False, "upload_bytes": {}, "scored_macs": 0, "upload_shapes": {}}
    assert [{**json.loads(old), **later} for old in done] == kept[:2] and len(kept) == 6
    for client in result.clients:
        load_model(folder / "clients" / client.name / "model.safetensors")


def test_they_are_small() -> None:
    assert sum(path.stat().st_size for path in RUNS.rglob("*") if path.is_file()) < 200_000 * max(1, len(FINISHED))
