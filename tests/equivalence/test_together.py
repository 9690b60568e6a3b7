"""Clients that answer together: runs that are repeated, settings that are refused. Every method by itself: fedloom.testing.together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.core.errors import ClientFailed, InvalidConfig
from fedloom.engine.inline import ON_A_GPU, InlineSettings
from fedloom.engine.run import Watcher
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import FixedNetwork
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.local import Local
from fedloom.testing import Played
from fedloom.training.local import Trainer
from fedloom.training.scoring import Scorer
from support.perfedsde import ANCHORED

Content = Callable[[Path], dict[str, Any]]
Tiny = Callable[..., Settings]


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["auto", "masked"])
@pytest.mark.parametrize("method", list(METHODS))
def test_ten_runs_are_equal(method: str, execution: str, tiny: Tiny, nobody: Watcher, content: Content, tmp_path: Path) -> None:
    """Bit for bit: results do not depend on when a thread runs."""
    settings = tiny(f"method={method}", "inline.together=3", f"training.execution={execution}", "run.folder=somewhere")
    new_run(settings, tmp_path / "first", nobody)
    first = content(tmp_path / "first")
    for number in range(9):
        new_run(settings, tmp_path / str(number), nobody)
        assert content(tmp_path / str(number)) == first


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name, entry in METHODS.items() if issubclass(entry.make, FixedNetwork | Local | HeteroFL)])
def test_stacks_in_half_precision_keep_weights_in_full(method: str, tiny: Tiny) -> None:
    """As on a GPU by default, but on a CPU: nothing that a method computes itself meets numbers of the other precision."""
    small = ("clients=4", "participants=3", "rounds=3", "split.size=40", "training.batch=12")
    played = Played(tiny(f"method={method}", "training.precision=half", "training.execution=masked", *small))
    answers = [answer for _ in range(0 if method == "local" else 3) for answer in played.round()]
    arrays = [array for answer in answers for array in answer.report.arrays.get("update", {}).values()]
    arrays += [array for answer in answers for array in answer.memory.arrays.values()]
    for client in played.federation.names:
        model = played.farewell(client).model
        assert model is not None
        arrays += list(model.arrays.values())
    assert {str(array.dtype) for array in arrays} <= {"float32", "int32"} and all(np.isfinite(array).all() for array in arrays)


RACE, ANCHOR = ("perfedsde.racing=0.5",), (*ANCHORED, "perfedsde.warmup=0.5")


@pytest.mark.parametrize(
    ("changes", "execution"),
    [
        pytest.param(RACE, "masked", id="race-masked"),
        pytest.param(ANCHOR, "auto", id="anchor-auto"),
        pytest.param(RACE, "auto", id="race-auto", marks=pytest.mark.slow),
        pytest.param(ANCHOR, "masked", id="anchor-masked", marks=pytest.mark.slow),
    ],
)
def test_two_runs_are_equal(
    changes: tuple[str, ...], execution: str, tiny: Tiny, nobody: Watcher, content: Content, tmp_path: Path
) -> None:
    settings = tiny("inline.together=3", *changes, f"training.execution={execution}", "run.folder=somewhere")
    for name in ("one", "two"):
        new_run(settings, tmp_path / name, nobody)
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_clients_really_are_served_together(tiny: Tiny, nobody: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the comparisons would compare a way with itself."""
    sizes: dict[str, list[int]] = {"train": [], "score": []}
    train, score = Trainer._train_supernets, Scorer.score_many

    def training(self: Trainer, jobs: Any) -> Any:
        sizes["train"].append(len(jobs))
        return train(self, jobs)

    def scoring(self: Scorer, requests: Any) -> Any:
        sizes["score"].append(len(requests))
        return score(self, requests)

    monkeypatch.setattr(Trainer, "_train_supernets", training)
    monkeypatch.setattr(Scorer, "score_many", scoring)
    new_run(tiny("participants=3", "inline.together=2"), tmp_path / "run", nobody)
    assert set(sizes["train"]) == {1, 2} and set(sizes["score"]) == {1, 2}  # three clients, two at a time


def test_who_fails_among_others_is_named(tiny: Tiny, nobody: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the work that fails is that of several."""

    def broken(self: Trainer, jobs: Any) -> Any:
        raise ZeroDivisionError("no data")

    monkeypatch.setattr(Trainer, "_train_supernets", broken)
    with pytest.raises(ClientFailed, match=r"^client-00\d, round 0: ZeroDivisionError: no data"):
        new_run(tiny("inline.together=3"), tmp_path / "run", nobody)


# -- settings --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change, said",
    [
        ("inline.together=-1", "inline.together must be at least 0"),
        ("inline.together=1.5", "inline.together"),
        ("training.precision=foo", r"training.precision.*(full|half|auto)"),
        ("training.execution=foo", r"training.execution.*(sliced|masked)"),
    ],
)
def test_settings_that_mean_nothing_are_refused(change: str, said: str, tiny: Tiny) -> None:
    with pytest.raises(InvalidConfig, match=said):
        tiny(change)


def test_half_precision_needs_a_gpu(tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    """On a CPU it would be slower, and sliced networks would ignore it. The folder is not touched."""
    with pytest.raises(InvalidConfig, match=r"training.precision=half needs a GPU.*Set training.precision=auto"):
        new_run(tiny("training.precision=half"), tmp_path / "run", nobody)
    assert not (tmp_path / "run").exists()
    assert new_run(tiny("training.precision=full", "method=local", "clients=2"), tmp_path / "run", nobody).finished


def test_how_many_at_once() -> None:
    assert InlineSettings().at_once(gpu=False) == 1 and InlineSettings().at_once(gpu=True) == ON_A_GPU
    assert [InlineSettings(together=7).at_once(gpu) for gpu in (False, True)] == [7, 7]
    assert [InlineSettings(together=7, reference=True).at_once(gpu) for gpu in (False, True)] == [1, 1]
