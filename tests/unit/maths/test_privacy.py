"""Short updates and noise."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedloom.maths.privacy import gaussian, length, noisy, shortened

UPDATE = {"b": np.array([3.0, 0.0], np.float32), "a": np.full((2, 2), 2.0, np.float32)}  # 5 long


def test_the_length_is_that_of_all_arrays_together() -> None:
    assert length(UPDATE) == 5


@given(st.floats(1e-6, 20), st.integers(0, 2**32))
def test_no_update_is_longer_than_the_clip_and_none_turns(clip: float, seed: int) -> None:
    update = {name: np.random.default_rng(seed).normal(size=(3, 5)).astype(np.float32) for name in "ab"}
    short = shortened(update, clip)
    assert length(short) <= clip or length(short) == length(update) <= clip
    assert length(short) > 0.99999 * min(clip, length(update))
    for name, array in update.items():
        assert short[name].dtype == np.float32
        np.testing.assert_allclose(short[name] * length(update), array * length(short), rtol=1e-4, atol=1e-7)


def test_a_short_update_stays_as_it_is() -> None:
    short = shortened(UPDATE, 5.0)
    assert all(np.array_equal(short[name], array) for name, array in UPDATE.items())


def test_noise_is_gaussian_and_follows_from_its_key_alone() -> None:
    drawn = gaussian(b"key", 200_001)
    assert drawn.shape == (200_001,) and np.array_equal(drawn, gaussian(b"key", 200_001))
    assert stats.kstest(drawn, "norm").pvalue > 0.01
    other = gaussian(b"another key", 200_001)
    assert abs(np.corrcoef(drawn, other)[0, 1]) < 0.01
    assert abs(np.corrcoef(drawn[:100_000], drawn[100_001:])[0, 1]) < 0.01  # the two halves of Box-Muller
    assert np.isfinite(drawn).all() and 3.5 < np.abs(drawn).max() < 8.6


def test_every_entry_gets_its_own_noise_of_the_deviation_that_was_asked_for() -> None:
    update = {"b": np.full((100, 100), 7.0, np.float32), "a": np.full(10_000, 7.0, np.float32)}
    found = noisy(update, 0.5, b"key")
    assert list(found) == ["b", "a"] and all(found[name].dtype == np.float32 for name in update)
    assert found["b"].shape == (100, 100)
    noise = np.concatenate([found["a"], found["b"].ravel()]) - 7.0
    assert stats.kstest(noise, "norm", args=(0, 0.5)).pvalue > 0.01
    assert len(np.unique(noise)) > 19_000
    turned = noisy({name: update[name] for name in ("a", "b")}, 0.5, b"key")
    assert all(np.array_equal(found[name], turned[name]) for name in update)  # whatever the order in which arrays are named
