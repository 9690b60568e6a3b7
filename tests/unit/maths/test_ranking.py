"""Ranks and their correlation, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from fedloom.core.seeds import rng
from fedloom.maths.ranking import ranks, spearman


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3, 1, 2], [3, 1, 2]), ([5, 5, 5], [2, 2, 2]), ([0, 1, 1, 2], [1, 2.5, 2.5, 4]), ([7], [1]), ([], []), ([-1, -2], [2, 1])],
)
def test_ranks(values: list[float], expected: list[float]) -> None:
    assert ranks(values).tolist() == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3], [10, 20, 300], 1),
        ([1, 2, 3], [3, 2, 1], -1),
        ([1, 2, 3], [10, 30, 20], 0.5),
        ([1, 2, 3], [1, 1, 1], None),
        ([1], [2], None),
        ([], [], None),
    ],
)
def test_spearman(first: list[float], second: list[float], expected: float | None) -> None:
    assert spearman(first, second) == expected


def test_spearman_with_ties_is_scipys() -> None:
    draw = rng("ties")
    for _ in range(20):
        first, second = np.round(draw.random((2, 12)), 1)
        assert spearman(first, second) == pytest.approx(spearmanr(first, second).statistic)
