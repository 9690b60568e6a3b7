"""How clients' updates become one. Pure: new arrays out, inputs untouched, and the order of clients does not matter.

Notation: client i with n_i examples sends delta_ip for parameter entry p; c_ip says in how many training steps it trained p
(0 where it did not). Arrays c may be compact: they broadcast to the shape of delta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from fedloom.core.messages import Array, Arrays
from fedloom.core.registry import Registry

Rule = Callable[[Sequence[Arrays], Sequence[Arrays], Sequence[float]], dict[str, Array]]
AVERAGING: Registry[Rule] = Registry("averaging rule")
THREADS = 4
LARGE = 10**6  # entries of an update: below, threads take longer to begin than to sum
WHOLE = ("fedavg", "clipped", "median", "trimmed_mean")  # where everybody trains everything


@AVERAGING.add("coverage", meaning="of every entry the mean over the clients that trained it, weighted by examples")
def coverage(updates: Sequence[Arrays], coverage: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    """sum_i n_i m_ip delta_ip / sum_i n_i m_ip with m_ip = [c_ip > 0]: the mean over the clients that trained p.

    PerFedSDE-NAS, Eq. 5 as reconstructed: equals ``fedavg`` on entries everybody trained; entries nobody trained stay.
    """
    return _ratio(updates, _trained(coverage), examples)


@AVERAGING.add("coverage_equal", meaning="as coverage, every client counting the same")
def coverage_equal(updates: Sequence[Arrays], coverage: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    """As ``coverage`` with every client weighing the same (PerFedRLNAS: divide by the number of clients that hold p)."""
    return _ratio(updates, _trained(coverage), [1.0] * len(updates))


@AVERAGING.add("coverage_effort", meaning="as coverage, whoever trained an entry more often counting more")
def coverage_effort(updates: Sequence[Arrays], coverage: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    """sum_i n_i c_ip delta_ip / sum_i n_i c_ip: whoever trained p more often weighs more."""
    return _ratio(updates, coverage, examples)


@AVERAGING.add("fedavg", meaning="the mean weighted by examples, whatever a client trained")
def fedavg(updates: Sequence[Arrays], coverage: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    """sum_i n_i delta_ip / sum_i n_i (McMahan et al., 2017); coverage is not read: what one client trained moves by its share."""
    return _ratio(updates, _trained_by(updates, []), examples)


def covered_share(coverage: Arrays, update: Arrays) -> float:
    """Of all entries of one client's update, those that it trained."""
    covered = sum(int(np.count_nonzero(array)) / array.size * update[name].size for name, array in coverage.items())
    return covered / sum(array.size for array in update.values())


def moved(weights: Arrays, change: Arrays) -> dict[str, Array]:
    return {name: array + change[name] for name, array in weights.items()}


# -- robust rules: what a few clients send that lie cannot move the others far ----------------------------------------------------
# All three first shorten updates that are longer than the median update to that length (Sun et al., 2019, with the median as the bound):
# an entry that only one or two clients trained has no majority to outvote a liar, so at least its step must not be longer than the others'.
TRIM = 0.2  # share of the clients that is left out at each end


@AVERAGING.add("clipped", meaning="as coverage, of updates no longer than the median one, nobody counting more than the median client")
def clipped(updates: Sequence[Arrays], coverage: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    """``coverage`` of shortened updates, where no client has more weight than the median client: examples, too, are only claimed."""
    most = float(np.median(examples))
    return _ratio(_shortened(updates), _trained_by(updates, coverage), [min(count, most) for count in examples])


@AVERAGING.add("median", meaning="of every entry the median over the clients that trained it")
def median(updates: Sequence[Arrays], coverage: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    """The median over the clients that trained p (Yin et al., ICML 2018); every client counts once."""
    return _trimmed(updates, coverage, lambda count: (count - 1) // 2)


@AVERAGING.add("trimmed_mean", meaning="of every entry the mean without the highest and the lowest fifth")
def trimmed_mean(updates: Sequence[Arrays], coverage: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    """The mean over the clients that trained p without the ``TRIM`` highest and lowest (Yin et al., ICML 2018); of three or more
    at least one of each is left out. Every client counts once."""
    return _trimmed(updates, coverage, lambda count: np.where(count >= 3, np.maximum(1, np.floor(TRIM * count)), 0))


def _shortened(updates: Sequence[Arrays]) -> list[dict[str, Array]]:
    lengths = [float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in update.values()))) for update in updates]
    bound = float(np.median(lengths))
    factors = [min(1.0, bound / length) if length else 1.0 for length in lengths]
    pairs = zip(updates, factors, strict=True)
    return [{name: array * array.dtype.type(factor) for name, array in update.items()} for update, factor in pairs]


def _trimmed(updates: Sequence[Arrays], coverage: Sequence[Arrays], cut: Callable[[Array], Array]) -> dict[str, Array]:
    """Entry-wise mean of what is left when, of the ``count`` clients that trained an entry, the ``cut(count)`` highest and lowest go."""
    shortened, trained, mean = _shortened(updates), _trained_by(updates, coverage), {}
    for name, first in updates[0].items():
        there = np.stack([np.broadcast_to(client[name], first.shape) for client in trained])  # (clients, …)
        values = np.sort(np.where(there, np.stack([update[name] for update in shortened]).astype(np.float64), np.inf), axis=0)
        count = there.sum(0)
        left_out, place = cut(count), np.arange(len(updates)).reshape(-1, *[1] * first.ndim)
        kept = (place >= left_out) & (place < count - left_out)  # those who did not train it stand at the end
        total = np.where(kept, values, 0.0).sum(0)
        mean[name] = np.divide(total, kept.sum(0), out=np.zeros_like(total), where=count > 0).astype(first.dtype)
    return mean


def _trained_by(updates: Sequence[Arrays], coverage: Sequence[Arrays]) -> list[dict[str, Array]]:
    """Without coverage every client trained everything."""
    return _trained(coverage) if coverage else [{name: np.ones((1,) * array.ndim, bool) for name, array in u.items()} for u in updates]


def _trained(coverage: Sequence[Arrays]) -> list[dict[str, Array]]:
    return [{name: counts if counts.dtype == bool else counts > 0 for name, counts in client.items()} for client in coverage]


def _ratio(updates: Sequence[Arrays], weights: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    """Entry-wise weighted mean; 0 where no client has weight. Sums are made in float64, so the order of clients is lost in rounding.

    Large ones are made by several threads, each its own arrays.
    """
    sizes = {name: array.size for name, array in updates[0].items()}
    parts: list[list[str]] = [[] for _ in range(THREADS if sum(sizes.values()) > LARGE else 1)]
    for number, name in enumerate(sorted(sizes, key=lambda name: -sizes[name])):
        parts[number % len(parts)].append(name)
    each = partial(_ratios, updates=updates, weights=weights, examples=examples)
    if len(parts) == 1:
        found = each(parts[0])
    else:
        with ThreadPoolExecutor(THREADS) as threads:
            found = {name: array for part in threads.map(each, parts) for name, array in part.items()}
    return {name: found[name] for name in sizes}


def _ratios(names: Sequence[str], updates: Sequence[Arrays], weights: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    mean = {}
    room = np.empty((2, max((updates[0][name].size for name in names), default=0)))  # one for all: new memory takes longer than the sums
    for name in names:
        first = updates[0][name]
        total, part = (some[: first.size].reshape(first.shape) for some in room)
        total.fill(0)
        shares = [_share(client[name], count) for client, count in zip(weights, examples, strict=True)]
        for update, share in zip(updates, shares, strict=True):
            total += np.multiply(share, update[name], out=part)
        weight = np.asarray(sum(shares))  # compact arrays of different shapes broadcast
        nobody = ~(weight > 0)
        if nobody.any():  # division and then zeros: to leave entries out of a division takes twice as long
            np.divide(total, np.where(nobody, 1.0, weight), out=total)
            np.copyto(total, 0.0, where=nobody)
        else:
            np.divide(total, weight, out=total)
        mean[name] = total.astype(first.dtype)
    return mean


def _share(weights: Array, count: float) -> Array:
    """A client's part in the sum, in float64; one number, (1, …), where it trained all entries of an array."""
    if weights.dtype == bool and weights.all():
        return np.full((1,) * weights.ndim, float(count))
    return weights * float(count)
