"""How a client's architectures stand against each other: scores on the same weights, relative to an anchor, over its participations.

Shared weights get better from round to round, so scores of different rounds do not compare. The difference to an anchor that was
scored with the same weights on the same images does, and its mean over participations is less noisy than one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientMemory
from fedloom.spaces.base import SearchSpace
from fedloom.training.scoring import Score, Scored

CRITERIA = ("accuracy", "loss")


def value(score: Score, criterion: str) -> float:
    """Larger is better."""
    return score.accuracy if criterion == "accuracy" else -score.loss


def in_order(members: Sequence[Scored], criterion: str) -> list[Scored]:
    """Best first: by the criterion, then the other one, then choices: a total order. Rough scores come after all others."""
    other = "loss" if criterion == "accuracy" else "accuracy"

    def key(one: Scored) -> tuple[bool, float, float, tuple[int, ...]]:
        return one.score.rough, -value(one.score, criterion), -value(one.score, other), one.architecture.choices

    return sorted(members, key=key)


def relative(scored: Sequence[Scored], anchor: Architecture | None) -> list[Scored]:
    """Scores less the anchor's, which is among them; as they are without an anchor, or where the anchor failed."""
    reference = next((one.score for one in scored if one.architecture == anchor), None)
    if reference is None or not isfinite(reference.loss):
        return list(scored)
    return [Scored(one.architecture, _less(one.score, reference)) for one in scored]


def running(before: Mapping[Architecture, Score], fresh: Sequence[Scored], share: float) -> list[Scored]:
    """Exponential means: this share of the fresh score, the rest of what was before; a newcomer has its fresh score."""
    return [Scored(one.architecture, _mixed(before.get(one.architecture, one.score), one.score, share)) for one in fresh]


def best_of(members: Sequence[Scored], size: int, anchor: Architecture | None) -> list[Scored]:
    """The first ``size`` of those in order; the anchor stays, whatever it scored."""
    left = [one for one in members[size:] if one.architecture == anchor]
    return [*members[: size - len(left)], *left]


def memory_of(space: SearchSpace, members: Sequence[Scored], scores: bool) -> ClientMemory:
    """Members for the next participation, in their order; with or without their scores."""
    arrays = {"population": np.array([member.architecture.choices for member in members], space.compact)}
    if scores:
        arrays["scores"] = np.array([(member.score.accuracy, member.score.loss) for member in members], np.float64)
    return ClientMemory(arrays)


def inherited(space: SearchSpace, memory: ClientMemory) -> list[Architecture]:
    """The members of the last participation, or nothing."""
    rows = memory.arrays.get("population", np.empty((0, 0), space.compact))
    return [Architecture(space.name, tuple(int(choice) for choice in row)) for row in rows]


def standing(space: SearchSpace, memory: ClientMemory) -> list[Scored]:
    """The same with their scores; nothing if none were kept."""
    scores = memory.arrays.get("scores", np.empty((0, 2))).tolist()
    return [Scored(one, Score(*numbers)) for one, numbers in zip(inherited(space, memory), scores, strict=False)]


def _less(score: Score, reference: Score) -> Score:
    return Score(score.accuracy - reference.accuracy, score.loss - reference.loss)


def _mixed(before: Score, now: Score, share: float) -> Score:
    if share == 1 or not isfinite(before.loss):
        return now
    accuracy, loss = (old + share * (new - old) for old, new in ((before.accuracy, now.accuracy), (before.loss, now.loss)))
    return Score(accuracy, loss)
