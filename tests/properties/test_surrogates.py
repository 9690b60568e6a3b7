"""What holds for a surrogate of any population of any small space."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.search.base import SURROGATES
from fedloom.search.rbf import merged


@st.composite
def populations(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Up to 30 members with up to 8 genes of one to four choices: duplicates, constant and dependent genes come up all the time."""
    sizes = np.array(draw(st.lists(st.integers(1, 4), min_size=1, max_size=8)))
    rows = draw(st.lists(st.tuples(*(st.integers(0, size - 1) for size in sizes.tolist())), min_size=1, max_size=30))
    scores = draw(st.lists(st.integers(0, 20).map(lambda hits: hits / 20), min_size=len(rows), max_size=len(rows)))
    return np.array(rows) / np.maximum(sizes - 1, 1), np.array(scores)


@pytest.mark.parametrize("name", SURROGATES)
@given(populations(), st.randoms(use_true_random=False))
def test_the_order_of_members_does_not_matter(name: str, population: tuple[np.ndarray, np.ndarray], random: object) -> None:
    points, scores = population
    order = list(range(len(points)))
    random.shuffle(order)  # type: ignore[attr-defined]
    one, other = SURROGATES[name](points, scores), SURROGATES[name](points[order], scores[order])
    assert one.predict(1 - points).tobytes() == other.predict(1 - points).tobytes()


@pytest.mark.parametrize("name", SURROGATES)
@given(populations())
def test_predictions_are_finite_and_inputs_untouched(name: str, population: tuple[np.ndarray, np.ndarray]) -> None:
    points, scores = population
    before = points.tobytes(), scores.tobytes()
    predicted = SURROGATES[name](points, scores).predict(np.concatenate([points, 1 - points]))
    assert predicted.shape == (2 * len(points),) and np.isfinite(predicted).all()
    assert (points.tobytes(), scores.tobytes()) == before


@given(populations())
def test_rbf_passes_through_the_mean_of_equal_members(population: tuple[np.ndarray, np.ndarray]) -> None:
    points, scores = merged(*population)
    assert SURROGATES["rbf"](*population).predict(points) == pytest.approx(scores, abs=1e-6)
