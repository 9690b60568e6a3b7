"""Paired differences, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.maths.paired import holm, paired_difference


def test_by_hand() -> None:
    """Differences 1 to 5: standard error sqrt(2.5 / 5), t(4) at 97.5 % is 2.7764; all five signs agree, which chance does 2 times in 32."""
    found = paired_difference([0, 0, 0, 0, 0], [1, 2, 3, 4, 5])
    assert (found.pairs, found.mean) == (5, 3)
    assert (found.low, found.high) == pytest.approx((3 - 2.776445 * 0.5**0.5, 3 + 2.776445 * 0.5**0.5), abs=1e-5)
    assert found.p == pytest.approx(2 / 32)


def test_signed_ranks_by_hand() -> None:
    """Differences -1, 2, 3: the negative ranks sum to 1; of 8 sign patterns 2 have 1 or less, and 2 the mirror image."""
    assert paired_difference([1, 0, 0], [0, 2, 3]).p == pytest.approx(4 / 8)


def test_the_order_of_methods_turns_the_sign() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.random(30), draw.random(30)
    one, other = paired_difference(first, second), paired_difference(second, first)
    assert one.mean == pytest.approx(-other.mean) and one.p == pytest.approx(other.p)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))  # type: ignore[operator]


def test_equal_pairs_say_nothing() -> None:
    assert paired_difference([0.5, 0.7], [0.5, 0.7]) == paired_difference([1, 2], [1, 2])
    same = paired_difference([0.5, 0.7, 0.9], [0.5, 0.7, 0.9])
    assert (same.mean, same.low, same.high, same.p) == (0, 0, 0, 1)
    some = [0.1, 0.2, 0.3, 0.4]
    assert paired_difference([*some, 0.5], [1, 1, 1, 1, 0.5]).p == paired_difference(some, [1, 1, 1, 1]).p


def test_shares_that_are_equal_up_to_rounding_are_equal() -> None:
    """0.3 - 0.2 is 0.0999…98 and 0.2 - 0.1 is 0.1."""
    assert paired_difference([0.2, 0.1, 0.9], [0.3, 0.2, 0.8]).p == paired_difference([0, 0, 1], [1, 1, 0]).p
    assert paired_difference([0.3], [0.1 + 0.2]).p == 1


def test_one_pair_has_no_interval() -> None:
    one = paired_difference([0.5], [0.75])
    assert (one.pairs, one.mean, one.low, one.high, one.p) == (1, 0.25, None, None, 1)


def test_intervals_cover_the_true_mean_as_often_as_they_say() -> None:
    draw = np.random.default_rng(1)
    intervals = [paired_difference(np.zeros(8), draw.normal(0.3, 1, 8)) for _ in range(400)]
    covered = sum(one.low < 0.3 < one.high for one in intervals) / 400  # type: ignore[operator]
    assert 0.91 < covered < 0.985


def test_holm_by_hand() -> None:
    """Sorted 0.01, 0.02, 0.03, 0.5: times 4, 3, 2, 1; 0.06 twice, as none is below that of a clearer difference; never above 1."""
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([0.04]) == [0.04] and holm([]) == []


def test_equal_methods_are_told_apart_at_the_stated_rate_only() -> None:
    """600 comparisons of four methods with a first, all equally good on the same 20 clients: after Holm's correction at most 5 % of the
    comparisons find any difference, without it more do. A method that is better by half a spread is still found."""
    draw = np.random.default_rng(2)
    found, uncorrected, better = 0, 0, 0
    for _ in range(600):
        clients = draw.normal(0.8, 0.05, 20)  # how hard each client's images are
        first, *others = clients + draw.normal(0, 0.02, (5, 20))
        ps = [paired_difference(first, other).p for other in others]
        found += min(holm(ps)) < 0.05
        uncorrected += min(ps) < 0.05
        better += holm([paired_difference(first, others[0] + 0.025).p, *ps[1:]])[0] < 0.05
    assert found / 600 <= 0.05 + 2 * (0.05 * 0.95 / 600) ** 0.5 < uncorrected / 600
    assert found > 0 and better / 600 > 0.6
