"""The RBF surrogate: values worked out by hand, populations that collapse, and the choice that predictions make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.search.base import SURROGATES, choose
from fedloom.search.rbf import Constant, RadialBasis, finite, fit_rbf, independent, merged
from fedloom.spaces.base import SPACES, ImageShape, SearchSpace


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    entry = SPACES["mobilenetv3"]
    return entry.make(entry.settings.tiny(), ImageShape(1, 8, 10))


def encodings_of(space: SearchSpace, count: int, name: str) -> np.ndarray:
    draw = rng(name)
    return np.stack([space.encode(space.sample(draw)) for _ in range(count)])


# -- values ----------------------------------------------------------------------


def test_one_gene_by_hand() -> None:
    """Points 0, 1/2, 1 with scores 0, 1, 0: lambda is a multiple of (1, -2, 1), because it is orthogonal to constant and linear.

    The kernel part of a(1, -2, 1) is a(-2/8 + 1) = 3a/4 at both ends and 2a/8 = a/4 in the middle, so 3a/4 + c = 0 and a/4 + c = 1:
    a = -2, c = 3/2. At 1/4: -2 (1/64 - 2/64 + 27/64) + 3/2 = 11/16.
    """
    model = fit_rbf(np.array([[0.0], [0.5], [1.0]]), np.array([0.0, 1.0, 0.0]))
    assert model.predict(np.array([[0.0], [0.25], [0.5], [0.75], [1.0]])) == pytest.approx([0, 11 / 16, 1, 11 / 16, 0], abs=1e-12)


def test_two_points_by_hand() -> None:
    """No more points than a linear tail has coefficients: straight between the points and, linear kernel, level beyond them."""
    model = fit_rbf(np.array([[0.25, 1.0], [0.75, 1.0]]), np.array([1.0, 3.0]))
    assert model.predict(np.array([[0.0, 1], [0.25, 1], [0.5, 0], [0.75, 0], [1.0, 1]])) == pytest.approx([1, 1, 2, 3, 3])


def test_it_passes_through_its_points(space: SearchSpace) -> None:
    for count in (135, 40):  # 45 genes: a linear tail has 46 coefficients
        points, scores = encodings_of(space, count, "points"), rng("scores").random(count)
        model = fit_rbf(points, scores)
        assert isinstance(model, RadialBasis) and len(model.columns) == 45
        assert model.cubic == (count == 135)
        assert model.predict(points) == pytest.approx(scores, abs=1e-9)


def test_it_reproduces_a_linear_function(space: SearchSpace) -> None:
    points, others = encodings_of(space, 135, "points"), encodings_of(space, 50, "others")
    slope = rng("slope").normal(size=45)
    assert fit_rbf(points, points @ slope + 3).predict(others) == pytest.approx(others @ slope + 3, abs=1e-9)


def test_it_ranks_what_it_has_not_seen(space: SearchSpace) -> None:
    """A smooth function that is not linear: predictions of new architectures are nearer to it than its mean."""

    def truth(points: np.ndarray) -> np.ndarray:
        return points[:, :5].sum(1) + (points[:, 40:] ** 2).sum(1) - points[:, 40] * points[:, 41]

    points, others = encodings_of(space, 135, "points"), encodings_of(space, 200, "others")
    predicted = fit_rbf(points, truth(points)).predict(others)
    assert np.corrcoef(predicted, truth(others))[0, 1] > 0.9


# -- populations that collapse -------------------------------------------------------


def test_all_equal() -> None:
    model = fit_rbf(np.full((135, 45), 0.5), np.linspace(0, 1, 135))
    assert model == Constant(pytest.approx(0.5))
    assert model.predict(np.zeros((3, 45))) == pytest.approx([0.5] * 3)


def test_a_single_point() -> None:
    assert fit_rbf(np.zeros((1, 4)), np.array([0.25])).predict(np.ones((2, 4))).tolist() == [0.25, 0.25]


def test_all_but_one_equal(space: SearchSpace) -> None:
    one, other = encodings_of(space, 2, "two")
    model = fit_rbf(np.stack([one] * 134 + [other]), np.append(np.tile([0.2, 0.4], 67), 0.9))
    assert model.predict(np.stack([one, other, (one + other) / 2])) == pytest.approx([0.3, 0.9, 0.6])


def test_a_constant_gene_has_no_say(space: SearchSpace) -> None:
    points, scores = encodings_of(space, 135, "points"), rng("scores").random(135)
    points[:, [3, 41]] = 0.5
    model = fit_rbf(points, scores)
    assert isinstance(model, RadialBasis) and set(range(45)) - set(model.columns.tolist()) == {3, 41}
    changed = points.copy()
    changed[:, 3] = 1
    assert model.predict(points) == pytest.approx(scores, abs=1e-9)
    assert model.predict(changed).tolist() == model.predict(points).tolist()


def test_genes_that_vary_together_count_once(space: SearchSpace) -> None:
    points, scores = encodings_of(space, 135, "points"), rng("scores").random(135)
    points[:, 7], points[:, 9] = 1 - points[:, 2], (points[:, 4] + points[:, 5]) / 2
    model = fit_rbf(points, scores)
    assert isinstance(model, RadialBasis) and set(range(45)) - set(model.columns.tolist()) == {7, 9}
    assert model.predict(points) == pytest.approx(scores, abs=1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_a_converging_search_never_raises(space: SearchSpace, seed: int) -> None:
    """375 iterations, as many as a client of the paper makes: the population of 135 ends as near relatives of one architecture."""
    draw = rng("converging", seed)
    wanted = draw.normal(size=45)
    population = [space.sample(draw) for _ in range(135)]
    varying, kernels = [], set()
    for _ in range(375):
        points = np.stack([space.encode(member) for member in population])
        model = fit_rbf(points, np.round(points @ wanted, 1))
        parents = draw.integers(20, size=(10, 2))
        children = [space.mutate(space.crossover(population[a], population[b], draw), draw, 0.02) for a, b in parents]
        predicted = model.predict(np.stack([space.encode(child) for child in children]))
        assert np.isfinite(predicted).all()
        everyone = [*population, *choose(children, (), predicted, 10)]
        population = sorted(everyone, key=lambda member: -round(float(space.encode(member) @ wanted), 1))[:135]
        varying.append(int((np.ptp(points, axis=0) > 0).sum()))
        kernels.add(isinstance(model, RadialBasis) and model.cubic)
    assert varying[0] == 45 and varying[-1] < 45 and True in kernels
    assert len(set(population)) < 135  # it did collapse


# -- scores that are not numbers ------------------------------------------------------


def test_a_score_that_is_not_finite_is_the_worst() -> None:
    assert finite(np.array([0.5, np.nan, 0.2, np.inf, -np.inf])).tolist() == [0.5, 0.2, 0.2, 0.2, 0.2]
    assert finite(np.array([np.nan, np.inf])).tolist() == [0, 0]
    points = np.array([[0.0], [0.5], [1.0]])
    assert fit_rbf(points, np.array([0.0, 1.0, np.nan])).predict(points) == pytest.approx([0, 1, 0], abs=1e-12)


# -- parts ------------------------------------------------------------------------------


def test_equal_rows_are_merged() -> None:
    points, values = merged(np.array([[1.0, 0], [0, 1], [1, 0], [0, 0.5]]), np.array([1.0, 5, 2, 7]))
    assert points.tolist() == [[0, 0.5], [0, 1], [1, 0]] and values.tolist() == [7, 5, 1.5]


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        ([[0, 1, 0, 1], [0, 0, 1, 1]], [0, 1]),
        ([[1, 1, 1, 1], [0, 0, 1, 1]], [1]),
        ([[0, 0, 0, 0]], []),
        ([[0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 1, 1]], [0, 2]),
        ([[0, 1, 0, 1], [0, 0, 1, 1], [0, 0.5, 0.5, 1], [0, 0, 0, 1]], [0, 1, 3]),
        ([[0, 1, 0, 1, 1], [0, 0, 1, 1, 0], [0, 1, 1, 2, 1]], [0, 1]),
        ([], []),
    ],
)
def test_independent_columns(columns: list[list[float]], kept: list[int]) -> None:
    assert independent(np.array(columns, float).reshape(-1, len(columns[0]) if columns else 4).T).tolist() == kept


def test_no_candidates() -> None:
    model = fit_rbf(np.array([[0.0], [0.5], [1.0]]), np.array([0.0, 1.0, 0.0]))
    assert model.predict(np.empty((0, 1))).tolist() == []


# -- the choice -----------------------------------------------------------------------


def named(*choices: int) -> list[Architecture]:
    return [Architecture("toy", (choice,)) for choice in choices]


@pytest.mark.parametrize(
    ("candidates", "known", "predictions", "count", "chosen"),
    [
        ((0, 1, 2, 3), (), (0.1, 0.4, 0.2, 0.3), 2, (1, 3)),
        ((0, 1, 2, 3), (1,), (0.1, 0.4, 0.2, 0.3), 2, (3, 2)),
        ((0, 1, 0, 1, 2), (), (0.5, 0.4, 0.5, 0.4, 0.1), 3, (0, 1, 2)),
        ((3, 1, 2), (), (0.5, 0.5, 0.5), 2, (3, 1)),  # equal: in their order
        ((0, 1, 2), (0, 2), (0.5, 0.4, 0.1), 3, (1,)),  # fewer where there are fewer
        ((0, 1, 2), (), (np.nan, -np.inf, 0.1), 3, (2, 0, 1)),
        ((0, 1), (), (0.1, np.inf), 1, (1,)),
        ((), (), (), 3, ()),
        ((0, 1), (), (0.1, 0.2), 0, ()),
    ],
)
def test_choose(candidates: Any, known: Any, predictions: Any, count: int, chosen: Any) -> None:
    assert choose(named(*candidates), named(*known), np.array(predictions, float), count) == named(*chosen)


def test_every_surrogate_is_known_by_name() -> None:
    assert list(SURROGATES) == ["rbf"] and SURROGATES["rbf"].make is fit_rbf
