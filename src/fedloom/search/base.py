"""What a surrogate is, and how its predictions choose among candidates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedloom.core.architecture import Architecture
from fedloom.core.registry import Registry
from fedloom.spaces.base import SearchSpace

Numbers = npt.NDArray[np.float64]


class Surrogate(Protocol):
    def predict(self, encodings: Numbers) -> Numbers:
        """(m, genes) encodings -> (m,) scores."""


# (n, genes) encodings in [0, 1] and (n,) scores, larger is better -> a model of them. Takes any n from 1 on, repeated rows, constant
# genes and scores that are not finite; the order of rows does not matter.
Fit = Callable[[Numbers, Numbers], Surrogate]

SURROGATES: Registry[Fit] = Registry("surrogate")


def predicted(
    space: SearchSpace, fit: Fit, known: Sequence[Architecture], scores: Sequence[float], candidates: Sequence[Architecture]
) -> Numbers:
    """What a surrogate of known scores says of candidates."""
    return fit(space.encode_many(known), np.array(scores)).predict(space.encode_many(candidates))


def choose(candidates: Sequence[Architecture], known: Collection[Architecture], predictions: Numbers, count: int) -> list[Architecture]:
    """The best ``count`` candidates by prediction, none of them known or twice; fewer if there are fewer.

    Equal predictions keep the order of the candidates; a prediction that is not a number comes last.
    """
    order = np.argsort(-np.nan_to_num(predictions, nan=-np.inf, posinf=np.inf, neginf=-np.inf), kind="stable")
    passed = set(known)
    chosen: list[Architecture] = []
    for place in order:
        if len(chosen) == count:
            break
        candidate = candidates[place]
        if candidate not in passed:
            passed.add(candidate)
            chosen.append(candidate)
    return chosen
