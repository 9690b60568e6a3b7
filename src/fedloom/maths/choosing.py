"""What choosing an architecture for each client can give, measured without the luck of the choice.

Every client tries the same architectures, trains each several times, and tests each on two halves of its test images. Two
measurements that share neither the training nor the images err independently. So what one says of the best is checked by the other,
and what both say together is no chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
RESAMPLES, CONFIDENCE = 2000, 0.95


@dataclass(frozen=True)
class Spread:
    """Variances of accuracy. They are estimates without bias, so they can be below 0 where there is nothing."""

    architectures: float  # between architectures, alike for all clients
    own: float  # of what an architecture does at one client beyond that: all that a choice of one's own can use
    error: float  # of a single measurement, beside both


def independent(accuracies: Numbers) -> list[tuple[Numbers, Numbers]]:
    """Pairs of (clients, architectures) that share neither training nor images.

    accuracies: (clients, architectures, repeats, 2) two repeats or more; the last axis are the halves of the test images.
    """
    cells = list(product(range(accuracies.shape[2]), range(2)))
    return [(accuracies[:, :, r, h], accuracies[:, :, s, k]) for (r, h), (s, k) in product(cells, cells) if r != s and h != k]


def beyond(accuracies: Numbers) -> Numbers:
    """(clients, architectures, …) what is left when the means of clients and of architectures are taken away."""
    without_clients = accuracies - accuracies.mean(1, keepdims=True)
    left: Numbers = without_clients - without_clients.mean(0, keepdims=True)
    return left


def spread(accuracies: Numbers) -> Spread:
    """accuracies: (clients, architectures, repeats, 2), two or more of each."""
    clients, architectures = accuracies.shape[:2]
    left, means = beyond(accuracies), accuracies.mean(0, keepdims=True)  # (clients or 1, architectures, repeats, 2)
    shared = _shared(left) / ((clients - 1) * (architectures - 1))
    among = _shared(means - means.mean(1, keepdims=True)) / (architectures - 1)
    alone = float((left**2).sum((0, 1)).mean()) / ((clients - 1) * (architectures - 1))
    return Spread(among - shared / clients, shared, alone - shared)


def _shared(left: Numbers) -> float:
    """The sum of products of two independent measurements, the mean over all such pairs."""
    return float(np.mean([(one * other).sum() for one, other in independent(left)]))


def another(accuracies: Numbers) -> float:
    """What any of the other architectures gains over the first, on average."""
    return float((accuracies[:, 1:] - accuracies[:, :1]).mean())


def best_for_all(accuracies: Numbers) -> float:
    """What the best architecture for all gains over the first: chosen by one measurement, judged by an independent one."""
    return float(np.mean([(other[:, one.mean(0).argmax()] - other[:, 0]).mean() for one, other in independent(accuracies)]))


def best_for_each(accuracies: Numbers) -> float:
    """The same where every client has the best of its own: chosen on half of its test images, judged on the other half."""
    rows = np.arange(len(accuracies))
    return float(np.mean([(other[rows, one.argmax(1)] - other[:, 0]).mean() for one, other in independent(accuracies)]))


def lowest_loss(accuracies: Numbers, losses: Numbers) -> float:
    """What clients gain who take the architecture with the lowest loss on their validation images.

    losses: (clients, architectures, repeats), each of the training whose network it would be.
    """
    tested = accuracies.mean(3)
    chosen = losses.argmin(1, keepdims=True)  # (clients, 1, repeats)
    return float((np.take_along_axis(tested, chosen, 1)[:, 0] - tested[:, 0]).mean())


@cache
def largest_of(count: int) -> float:
    """The expected largest of so many standard normal numbers."""
    from scipy.integrate import quad
    from scipy.special import ndtr

    def above(x: float) -> float:  # the probability that the largest is above x
        return 1.0 - float(ndtr(x)) ** count

    positive, negative = quad(above, 0, 12)[0], quad(lambda x: 1.0 - above(x), -12, 0)[0]
    return float(positive - negative)


def ceiling(own: float, count: int) -> float:
    """The most that a choice of one's own among so many architectures can gain over the best one for all, if one knew the truth: the
    means of architectures aside, each client takes the largest of ``count`` normal numbers of variance ``own``."""
    return math.sqrt(max(own, 0.0)) * largest_of(count)


def between(figure: Callable[[npt.NDArray[np.int64]], float], clients: int, rng: np.random.Generator) -> tuple[float, float]:
    """A 95 % interval of a figure: percentiles over clients that are drawn anew (Efron's bootstrap). figure: takes rows of clients."""
    drawn = [figure(rng.integers(clients, size=clients)) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
