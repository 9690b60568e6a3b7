"""MiLeNAS: one step by hand, and its gradient by differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedloom.core.seeds import rng
from fedloom.maths.relaxation import mixed_level_step, softmax, strongest, through_softmax


def test_the_softmax_is_over_what_is_present() -> None:
    alphas = np.array([[math.log(3), 0.0, 5.0], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    present = np.array([[True, True, False], [True, True, True], [False, False, False]])
    assert softmax(alphas, present).tolist() == [pytest.approx([0.75, 0.25, 0.0]), pytest.approx([1 / 3] * 3), [0.0, 0.0, 0.0]]
    assert np.isfinite(softmax(np.array([[1e4, 0.0]]), np.ones((1, 2), bool))).all()


def test_a_step_by_hand() -> None:
    """p = (3/4, 1/4). Gradients by coefficients 1, 0 and 2, -2 with weight 1/2: together 2, -1. Their mean under p is 5/4, so by alphas
    the gradient is 3/4 (2 - 5/4) = 9/16 and 1/4 (-1 - 5/4) = -9/16."""
    alphas, present = np.array([[math.log(3), 0.0]]), np.ones((1, 2), bool)
    moved = mixed_level_step(alphas, present, np.array([[1.0, 0.0]]), np.array([[2.0, -2.0]]), rate=0.1, weight=0.5)
    assert moved.tolist() == [pytest.approx([math.log(3) - 0.05625, 0.05625])]


def test_the_gradient_is_that_of_differences() -> None:
    alphas, slope, present = rng(0).normal(size=(4, 3)), rng(1).normal(size=(4, 3)), rng(2).random((4, 3)) < 0.8

    def loss(alphas: np.ndarray) -> float:
        return float((slope * softmax(alphas, present)).sum())

    found = through_softmax(softmax(alphas, present), slope)
    for place in np.ndindex(alphas.shape):
        step = np.zeros_like(alphas)
        step[place] = 1e-6
        assert found[place] == pytest.approx((loss(alphas + step) - loss(alphas - step)) / 2e-6, abs=1e-8)
    assert (found[~present] == 0).all()


def test_the_strongest_of_each_edge() -> None:
    alphas = np.array([[0.1, 0.3, 0.9], [0.5, 0.5, 0.1], [1.0, 2.0, 3.0]])
    present = np.array([[True, True, False], [True, True, True], [False, False, False]])
    assert strongest(alphas, present).tolist() == [[False, True, False], [True, False, False], [False] * 3]
