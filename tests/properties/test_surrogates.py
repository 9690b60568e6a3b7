"""What holds for the RBF surrogate of any population of any small space; fedloom.testing.surrogates has what holds for all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import RBFInterpolator

from fedloom.core.seeds import rng
from fedloom.search.base import choose
from fedloom.search.rbf import RadialBasis, fit_rbf, merged
from fedloom.spaces.base import SPACES, ImageShape


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


@pytest.mark.parametrize("name", ["mobilenetv3", "nasvit", "darts"])
def test_it_picks_what_scipy_would(name: str) -> None:
    """Populations of any size, drawn at random or from a few parents, in turn."""
    entry = SPACES[name]
    space, fitted = entry.make(entry.settings.tiny(), ImageShape(3, 32, 10)), 0
    for number in range(30):
        draw = rng("as scipy", name, number)
        parents = [space.sample(draw) for _ in range(5)]
        size, near = int(draw.integers(20, 3 * len(space.genes) + 50)), draw.random()
        members = [space.mutate(parents[place % 5], draw, near) if number % 2 else space.sample(draw) for place in range(size)]
        candidates = [space.sample(draw) for _ in range(100)]
        scores, known, new = draw.random(size), space.encode_many(members), space.encode_many(candidates)
        model = fit_rbf(known, scores)
        if not isinstance(model, RadialBasis):
            continue
        points, values = merged(known, scores)
        how = {"kernel": "cubic", "degree": 1} if model.cubic else {"kernel": "linear", "degree": 0}
        expected = RBFInterpolator(points[:, model.columns], values, **how)(new[:, model.columns])
        found, fitted = model.predict(new), fitted + 1
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert choose(candidates, members, found, 10) == choose(candidates, members, expected, 10)
    assert fitted > 20
