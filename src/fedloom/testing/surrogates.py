"""What every surrogate promises, for populations of any small space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedloom.core.seeds import rng
from fedloom.search.base import Fit, Numbers
from fedloom.testing.spaces import each

POPULATIONS = 100


def surrogates(cases: Sequence[Any]) -> Any:
    """The fixture of a SurrogateContract; a case is a function that fits."""
    return each(cases)


def populations() -> Iterator[tuple[Numbers, Numbers]]:
    """1 to 30 members with 1 to 8 genes of one to four choices: duplicates, constant and dependent genes come up all the time."""
    for number in range(POPULATIONS):
        draw = rng("population", number)
        sizes = draw.integers(1, 5, size=draw.integers(1, 9))
        members = draw.integers(1, 31) if number else 1
        points = draw.integers(sizes, size=(members, len(sizes))) / np.maximum(sizes - 1, 1)
        yield points, draw.integers(0, 21, size=members) / 20


class SurrogateContract:
    """Needs a fixture ``fit``, such as ``surrogates`` makes."""

    def test_the_order_of_members_does_not_matter(self, fit: Fit) -> None:
        for number, (points, scores) in enumerate(populations()):
            order = rng("order", number).permutation(len(points))
            one, other = fit(points, scores).predict(1 - points), fit(points[order], scores[order]).predict(1 - points)
            assert one.tobytes() == other.tobytes(), (points, scores, order)

    def test_predictions_are_finite_and_inputs_untouched(self, fit: Fit) -> None:
        for points, scores in populations():
            before = points.tobytes(), scores.tobytes()
            predicted = fit(points, scores).predict(np.concatenate([points, 1 - points]))
            assert predicted.shape == (2 * len(points),) and np.isfinite(predicted).all(), (points, scores)
            assert (points.tobytes(), scores.tobytes()) == before

    def test_scores_that_are_not_finite_leave_finite_predictions(self, fit: Fit) -> None:
        for number, (points, _) in enumerate(populations()):
            scores = rng("bad", number).choice([np.nan, np.inf, -np.inf, 0.5], len(points))
            assert np.isfinite(fit(points, scores).predict(points)).all(), (points, scores)

    def test_no_candidates_no_predictions(self, fit: Fit) -> None:
        for points, scores in populations():
            assert fit(points, scores).predict(points[:0]).shape == (0,)
