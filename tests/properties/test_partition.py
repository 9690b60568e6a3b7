"""Dividing a pool: what holds for every pool, every number of clients and every seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.maths import partition
from fedloom.maths.partition import Positions

Rule = Callable[[Positions, int, np.random.Generator], list[Positions]]

DISJOINT: dict[str, Rule] = {
    "label": lambda labels, clients, rng: partition.by_label(labels, clients, 0.5, rng, minimum=0),
    "client": lambda labels, clients, rng: partition.by_client(labels, clients, 0.2, rng),
    "shards": lambda labels, clients, rng: partition.shards(labels, clients, 1, rng),
    "iid": partition.iid,
}

seeds = st.integers(0, 2**32)
pools = st.lists(st.integers(0, 5), min_size=1, max_size=120).map(lambda values: np.array(values, np.int64))


@pytest.mark.parametrize("rule", DISJOINT)
@settings(max_examples=40, deadline=None)
@given(labels=pools, clients=st.integers(1, 12), seed=seeds)
def test_parts_are_disjoint_valid_and_repeatable(rule: str, labels: Positions, clients: int, seed: int) -> None:
    clients = min(clients, len(labels))
    parts = DISJOINT[rule](labels, clients, np.random.default_rng(seed))
    again = DISJOINT[rule](labels, clients, np.random.default_rng(seed))
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))
    flat = np.concatenate(parts)
    assert len(parts) == clients
    assert flat.dtype == np.int64
    assert len(np.unique(flat)) == len(flat)
    assert flat.min(initial=0) >= 0 and flat.max(initial=0) < len(labels)
    if rule == "client":
        assert {len(part) for part in parts} == {len(labels) // clients}
    else:
        assert len(flat) == len(labels)


@pytest.mark.parametrize("rule", DISJOINT)
@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_another_seed_gives_another_division(rule: str, seed: int) -> None:
    labels = np.repeat(np.arange(5), 40)
    parts = DISJOINT[rule](labels, 4, np.random.default_rng(seed))
    others = DISJOINT[rule](labels, 4, np.random.default_rng(seed + 1))
    assert any(sorted(one) != sorted(other) for one, other in zip(parts, others, strict=True))


@settings(max_examples=60, deadline=None)
@given(labels=pools, size=st.integers(0, 150), alpha=st.floats(0.01, 10), seed=seeds)
def test_plato_draws_without_replacement(labels: Positions, size: int, alpha: float, seed: int) -> None:
    def draw() -> tuple[np.ndarray, Positions]:
        rng = np.random.default_rng(seed)
        row = partition.proportions(1, 6, alpha, rng)[0]
        return row, partition.plato(labels, row, size, rng)

    row, part = draw()
    assert np.array_equal(part, draw()[1])
    assert len(np.unique(part)) == len(part) == min(size, np.count_nonzero(row[labels]))
    assert (row[labels[part]] > 0).all()


@settings(max_examples=60, deadline=None)
@given(labels=pools, share=st.floats(0.01, 0.9), seed=seeds)
def test_stratified_holdout(labels: Positions, share: float, seed: int) -> None:
    train, validation = partition.stratified_holdout(labels, share, np.random.default_rng(seed))
    assert sorted([*train, *validation]) == list(range(len(labels)))
    assert len(validation) >= (len(labels) >= 2)
    counts, taken = np.bincount(labels, minlength=6), np.bincount(labels[validation], minlength=6)
    if (counts > 1).any():
        assert not taken[counts == 1].any()
        assert ((taken < counts) | (counts == 0)).all()
        assert (taken <= share * counts + 1).all()
    else:
        assert len(validation) == (len(labels) >= 2)


@settings(max_examples=60, deadline=None)
@given(labels=pools, test_labels=pools, clients=st.integers(1, 10), seed=seeds)
def test_matching_test_follows_the_training_shares(labels: Positions, test_labels: Positions, clients: int, seed: int) -> None:
    clients = min(clients, len(labels))
    rng = np.random.default_rng(seed)
    parts = partition.by_label(labels, clients, 0.5, rng, minimum=0)
    tests = partition.matching_test(parts, labels, test_labels, rng)
    flat = np.concatenate(tests)
    assert len(np.unique(flat)) == len(flat)
    held = partition.class_counts(parts, labels, 6)
    counts = partition.class_counts(tests, test_labels, 6)
    stock = np.bincount(test_labels, minlength=6)
    trained = held.sum(axis=0) > 0
    assert counts.sum(axis=0).tolist() == np.where(trained, stock, 0).tolist()
    quotas = held / np.maximum(held.sum(axis=0), 1) * stock
    assert (abs(counts - quotas) < 1 + 1e-6).all()
    assert not counts[held == 0].any()
