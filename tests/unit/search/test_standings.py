"""Scores that compare: on the same weights, against an anchor, over participations."""

from __future__ import annotations

from math import inf

import pytest

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientMemory
from fedloom.search.standings import best_of, in_order, inherited, memory_of, relative, running, standing, value
from fedloom.spaces.base import ImageShape
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from fedloom.training.scoring import Score, Scored, best_first

SPACE = MobileNetV3(MobileNetV3Settings.tiny(), ImageShape(1, 8, 10))
A, B, C = (Architecture("x", (number,)) for number in range(3))


def test_the_criterion_orders() -> None:
    members = [Scored(A, Score(0.5, 0.1)), Scored(B, Score(0.6, 0.3)), Scored(C, Score(0.6, 0.2)), Scored(A, Score(0.9, 0.0, rough=True))]
    assert [one.architecture for one in in_order(members, "loss")] == [A, C, B, A]
    assert in_order(members, "accuracy") == best_first(members)
    assert value(Score(0.5, 0.1), "loss") == -0.1 and value(Score(0.5, 0.1), "accuracy") == 0.5
    tied = [Scored(B, Score(0.5, 0.1)), Scored(A, Score(0.5, 0.1)), Scored(C, Score(0.6, 0.1))]
    assert [one.architecture for one in in_order(tied, "loss")] == [C, A, B]


def test_scores_relative_to_the_anchor() -> None:
    found = relative([Scored(A, Score(0.75, 0.5)), Scored(B, Score(0.5, 0.25))], A)
    assert found == [Scored(A, Score(0.0, 0.0)), Scored(B, Score(-0.25, -0.25))]
    failed = [Scored(A, Score(0.0, inf)), Scored(B, Score(0.5, 0.25))]
    assert relative(failed, A) == failed and relative(failed, None) == failed


def test_a_mean_over_participations() -> None:
    before = {A: Score(0.4, 1.0), C: Score(0.0, inf)}
    fresh = [Scored(A, Score(0.8, 0.5)), Scored(B, Score(0.2, 2.0)), Scored(C, Score(0.5, 0.5))]
    one, other, third = running(before, fresh, 0.25)
    assert one.score.accuracy == pytest.approx(0.5) and one.score.loss == pytest.approx(0.875)
    assert (other, third) == (fresh[1], fresh[2])  # a newcomer, and one that had failed
    assert running(before, fresh, 1) == fresh


def test_the_anchor_stays_among_the_best() -> None:
    members = [Scored(one, Score(0.5, place)) for place, one in enumerate((A, B, C))]
    assert best_of(members, 2, None) == best_of(members, 2, A) == members[:2] and best_of(members, 2, C) == [members[0], members[2]]
    assert best_of(members, 5, C) == members


def test_what_is_remembered_comes_back() -> None:
    members = [Scored(SPACE.named["medium"], Score(0.25, -0.5)), Scored(SPACE.named["largest"], Score(0.0, inf))]
    memory = memory_of(SPACE, members, scores=True)
    assert standing(SPACE, memory) == members and inherited(SPACE, memory) == [one.architecture for one in members]
    assert set(memory_of(SPACE, members, scores=False).arrays) == {"population"}
    assert standing(SPACE, memory_of(SPACE, members, scores=False)) == [] == inherited(SPACE, ClientMemory())
