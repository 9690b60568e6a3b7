"""Architectures drawn one after the other, without end, and those among them that are new."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng as generator_at
from fedloom.spaces.base import SearchSpace

PATIENCE = 100  # useless architectures in a row before a source is left


def samples(space: SearchSpace, rng: np.random.Generator) -> Iterator[Architecture]:
    while True:
        yield space.sample(rng)


def children(
    space: SearchSpace, parents: Sequence[Architecture], mutation: float, rng: np.random.Generator, twins: bool = False
) -> Iterator[Architecture]:
    """Crossover and mutation of two parents each, drawn evenly. twins: two children each; what one has from the first parent, the
    other has from the second, before both mutate."""
    while True:
        first, second = (parents[place] for place in rng.integers(len(parents), size=2))
        if not twins:
            yield space.mutate(space.crossover(first, second, rng), rng, mutation)
            continue
        same = int(rng.integers(2**63))  # the same draws for both, with the parents exchanged
        for one, other in ((first, second), (second, first)):
            yield space.mutate(space.crossover(one, other, generator_at(same)), rng, mutation)


def new_ones(
    space: SearchSpace, source: Iterator[Architecture], wanted: int, known: Container[Architecture] = (), patience: int = PATIENCE
) -> list[Architecture]:
    """The first ones that are not known, not repeated and within the space's budget; fewer where a source ends or has become useless."""
    found: dict[Architecture, None] = {}  # in order
    useless = 0
    while len(found) < wanted and useless < patience:
        architecture = next(source, None)
        if architecture is None:
            break
        if architecture in known or architecture in found or not space.fits(architecture):
            useless += 1
        else:
            useless, found[architecture] = 0, None
    return list(found)
