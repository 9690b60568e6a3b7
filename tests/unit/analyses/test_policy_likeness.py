"""Likeness of policies against divergence of labels, by hand-computed values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedloom.analyses.policies import divergences, grouped, likenesses
from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.core.errors import InvalidConfig
from fedloom.engine.run import Watcher
from fedloom.maths.ranking import above_diagonal, mantel
from support.checks import Fedloom, check_refused

Tiny = Callable[..., Settings]


def test_divergence_of_labels() -> None:
    # with one added to each class: shares (3/4, 1/4), (1/4, 3/4) and (3/4, 1/4)
    found = divergences([np.array([2, 0]), np.array([0, 2]), np.array([5, 1])])
    apart = 0.75 * np.log(3) + 0.25 * np.log(1 / 3)
    assert found == pytest.approx(np.array([[0, apart, 0], [apart, 0, apart], [0, apart, 0]]))


def test_likeness_of_policies() -> None:
    sure, other, unsure = np.array([[1.0, 0], [0, 1]]), np.array([[1.0, 0], [1, 0]]), np.full((2, 2), 0.5)
    assert likenesses([sure, other, unsure]).tolist() == [[1.0, 0.5, 0.5], [0.5, 1.0, 0.5], [0.5, 0.5, 0.5]]


def test_groups_of_pairs() -> None:
    found = grouped(np.array([5.0, 1, 2, 3, 4, 0]), np.array([0.0, 1, 2, 3, 4, 6]))
    assert [(group.pairs, group.divergence, group.likeness) for group in found] == [
        (2, 0.5, 3.5),
        (1, 2, 2),
        (1, 3, 3),
        (1, 4, 4),
        (1, 5, 0),
    ]
    assert len(grouped(np.array([1.0]), np.array([1.0]))) == 1


def test_mantel() -> None:
    assert above_diagonal(np.arange(9.0).reshape(3, 3)).tolist() == [1, 2, 5]
    draw = np.random.default_rng(0)
    places = draw.normal(size=(12, 3))
    apart = np.linalg.norm(places[:, None] - places[None], axis=-1)
    correlation, p = mantel(apart, -apart, 199, np.random.default_rng(1))
    assert correlation == -1 and p == 1 / 200  # no relabelling is as extreme
    correlation, p = mantel(apart, apart, 199, np.random.default_rng(1))
    assert correlation == 1 and p == 1  # all are as low
    assert mantel(apart, np.ones((12, 12)), 9, draw) == (None, None)
    chances = [mantel(apart, _random(draw), 99, draw)[1] for _ in range(40)]
    assert 0.3 < np.mean([chance for chance in chances if chance is not None]) < 0.7  # unrelated: uniform


def _random(draw: np.random.Generator) -> np.ndarray:
    square = draw.normal(size=(12, 12))
    return square + square.T


def test_the_command(tiny: Tiny, nobody: Watcher, fedloom_: Fedloom, tmp_path: Path) -> None:
    new_run(tiny("method=perfedrlnas", "clients=4", "participants=4"), tmp_path / "run", nobody)
    outcome = fedloom_("analyse", "policies", tmp_path / "run", "--out", "there")
    assert outcome.code == 0 and "rank correlation" in outcome.out
    written = json.loads(Path("there/policies.json").read_text())
    assert written["schema"] == "fedloom.policies/1" and len(written["clients"]) == 4
    assert len(written["divergences"]) == len(written["likenesses"]) == 6 == sum(group["pairs"] for group in written["groups"])
    assert sorted(path.name for path in Path("there").iterdir()) == ["policies.json", "policies.png", "policies.svg"]


def test_runs_without_enough_policies_are_refused(tiny: Tiny, nobody: Watcher, fedloom_: Fedloom, tmp_path: Path) -> None:
    new_run(tiny("method=fedavg"), tmp_path / "fedavg", nobody)
    check_refused(fedloom_("analyse", "policies", tmp_path / "fedavg"), InvalidConfig, "no policies", "method=perfedrlnas")
    new_run(tiny("method=perfedrlnas", "participants=1", "rounds=1"), tmp_path / "few", nobody)
    check_refused(fedloom_("analyse", "policies", tmp_path / "few"), InvalidConfig, "policies of 1 clients", "Run more rounds")
