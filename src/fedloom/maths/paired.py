"""Comparing two methods that were measured on the same clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
DIGITS = 12  # shares such as 9/10 - 8/10 and 8/10 - 7/10 are equal up to rounding, and ranks must see that


@dataclass(frozen=True)
class PairedDifference:
    """The mean of second minus first over pairs, its 95 % Student t interval (none with fewer than two pairs), and the two-sided p of
    Wilcoxon's signed-rank test (Wilcoxon 1945; equal pairs are left out, 1 if all are equal)."""

    pairs: int
    mean: float
    low: float | None
    high: float | None
    p: float


def paired_difference(first: npt.ArrayLike, second: npt.ArrayLike) -> PairedDifference:
    """(pairs,) each: measurements of two methods on the same clients, in the same order."""
    from scipy.special import stdtrit
    from scipy.stats import wilcoxon  # slow to import, needed here only

    differences = np.round(np.asarray(second, float) - np.asarray(first, float), DIGITS)
    pairs, mean = len(differences), float(differences.mean())
    moved = differences[differences != 0]
    p = float(wilcoxon(moved).pvalue) if len(moved) else 1.0
    if pairs < 2:
        return PairedDifference(pairs, mean, None, None, p)
    error = float(differences.std(ddof=1)) / pairs**0.5
    reach = float(stdtrit(pairs - 1, (1 + CONFIDENCE) / 2)) * error
    return PairedDifference(pairs, mean, mean - reach, mean + reach, p)


def holm(ps: Sequence[float]) -> list[float]:
    """The p of several tests, corrected for their number (Holm 1979), in the same order. Taking all below 5 % for differences then errs
    about any of them with 5 % at most, whatever depends on what."""
    order = sorted(range(len(ps)), key=lambda place: ps[place])
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min((len(ps) - rank) * ps[place], 1.0))  # no smaller than that of a clearer difference
        corrected[place] = largest
    return corrected
