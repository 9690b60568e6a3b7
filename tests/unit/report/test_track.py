"""Scalars for TensorBoard: what the ledger has, by round, also over a resume."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.errors import UnusableFormat
from support.checks import Fedloom, check_refused

pytest.importorskip("tensorboard")


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


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
    real: Callable[..., Any] = builtins.__import__

    def missing(name: str, *others: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ImportError(name)
        return real(name, *others)

    monkeypatch.setattr(builtins, "__import__", missing)
    check_refused(fedloom_("run", tiny_file, "run.folder=run", "run.track=true"), UnusableFormat, "pip install 'fedloom[track]'")
    assert not (tmp_path / "run").exists()
