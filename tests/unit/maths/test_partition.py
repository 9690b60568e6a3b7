"""Dividing a pool: hand-made cases."""

from __future__ import annotations

import time

import numpy as np
import pytest

from fedloom.core.errors import InvalidData
from fedloom.maths import partition

LABELS = np.repeat(np.arange(10), 100)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_by_label_covers_the_pool_and_keeps_the_minimum() -> None:
    parts = partition.by_label(LABELS, 10, 0.3, generator(), minimum=20)
    assert sorted(np.concatenate(parts)) == list(range(1000))
    assert min(map(len, parts)) >= 20
    assert {part.dtype for part in parts} == {np.dtype(np.int64)}


def test_by_label_gives_nothing_more_to_a_client_with_its_even_share() -> None:
    # With one class after another, a client passes 100 = N/n at most by what one class gives it.
    parts = partition.by_label(LABELS, 10, 0.05, generator(), minimum=0)
    counts = partition.class_counts(parts, LABELS, 10)
    held = np.cumsum(counts, axis=1) - counts  # before each class
    assert not counts[held >= 100].any()


def test_by_label_gives_up_with_the_cure() -> None:
    with pytest.raises(InvalidData, match=r"Raise split\.alpha, or lower clients or split\.minimum"):
        partition.by_label(LABELS, 20, 0.01, generator(), minimum=40, tries=5)


def test_by_label_refuses_what_cannot_be_before_trying() -> None:
    with pytest.raises(InvalidData, match="need 1010 examples, the pool has 1000"):
        partition.by_label(LABELS, 101, 0.3, generator(), minimum=10)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan")])
def test_alpha_must_be_positive(alpha: float) -> None:
    with pytest.raises(InvalidData, match="alpha"):
        partition.by_label(LABELS, 2, alpha, generator())
    with pytest.raises(InvalidData, match="alpha"):
        partition.by_client(LABELS, 2, alpha, generator())


def test_by_client_gives_equal_sizes_even_when_classes_run_out() -> None:
    parts = partition.by_client(LABELS, 30, 0.01, generator())  # nearly one class each: 33 of 100, so some class runs out
    assert {len(part) for part in parts} == {33}
    assert len(np.unique(np.concatenate(parts))) == 990


def test_by_client_with_a_huge_alpha_is_balanced() -> None:
    parts = partition.by_client(LABELS, 5, 1e6, generator())
    assert abs(partition.class_counts(parts, LABELS, 10) - 20).max() < 18  # 4.5 standard deviations of a multinomial


def test_plato_draws_as_the_weights_say() -> None:
    labels = np.repeat([0, 1], 5000)
    part = partition.plato(labels, np.array([0.25, 0.75]), 1000, generator())
    assert len(np.unique(part)) == 1000
    assert (labels[part] == 1).mean() == pytest.approx(0.74, abs=0.05)


def test_plato_first_draw_has_exactly_the_weights() -> None:
    labels = np.array([0, 1, 1])  # weights 0.5, 0.25, 0.25 of a total of 1
    draws = generator()
    first = [int(partition.plato(labels, np.array([0.5, 0.25]), 1, draws)[0]) for _ in range(4000)]
    assert np.bincount(first, minlength=3) / 4000 == pytest.approx([0.5, 0.25, 0.25], abs=0.03)


def test_plato_takes_all_there_is_and_no_more() -> None:
    labels = np.array([0, 0, 1, 2, 2, 2])
    assert sorted(partition.plato(labels, np.array([0.5, 0.5, 0.0]), 5, generator())) == [0, 1, 2]
    assert len(partition.plato(labels, np.array([0.0, 0.0, 0.0]), 5, generator())) == 0
    assert len(partition.plato(labels, np.array([0.2, 0.3, 0.5]), 0, generator())) == 0


def test_largest_finds_the_largest_even_where_its_guess_is_wrong() -> None:
    values = np.zeros(3200)
    values[::16] = 1000 + np.arange(200)  # the sample sees the large ones only
    values[1::16] = 1 + np.arange(200)
    assert sorted(partition._largest(values, 300)) == sorted(np.argsort(-values, kind="stable")[:300])


def test_shards_hold_few_classes() -> None:
    parts = partition.shards(LABELS, 50, 2, generator())
    assert {len(part) for part in parts} == {20}
    assert sorted(np.concatenate(parts)) == list(range(1000))
    assert max(len(np.unique(LABELS[part])) for part in parts) <= 2


def test_iid_parts_differ_by_one_at_most() -> None:
    parts = partition.iid(LABELS, 7, generator())
    assert {len(part) for part in parts} == {142, 143}
    assert sorted(np.concatenate(parts)) == list(range(1000))


def test_matching_test_by_hand() -> None:
    train_labels = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    parts = [np.array([0, 1, 2, 4]), np.array([3, 5, 6, 7])]  # shares of class 0: 3/4, 1/4; of class 1: 1/4, 3/4
    test_labels = np.array([0] * 8 + [1] * 4 + [2] * 5)  # nobody trains on class 2
    tests = partition.matching_test(parts, train_labels, test_labels, generator())
    assert partition.class_counts(tests, test_labels, 3).tolist() == [[6, 1, 0], [2, 3, 0]]


def test_matching_test_rounds_the_largest_remainder_up() -> None:
    train_labels = np.zeros(10, np.int64)
    parts = [np.arange(5), np.arange(5, 8), np.arange(8, 10)]  # quotas of 4 test images: 2.0, 1.2, 0.8
    tests = partition.matching_test(parts, train_labels, np.zeros(4, np.int64), generator())
    assert [len(part) for part in tests] == [2, 1, 1]


def test_matching_test_tops_up_from_the_richest_owner_of_the_class() -> None:
    train_labels = np.array([0] * 20 + [1] * 9 + [0])
    parts = [np.arange(20), np.arange(20, 29), np.array([29])]
    test_labels = np.array([0] * 4 + [1] * 6)
    assert [len(part) for part in partition.matching_test(parts, train_labels, test_labels, generator())] == [4, 6, 0]
    topped = partition.matching_test(parts, train_labels, test_labels, generator(), at_least=1)
    assert partition.class_counts(topped, test_labels, 2).tolist() == [[3, 0], [0, 6], [1, 0]]


def test_matching_test_says_when_there_is_too_little() -> None:
    parts = [np.array([0]), np.array([1])]
    with pytest.raises(InvalidData, match=r"Lower clients, raise split\.alpha or use more test examples"):
        partition.matching_test(parts, np.array([0, 0]), np.array([0]), generator(), at_least=1)


def test_stratified_holdout_by_hand() -> None:
    labels = np.array([0] * 30 + [1] * 20 + [2])
    train, validation = partition.stratified_holdout(labels, 0.1, generator())
    assert np.bincount(labels[validation], minlength=3).tolist() == [3, 2, 0]
    assert sorted([*train, *validation]) == list(range(51))


@pytest.mark.parametrize(
    ("labels", "share", "expected"), [([0, 0], 0.1, 1), ([0, 1], 0.1, 1), ([0], 0.5, 0), ([], 0.5, 0), ([0, 0, 0], 0, 0)]
)
def test_stratified_holdout_of_almost_nothing(labels: list[int], share: float, expected: int) -> None:
    train, validation = partition.stratified_holdout(np.array(labels, np.int64), share, generator())
    assert (len(train), len(validation)) == (len(labels) - expected, expected)


def test_stratified_holdout_never_takes_the_last_of_a_class() -> None:
    labels = np.repeat(np.arange(20), 2)
    train, _ = partition.stratified_holdout(labels, 0.9, generator())
    assert set(labels[train]) == set(range(20))


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_stratified_holdout_refuses_impossible_shares(share: float) -> None:
    with pytest.raises(InvalidData, match="share"):
        partition.stratified_holdout(LABELS, share, generator())


def test_no_clients_is_refused() -> None:
    with pytest.raises(InvalidData, match="at least one client"):
        partition.iid(LABELS, 0, generator())


def test_ten_thousand_clients_take_seconds() -> None:
    labels = np.repeat(np.arange(10), 5000)
    start = time.perf_counter()
    partition.by_client(labels, 10_000, 0.3, generator())
    partition.by_label(labels, 10_000, 0.3, generator(), minimum=0)
    partition.shards(labels, 10_000, 2, generator())
    parts = partition.iid(labels, 10_000, generator())
    partition.matching_test(parts, labels, labels, generator(), at_least=1)
    assert time.perf_counter() - start < 10  # about 0.1 s on two cores
