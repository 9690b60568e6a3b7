"""Evolution on predicted scores: many generations for the price of a few evaluations (HAPFNAS, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.maths.ranking import spearman
from fedloom.search.base import Fit, Surrogate
from fedloom.search.draws import new_ones, samples
from fedloom.spaces.base import SearchSpace

REPEATS = 20  # draws in a row that bring nothing new before one stops looking: a tight budget leaves few architectures

Scores = dict[Architecture, float]  # larger is better
Score = Callable[[Sequence[Architecture]], Scores]  # scores of architectures, by evaluation


@dataclass(frozen=True)
class Found:
    """The best architecture and its score; how many were scored and how many only predicted; and Spearman's rank correlation of
    predictions and scores of the finalists, where it is defined."""

    architecture: Architecture
    score: float
    scored: int
    predicted: int
    agreement: float | None


@dataclass(frozen=True)
class GuidedSearch:
    """Sizes of a search; ``mutation`` is the probability of redrawing a gene of a mutant."""

    population: int
    generations: int
    mutation_size: int
    crossover_size: int
    mutation: float
    finalists: int

    def run(self, space: SearchSpace, score: Score, fit: Fit, rng: np.random.Generator) -> Found:
        """Scores a random population, fits a surrogate to it, evolves on predictions, scores the best of those that were only predicted,
        and takes the best of all that were scored. All of them are drawn from the space, so they keep its budget if it has one."""
        scores = score(new_ones(space, samples(space, rng), self.population, patience=REPEATS))
        surrogate = fit(space.encode_many(scores), np.array(list(scores.values())))
        predicted = self.evolved(space, scores, surrogate, rng)
        finalists = best_first(predicted)[: self.finalists]
        final = score(finalists)
        best = best_first(scores | final)[0]
        agreement = spearman([predicted[one] for one in finalists], [final[one] for one in finalists])
        return Found(best, (scores | final)[best], len(scores) + len(final), len(predicted), agreement)

    def evolved(self, space: SearchSpace, known: Scores, surrogate: Surrogate, rng: np.random.Generator) -> Scores:
        """Descendants of the known architectures with predicted scores. Each generation's parents are drawn evenly from the best so far."""
        scores = dict(known)
        for _ in range(self.generations):
            children = self._children(space, best_first(scores)[: self.population], scores, rng)
            if not children:
                break
            scores |= dict(zip(children, surrogate.predict(space.encode_many(children)).tolist(), strict=True))
        return {one: score for one, score in scores.items() if one not in known}

    def _children(
        self, space: SearchSpace, best: Sequence[Architecture], known: Container[Architecture], rng: np.random.Generator
    ) -> list[Architecture]:
        def parent() -> Architecture:
            return best[int(rng.integers(len(best)))]

        mutants = new_ones(space, (space.mutate(parent(), rng, self.mutation) for _ in count()), self.mutation_size, known, REPEATS)
        crossed = new_ones(space, (space.crossover(parent(), parent(), rng) for _ in count()), self.crossover_size, known, REPEATS)
        return list(dict.fromkeys([*mutants, *crossed]))


def best_first(scores: Mapping[Architecture, float]) -> list[Architecture]:
    """Equal scores by choices, so that no order of arrival decides."""
    return sorted(scores, key=lambda architecture: (-scores[architecture], architecture.choices))
