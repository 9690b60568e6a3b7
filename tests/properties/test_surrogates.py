"""What holds for the RBF surrogate of any population of any small space; fedloom.testing.surrogates has what holds for all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.search.rbf import fit_rbf, merged


@st.composite
def populations(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Up to 30 members with up to 8 genes of one to four choices: duplicates, constant and dependent genes come up all the time."""
    sizes = np.array(draw(st.lists(st.integers(1, 4), min_size=1, max_size=8)))
    rows = draw(st.lists(st.tuples(*(st.integers(0, size - 1) for size in sizes.tolist())), min_size=1, max_size=30))
    scores = draw(st.lists(st.integers(0, 20).map(lambda hits: hits / 20), min_size=len(rows), max_size=len(rows)))
    return np.array(rows) / np.maximum(sizes - 1, 1), np.array(scores)


@given(populations())
def test_rbf_passes_through_the_mean_of_equal_members(population: tuple[np.ndarray, np.ndarray]) -> None:
    points, scores = merged(*population)
    assert fit_rbf(*population).predict(points) == pytest.approx(scores, abs=1e-6)
