"""Orders, compared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def ranks(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """(n,) from 1 for the smallest to n; equal values share the mean of their ranks.

    >>> ranks([30, 10, 10]).tolist()
    [3.0, 1.5, 1.5]
    """
    _, group, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group]


def spearman(first: npt.ArrayLike, second: npt.ArrayLike) -> float | None:
    """Spearman's rank correlation: Pearson's of the ranks. None where it is undefined: fewer than two values, or all of them equal.

    >>> spearman([1, 2, 3], [10, 30, 20])
    0.5
    """
    a, b = (values - values.mean() if len(values) else values for values in map(ranks, (first, second)))
    lengths = float(np.sqrt((a @ a) * (b @ b)))
    return round(float(a @ b) / lengths, 12) if lengths else None
