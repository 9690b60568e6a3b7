"""Fixed point modulo 2^32, and the mean of updates from sums alone."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.maths.averaging import coverage_equal, fedavg
from fedloom.maths.sums import TOP, FixedPoint, counting, flat, kept, mean, mean_of_trained, shaped, trained

SHAPES = {"w": (4, 3), "v": (5,)}


def updates(count: int) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(0)
    return [{name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in SHAPES.items()} for _ in range(count)]


def test_numbers_become_the_nearest_multiple_and_are_cut_at_the_range() -> None:
    fixed = FixedPoint(2.0, 3)
    assert fixed.step == 2.0 / (TOP // 3)
    values = np.array([0, fixed.step * 0.4, fixed.step * 0.6, -fixed.step * 1.6, 2.0, 7.5, -9.0])
    words = fixed.encoded(values)
    assert words.dtype == np.dtype("<u4")
    assert words.view("<i4").tolist() == [0, 0, 1, -2, TOP // 3, TOP // 3, -(TOP // 3)]
    assert np.allclose(fixed.decoded(words)[4:], [2.0, 2.0, -2.0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("clients", [1, 3, 50, 1000])
def test_as_many_extreme_numbers_as_there_are_clients_do_not_overflow(clients: int) -> None:
    fixed = FixedPoint(8.0, clients)
    for value in (8.0, -8.0):
        words = fixed.encoded(np.array([value]))
        total = np.zeros(1, "<u4")
        for _ in range(clients):
            total = total + words
        assert fixed.decoded(total)[0] == pytest.approx(clients * value, rel=1e-6)


def test_the_mean_is_that_of_plain_averaging_within_half_a_step() -> None:
    made, fixed = updates(5), FixedPoint(8.0, 5)
    total = sum((fixed.encoded(flat(update)) for update in made), np.zeros(17, "<u4"))
    exact = np.mean([flat(update).astype(np.float64) for update in made], 0)
    assert np.abs(mean(total, fixed, 5.0) - exact).max() <= fixed.step / 2
    plain = fedavg(made, [], [1.0] * 5)
    found = shaped(mean(total, fixed, 5.0), made[0])
    for name in SHAPES:
        assert np.abs(found[name] - plain[name]).max() <= fixed.step and found[name].dtype == np.float32


def test_entries_that_enough_clients_trained_have_their_mean_and_others_stay() -> None:
    made, fixed = updates(4), FixedPoint(8.0, 4)
    rows = [(0, 1, 2, 3), (0, 1, 2), (0, 1), (0,)]  # of w, by client; compact: all columns are alike
    coverage = []
    for update, own in zip(made, rows, strict=True):
        covered = {"w": np.isin(np.arange(4), own)[:, None], "v": np.ones(1, bool)}
        coverage.append(covered)
        update["w"] *= covered["w"]
    counts = sum((trained(one, update, 4) for one, update in zip(coverage, made, strict=True)), np.zeros(17, "<u1"))
    assert counts.tolist() == [4] * 3 + [3] * 3 + [2] * 3 + [1] * 3 + [4] * 5
    seen = kept(counts, 3)
    total = sum((fixed.encoded(flat(update) * seen) for update in made), np.zeros(17, "<u4"))
    found = shaped(mean_of_trained(total, fixed, counts, seen, 4, 4), made[0])
    plain = coverage_equal(made, coverage, [1.0] * 4)
    assert np.abs(found["w"][:2] - plain["w"][:2]).max() <= fixed.step and np.abs(found["v"] - plain["v"]).max() <= fixed.step
    assert not found["w"][2:].any() and plain["w"][2:].all(), "what one or two trained must not be seen"


def test_of_those_that_are_missing_in_the_second_sum_nothing_is_seen() -> None:
    made, fixed = updates(4), FixedPoint(8.0, 4)
    counts = np.full(17, 4, "<u1")
    counts[:3] = 3
    seen = kept(counts, 3, gone=1)
    assert not seen[:3].any() and seen[3:].all()  # of three, one may be the one that is gone
    total = sum((fixed.encoded(flat(update) * seen) for update in made[:3]), np.zeros(17, "<u4"))
    found = mean_of_trained(total, fixed, counts, seen, 4, 3)
    exact = np.mean([flat(update).astype(np.float64) for update in made[:3]], 0)
    assert np.abs(found - exact)[3:].max() <= fixed.step / 2 and not found[:3].any()


def test_counters_are_as_small_as_the_clients_allow() -> None:
    assert [counting(clients).itemsize for clients in (3, 255, 256, 65_535, 65_536)] == [1, 1, 2, 2, 4]
