"""A candidate is left for clear evidence only, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.maths.evidence import clearly_lower, kept

USUAL = np.array([1.0, 2.0, 3.0, 4.0])
BETTER = USUAL - [1.0, 1.0, 0.0, 0.0]  # gains of mean 1/2 and standard deviation 1/sqrt(3): standard error 1/sqrt(12), 1.732 of them


@pytest.mark.parametrize(("errors", "enough"), [(0.0, True), (1.7, True), (1.74, False), (10.0, False)])
def test_by_hand(errors: float, enough: bool) -> None:
    assert clearly_lower(BETTER, USUAL, errors) is enough
    assert kept([USUAL, BETTER], errors) == int(enough)
    assert not clearly_lower(USUAL, BETTER, errors)


def test_differences_are_paired() -> None:
    """Losses that vary between images a thousand times more than networks do."""
    hard = np.array([0.0, 1000.0, 5.0, 70.0])
    assert clearly_lower(hard - [0.1, 0.11, 0.09, 0.1], hard, 5.0)
    assert not clearly_lower(np.roll(hard, 1) - 0.1, hard, 1.0)


def test_among_those_that_are_clear_the_lowest_mean_is_kept_and_of_equals_the_earliest() -> None:
    lower, lowest, lucky = USUAL - 0.5, USUAL - 0.75, USUAL - [8.0, 0.0, 0.0, 0.0]  # lucky: mean 2 lower, by a single image
    assert kept([USUAL, lower, lowest, lucky], 1.5) == 2
    assert kept([USUAL, lower, lowest, lucky], 0.5) == 3
    assert kept([lowest, USUAL, lower, lowest], 1.5, first=1) == 0
    assert kept([USUAL, lower, lower], 1.5) == 1


def test_equal_losses_are_no_evidence() -> None:
    assert kept([USUAL, USUAL.copy()], 0.0) == 0 and kept([USUAL, USUAL.copy()], 0.0, first=1) == 1


def test_one_image_has_no_standard_error() -> None:
    one, lower = np.array([2.0]), np.array([0.1])
    assert kept([one, lower], 0.001) == 0
    assert kept([one, lower], 0.0) == 1 and kept([lower, one], 0.0) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_network_that_diverged_never_wins(value: float) -> None:
    diverged = np.array([value, 0.0, 0.0, 0.0])
    assert kept([USUAL, diverged], 0.0) == 0
    assert kept([USUAL, diverged, BETTER], 1.0) == 2
    assert kept([diverged, USUAL, BETTER], 100.0) == 2  # anything is better than what diverged
    assert kept([diverged, diverged], 0.0) == 0
