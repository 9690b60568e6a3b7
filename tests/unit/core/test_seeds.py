"""Seeds depend on every part of their address and on nothing else."""

from __future__ import annotations

import random

import numpy as np

from fedloom.core.seeds import derive_seed, rng


def test_the_values_of_this_version_are_kept() -> None:
    # A change here changes every run there ever was.
    assert derive_seed(0) == 4761921975702974394
    assert derive_seed(0, 3, "client-1", "shuffle") == 2278776602259066479


def test_every_part_counts() -> None:
    addresses = [
        (),
        (0,),
        (1,),
        ("0",),
        (0, 0),
        (0, 1),
        (1, 0),
        ("a", "b"),
        ("ab",),
        ("a/b",),
        ("a'/'b",),
        ("b", "a"),
        ("", "a"),
        ("a", ""),
    ]
    assert len({derive_seed(*address) for address in addresses}) == len(addresses)


def test_the_numbers_of_numpy_are_numbers() -> None:
    for kind in (np.int64, np.int32, np.uint8, np.intp):
        assert derive_seed(kind(3), "a", kind(0)) == derive_seed(3, "a", 0)
    assert rng(np.int64(7)).random() == rng(7).random()


def test_seeds_fit_63_bits_and_use_them() -> None:
    seeds = [derive_seed(number) for number in range(500)]
    assert len(set(seeds)) == 500
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    assert {seed % 2 for seed in seeds} == {0, 1}


def test_generators_repeat_and_differ_by_address() -> None:
    one, same, other = rng(7, "a"), rng(7, "a"), rng(7, "b")
    draws = one.integers(1000, size=8)
    assert np.array_equal(draws, same.integers(1000, size=8))
    assert not np.array_equal(draws, other.integers(1000, size=8))


def test_global_generators_are_neither_read_nor_moved() -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tobytes()
    first = rng(3, "x").random(4)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before
    random.seed(2)
    np.random.seed(2)
    assert np.array_equal(first, rng(3, "x").random(4))
