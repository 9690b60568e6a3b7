"""Ranks, and how alike two orders are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]  # (n, n)


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


def above_diagonal(square: Matrix) -> npt.NDArray[np.float64]:
    """(n (n - 1) / 2,) what a symmetric matrix says of pairs, in the order (0, 1), (0, 2), …, (1, 2), …"""
    pairs: npt.NDArray[np.float64] = square[np.triu_indices(len(square), 1)]
    return pairs


def mantel(first: Matrix, second: Matrix, relabellings: int, rng: np.random.Generator) -> tuple[float | None, float | None]:
    """Spearman's correlation over pairs of two symmetric matrices, and how likely one as low or lower is by chance (Mantel, 1967).

    Pairs share members, so they are not independent: chance is the members of one matrix in random order, not the pairs.
    """
    found = spearman(above_diagonal(first), above_diagonal(second))
    if found is None:
        return None, None
    orders = (rng.permutation(len(second)) for _ in range(relabellings))
    shuffled = [spearman(above_diagonal(first), above_diagonal(second[np.ix_(order, order)])) for order in orders]
    as_low = sum(value is not None and value <= found for value in shuffled)
    return found, (as_low + 1) / (relabellings + 1)
