"""What choosing can give: by hand, and on numbers whose truth is known."""

from __future__ import annotations

from math import pi, sqrt

import numpy as np
import pytest

from fedloom.maths import choosing


def drawn(clients: int, count: int, among: float, own: float, error: float, draw: np.random.Generator) -> choosing.Numbers:
    """(clients, architectures, 2, 2) of these standard deviations."""
    truth = draw.normal(0, among, count) + draw.normal(0, own, (clients, count))
    return truth[:, :, None, None] + draw.normal(0, error, (clients, count, 2, 2))


def exactly(truth: list[list[float]]) -> choosing.Numbers:
    """Measured without error."""
    return np.repeat(np.array(truth), 4).reshape(len(truth), -1, 2, 2)


# -- by hand ------------------------------------------------------------------------------------------
def test_pairs_share_neither_training_nor_images() -> None:
    marked = np.arange(8.0).reshape(1, 1, 4, 2)  # a number for each training and half
    pairs = [(int(one.item()), int(other.item())) for one, other in choosing.independent(marked)]
    assert len(pairs) == len(set(pairs)) == 8 * 3
    assert all(one // 2 != other // 2 and one % 2 != other % 2 for one, other in pairs)


def test_what_clients_gain_without_errors() -> None:
    truth = exactly([[0.5, 0.7, 0.6], [0.8, 0.4, 0.9]])
    assert choosing.another(truth) == pytest.approx((0.2 + 0.1 - 0.4 + 0.1) / 4)
    assert choosing.best_for_all(truth) == pytest.approx(0.1)  # means are 0.65, 0.55, 0.75: the third
    assert choosing.best_for_each(truth) == pytest.approx((0.2 + 0.1) / 2)
    losses = np.array([[[1.0], [2.0], [0.5]], [[1.0], [0.9], [2.0]]])  # the third, and the second
    assert choosing.lowest_loss(truth, losses) == pytest.approx((0.1 - 0.4) / 2)
    same = exactly([[0.5, 0.5], [0.7, 0.7]])
    assert choosing.best_for_all(same) == choosing.best_for_each(same) == 0  # of equal ones the first


def test_the_loss_that_chooses_is_of_the_training_that_is_tested() -> None:
    accuracies = np.array([[[[0.5, 0.5], [0.5, 0.5]], [[0.9, 0.7], [0.1, 0.3]]]])  # the other is better after its first training only
    losses = np.array([[[1.0, 1.0], [0.5, 2.0]]])  # and validation sees it
    assert choosing.lowest_loss(accuracies, losses) == pytest.approx((0.3 + 0.0) / 2)


def test_spread_by_hand() -> None:
    """Two clients, two architectures: what is left beyond the means is ±0.1, with one degree of freedom."""
    found = choosing.spread(exactly([[0.7, 0.5], [0.5, 0.7]]))
    assert found.own == pytest.approx(4 * 0.1**2) and found.error == pytest.approx(0)
    assert found.architectures == pytest.approx(0 - 4 * 0.1**2 / 2)  # the means are equal, and by chance they would not be
    alike = choosing.spread(exactly([[0.7, 0.5], [0.6, 0.4]]))
    assert alike.own == pytest.approx(0) and alike.architectures == pytest.approx(0.02) and alike.error == pytest.approx(0)


def test_the_largest_of_normal_numbers() -> None:
    assert choosing.largest_of(1) == pytest.approx(0, abs=1e-9)
    assert choosing.largest_of(2) == pytest.approx(1 / sqrt(pi)) and choosing.largest_of(3) == pytest.approx(1.5 / sqrt(pi))
    assert choosing.ceiling(0.0004, 3) == pytest.approx(0.02 * 1.5 / sqrt(pi)) and choosing.ceiling(-0.1, 3) == 0


# -- where the truth is known ----------------------------------------------------------------------------
@pytest.mark.parametrize(("among", "own"), [(0.0, 0.0), (0.02, 0.0), (0.0, 0.02), (0.02, 0.02)])
def test_variances_are_found_under_larger_errors(among: float, own: float) -> None:
    draw = np.random.default_rng(1)
    found = [choosing.spread(drawn(12, 9, among, own, 0.05, draw)) for _ in range(600)]
    for name, truth in (("architectures", among), ("own", own), ("error", 0.05)):
        values = [getattr(one, name) for one in found]
        assert abs(np.mean(values) - truth**2) < 4 * np.std(values) / sqrt(len(values)), name  # four standard errors


def test_luck_gains_nothing() -> None:
    """Nothing is better than anything: the best of nine measurements seems to be, and the independent one says that it is not."""
    draw = np.random.default_rng(2)
    several = [drawn(20, 9, 0.0, 0.0, 0.05, draw) for _ in range(300)]
    for figure in (choosing.best_for_all, choosing.best_for_each):
        gains = [figure(one) for one in several]
        assert abs(np.mean(gains)) < 4 * np.std(gains) / sqrt(len(gains))
    seeming = np.mean([(one[:, :, 0, 0].max(1) - one[:, 0, 0, 0]).mean() for one in several])
    assert seeming > 0.05


def test_the_ceiling_is_what_knowing_the_truth_would_give() -> None:
    draw = np.random.default_rng(3)
    truth = draw.normal(0, 0.02, (20000, 9))
    assert choosing.ceiling(0.02**2, 9) == pytest.approx((truth.max(1) - truth.mean(1)).mean(), rel=0.01)
    lower = [choosing.best_for_each(drawn(20, 9, 0.0, 0.02, 0.02, draw)) for _ in range(100)]
    assert 0.01 < np.mean(lower) < choosing.ceiling(0.02**2, 9)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    draw, held = np.random.default_rng(4), 0
    for _ in range(100):
        gains = draw.normal(0.01, 0.03, 30)
        low, high = choosing.between(lambda rows, gains=gains: float(gains[rows].mean()), 30, np.random.default_rng(0))
        held += low <= 0.01 <= high
    assert 86 <= held <= 100
