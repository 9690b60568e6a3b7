"""Architectures near an anchor: a network that is always trained, and that a search leaves step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.search.draws import new_ones, samples
from fedloom.spaces.base import SearchSpace


@dataclass(frozen=True)
class Near:
    """distance: the probability with which a gene may differ from the anchor's; at 1 everything stays as it was drawn."""

    space: SearchSpace  # with its budget
    anchor: Architecture
    distance: float

    def moved(self, source: Iterator[Architecture], rng: np.random.Generator) -> Iterator[Architecture]:
        """What a source draws, moved towards the anchor: a gene keeps its choice with probability ``distance``, else gets the anchor's."""
        return source if self.distance == 1 else (self.space.crossover(drawn, self.anchor, rng, self.distance) for drawn in source)

    def one(self, rng: np.random.Generator) -> list[Architecture]:
        """A random one, for a training step."""
        return [next(self.moved(samples(self.space, rng), rng))]

    def population(self, size: int, rng: np.random.Generator) -> list[Architecture]:
        """The anchor, and different random ones up to this size, or as many as there are."""
        return [self.anchor, *new_ones(self.space, self.moved(samples(self.space, rng), rng), size - 1, {self.anchor})]

    def genes(self, architecture: Architecture) -> int:
        """In how many genes an architecture differs from the anchor."""
        return sum(own != other for own, other in zip(architecture.choices, self.anchor.choices, strict=True))


def grown(distance: float, round: int, first: int, rounds: int) -> float:
    """The distance in a round, or at the end: from the first round of a search it grows evenly, and reaches its value in the last one."""
    return distance if distance == 1 else distance * min(1.0, (round + 1 - first) / max(1, rounds - first))
