"""Search guided by a predictor: what it returns, what it costs, and that it keeps a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.search.base import Numbers, Surrogate
from fedloom.search.forest import fit_forest
from fedloom.search.guided import GuidedSearch, Scores, best_first
from fedloom.spaces.base import SPACES, ImageShape, SearchSpace
from fedloom.spaces.budget import Bounded, Limit
from fedloom.supernets.base import make_supernet

SEARCH = GuidedSearch(population=20, generations=4, mutation_size=8, crossover_size=4, mutation=0.2, finalists=6)


def whole(name: str = "mobilenetv3") -> SearchSpace:
    space: SearchSpace = make_supernet(name, SPACES[name].settings.tiny(), ImageShape(1, 8, 10)).space
    return space


def within(space: SearchSpace, share: float) -> Bounded:
    """At most this share of the way from the smallest to the largest."""
    least, most = (space.cost(space.named[name]).macs for name in ("smallest", "largest"))
    limit = least + share * (most - least)
    return Bounded(space, (Limit("macs", limit, lambda one: space.cost(one).macs, "multiply-accumulates"),))


class Judge:
    """Scores by a known rule, and remembers what it was asked."""

    def __init__(self, space: SearchSpace) -> None:
        self.space, self.asked = space, list[Architecture]()

    def __call__(self, architectures: Sequence[Architecture]) -> Scores:
        self.asked += architectures
        return {one: float(self.space.encode(one).sum()) for one in architectures}


@pytest.mark.parametrize("name", ["mobilenetv3", "nasvit", "darts"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_nothing_over_budget_is_scored_or_returned(name: str, share: float) -> None:
    """The judge likes large networks, so that the search pushes against the limit."""
    space = within(whole(name), share)
    for seed in range(5):
        judge = Judge(space)
        found = replace(SEARCH, generations=2).run(space, judge, fit_forest, rng("budget", seed))
        assert found.architecture in judge.asked and all(space.fits(one) for one in judge.asked)
        space.check(found.architecture)


def test_where_only_the_smallest_fits_it_is_found() -> None:
    space = within(whole(), 0.0)
    found = SEARCH.run(space, Judge(space), fit_forest, rng(0))
    assert found.architecture == space.named["smallest"]
    assert (found.scored, found.predicted, found.agreement) == (1, 0, None)


def test_the_best_of_all_that_were_scored_is_returned_and_evolution_finds_better_than_chance() -> None:
    space = whole()
    better = 0
    for seed in range(5):
        judge = Judge(space)
        found = SEARCH.run(space, judge, fit_forest, rng("better", seed))
        scores = {one: float(space.encode(one).sum()) for one in judge.asked}
        assert found.architecture == best_first(scores)[0] and found.score == scores[found.architecture]
        assert len(set(judge.asked)) == len(judge.asked) == found.scored == 26  # nothing is scored twice
        assert 0 < found.predicted <= 4 * (8 + 4)
        better += found.architecture in judge.asked[20:]
    assert better >= 4


class Liar:
    """Predicts the opposite."""

    def predict(self, encodings: Numbers) -> Numbers:
        return 1000 - encodings.sum(1)


def test_a_prediction_never_stands_in_for_a_score() -> None:
    space, judge = whole(), Judge(whole())

    def lie(encodings: Numbers, scores: Numbers) -> Surrogate:
        return Liar()

    found = SEARCH.run(space, judge, lie, rng(1))
    assert found.architecture in judge.asked[:20] and found.score == space.encode(found.architecture).sum()
    assert found.agreement == pytest.approx(-1)


@pytest.mark.parametrize(("mutants", "crossings"), [(5, 0), (0, 5), (0, 0)])
def test_both_kinds_of_children_are_made_as_often_as_asked(mutants: int, crossings: int) -> None:
    space = whole()
    search = replace(SEARCH, generations=1, mutation_size=mutants, crossover_size=crossings)
    known = Judge(space)([space.sample(rng("parents")), space.named["largest"]])
    children = search.evolved(space, known, Liar(), rng(2))
    assert len(children) == mutants + crossings and not set(children) & set(known)
    if crossings:  # every gene that is active in both parents is one of theirs
        first, second = (np.array(parent.choices) for parent in known)
        both = space.active(first) & space.active(second)
        for child in children:
            choices = np.array(child.choices)[both & space.active(child.choices)]
            allowed = both & space.active(child.choices)
            assert ((choices == first[allowed]) | (choices == second[allowed])).all()


# -- the forest --------------------------------------------------------------------------
def test_a_forest_learns_forgets_the_order_and_draws_the_same_trees_again() -> None:
    draw = rng("forest")
    points = draw.random((60, 5))
    scores = 3 * points[:, 0] - points[:, 1]
    order = draw.permutation(60)
    forest, again = fit_forest(points, scores), fit_forest(points[order], scores[order])
    probes = draw.random((40, 5))
    assert forest.predict(probes).tobytes() == again.predict(probes).tobytes()
    assert np.corrcoef(forest.predict(probes), 3 * probes[:, 0] - probes[:, 1])[0, 1] > 0.8


def test_a_forest_takes_failures_and_single_points() -> None:
    points = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    assert np.isfinite(fit_forest(points, np.array([-np.inf, 1.0, 2.0])).predict(points)).all()
    assert fit_forest(points[:1], np.array([0.5])).predict(points).tolist() == [0.5] * 3
    assert fit_forest(points, np.arange(3.0)).predict(points[:0]).shape == (0,)
