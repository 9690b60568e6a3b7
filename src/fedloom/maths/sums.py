"""The mean of clients' updates from sums of whole numbers alone, so that masks can hide what a single client adds (``maths/masks.py``).

A real number becomes fixed point: x is cut to [-R, R] and rounded to the nearest multiple of a step, ties to even. The step is so large
that as many numbers as there are clients add up within 32 bits, signed; sums are then exact modulo 2^32, in any order.

Notation: client i sends w_i delta_ip for entry p and, where clients train parts, whether it trained p, c_ip in {0, 1}. c is summed first
and without weights: with known numbers of examples a weighted sum would say who is in it. Entries that fewer than ``least`` clients trained
are set to 0 by every client before the second sum, so that no sum shows what one or two of them changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedloom.core.messages import Array, Arrays

Words = npt.NDArray[np.unsignedinteger]  # (entries,) modulo 2^8, 2^16 or 2^32
Bits = npt.NDArray[np.bool_]  # (entries,)
TOP = 2**31 - 1  # largest sum in fixed point
SOME = 1 << 14  # entries


@dataclass(frozen=True)
class FixedPoint:
    """clients: how many numbers a sum may have; range: R, the largest number of one client."""

    range: float
    clients: int

    @cached_property
    def step(self) -> float:
        """Between two neighbours: a number is at most half of it away from what it becomes, and so is a mean."""
        return self.range / (TOP // self.clients)

    def encoded(self, values: Array, factor: float = 1.0) -> Words:
        """Of the values times a factor of at most 1."""
        words = np.empty(values.shape, "<i4")
        for start in range(0, values.size, SOME):  # which fit into a fast cache: all at once takes three times as long
            part = np.clip(values[start : start + SOME].astype(np.float64), -self.range, self.range)
            part *= factor
            part /= self.step
            words[start : start + SOME] = np.rint(part, out=part)
        return words.view("<u4")  # two's complement: modulo 2^32

    def decoded(self, total: Words) -> npt.NDArray[np.float64]:
        return total.astype("<u4").view("<i4") * self.step


def counting(clients: int) -> np.dtype[np.unsignedinteger]:
    """The smallest words in which so many clients can be counted."""
    return np.dtype(next(word for word in ("<u1", "<u2", "<u4") if clients < 1 << 8 * np.dtype(word).itemsize))


def flat(arrays: Arrays) -> Array:
    """(entries,) all arrays in their order."""
    return np.concatenate([array.reshape(-1) for array in arrays.values()])


def shaped(vector: Array, like: Arrays) -> dict[str, Array]:
    """The inverse of ``flat``; each array has the type that ``like`` has."""
    found, start = {}, 0
    for name, array in like.items():
        found[name] = vector[start : start + array.size].reshape(array.shape).astype(array.dtype)
        start += array.size
    return found


def trained(coverage: Arrays, update: Arrays, clients: int) -> Words:
    """(entries,) 1 where a client trained, 0 elsewhere. Arrays of coverage may be compact: they broadcast to those of the update."""
    whole = [np.broadcast_to(coverage[name] > 0, array.shape).reshape(-1) for name, array in update.items()]
    return np.concatenate(whole).astype(counting(clients))


def kept(counts: Words, least: int, gone: int = 0) -> Bits:
    """Entries whose sum may be seen. gone: of the clients that were counted, those whose updates will be missing in the second sum."""
    found: Bits = counts >= least + gone
    return found


def mean(total: Words, fixed: FixedPoint, weight: float) -> npt.NDArray[np.float64]:
    """Of numbers that everybody sent. weight: the sum of w_i."""
    return fixed.decoded(total) / weight


def mean_of_trained(total: Words, fixed: FixedPoint, counts: Words, seen: Bits, counted: int, summed: int) -> npt.NDArray[np.float64]:
    """Of every entry that may be seen the mean over those that trained it; 0 elsewhere.

    ``counts`` are of ``counted`` clients, ``total`` of ``summed``, which may be fewer. How many of these trained an entry is not known,
    and must not be: the two counts would differ by what the missing trained. So the missing are taken for average ones, which is exact
    where all trained.
    """
    found = np.zeros(total.shape)
    np.divide(fixed.decoded(total), counts * (summed / counted), out=found, where=seen)
    return found
