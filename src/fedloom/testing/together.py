"""Clients that answer together give what each of them gives alone, for every method.

Sliced (``auto`` on a CPU) a run is the same bit for bit. Masked, networks of several clients train in one stack: sums are added in
another order, so what clients report agrees within 5 % of its length, and accuracies within an image or two on the edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedloom.assemble import new_run
from fedloom.core.method import Answer
from fedloom.testing.folders import content
from fedloom.testing.methods import FirstRound
from fedloom.testing.nets import masks
from fedloom.testing.played import Played
from fedloom.testing.spaces import each
from fedloom.training.together import answers

SMALLER = ("clients=3", "participants=2", "split.size=20", "split.test_size=8")  # rounds of two, then three at once
ROUGHLY, IMAGES = 0.05, 2


def silent(*facts: object) -> None:
    return None


NOBODY: Any = SimpleNamespace(begin=silent, stage=silent, participation=silent, round_done=silent, end=silent)


def run_of(played: FirstRound, folder: Path, *changes: str) -> dict[str, Any]:
    """All that a run leaves, but for its settings."""
    new_run(played.load(*SMALLER, "run.folder=somewhere", *changes), folder, NOBODY)
    found = content(folder)
    assert found.pop("config.toml") and found["result.json"]["finished"]
    return found


class TogetherContract:
    """Needs a fixture ``played``, such as that of a MethodContract."""

    attempt = each(["once", "again"])

    @pytest.fixture(scope="class")
    @staticmethod
    def alone(played: FirstRound, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        """A run in which clients answer one by one; made once."""
        return run_of(played, tmp_path_factory.mktemp("made once") / "alone", "inline.together=1")

    def test_clients_served_together_leave_the_same_run(
        self, played: FirstRound, alone: dict[str, Any], attempt: str, tmp_path: Path
    ) -> None:
        """Ledger, state, memories and models, bit for bit, and every time."""
        both = run_of(played, tmp_path / attempt, "inline.together=3")
        assert sorted(both) == sorted(alone)
        for file, said in alone.items():
            assert both[file] == said, file

    def test_reference_mode_leaves_the_same_run(self, played: FirstRound, alone: dict[str, Any], tmp_path: Path) -> None:
        assert run_of(played, tmp_path / "reference", "inline.reference=true") == alone

    def test_clients_in_one_stack_report_what_they_report_alone(self, played: FirstRound) -> None:
        if not masks(played.tools.supernet):
            pytest.skip("the supernet has no masked execution, which is optional")
        stacking = Played(played.load("training.execution=masked", "clients=3", "participants=2"))
        plan, method = stacking.federation.names, stacking.method
        state = stacking.state
        instructions = [method.farewell(state, client) for client in plan] if method.finished(state) else method.plan(state, plan)
        alone = [stacking.answer(instruction) for instruction in instructions]
        both = answers([partial(stacking.answer, instruction) for instruction in instructions])
        edge = IMAGES / len(stacking.federation.data_of(plan[0]).validation)
        check_alike(alone, both, edge)
        remembered = {answer.report.client: answer.memory for answer in alone}
        if not any(array.ndim > 1 and array.dtype == np.float32 for memory in remembered.values() for array in memory.arrays.values()):
            return  # no weights
        stacking.absorb(list(instructions), alone)
        for client, known in [*remembered.items()][1:]:  # as from a file, which has an order of its own
            stacking.memories[client] = replace(known, arrays={name: known.arrays[name] for name in reversed([*known.arrays])})
        farewells = [method.farewell(stacking.state, client) for client in plan]
        alone = [stacking.answer(farewell) for farewell in farewells]
        check_alike(alone, answers([partial(stacking.answer, farewell) for farewell in farewells]), edge)


def check_alike(alone: Sequence[Answer], both: Sequence[Answer], edge: float) -> None:
    for one, other in zip(alone, both, strict=True):
        assert (one.report.client, one.report.round) == (other.report.client, other.report.round)
        assert {group: [*arrays] for group, arrays in one.report.arrays.items()} == {g: [*a] for g, a in other.report.arrays.items()}
        for group, arrays in one.report.arrays.items():
            mine, theirs = (
                np.concatenate([np.empty(0), *(own[name].ravel() for name in arrays)], dtype=float)
                for own in (arrays, other.report.arrays[group])
            )
            assert np.linalg.norm(mine - theirs) <= ROUGHLY * np.linalg.norm(mine), group
        assert one.diary.architecture == other.diary.architecture and one.diary.trained_macs == other.diary.trained_macs
        for accuracy in ("validation_accuracy", "test_accuracy"):
            assert abs(getattr(one.diary, accuracy) - getattr(other.diary, accuracy)) <= edge, accuracy
