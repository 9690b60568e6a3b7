"""Radial basis functions through a client's own scores (PerFedSDE-NAS, supplement Algorithm 1, line 12).

The kernel is lost from the paper; this is the cubic one with a linear tail that its first author uses elsewhere:
s(x) = sum_i lambda_i ||x - x_i||^3 + gamma . x + gamma_0, which passes through every point and reproduces linear functions.

A population that converges repeats architectures and stops varying in some genes, and then the tail has no unique solution. So equal
rows are merged, and columns that are constant, or a combination of others, are left out: they carry no information of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.interpolate import RBFInterpolator

from fedloom.search.base import SURROGATES, Numbers, Surrogate

INDEPENDENT = 1e-6  # share of a column's length that other columns must leave unexplained; rounding leaves about 1e-15


@dataclass(frozen=True)
class Constant:
    """Knows no difference between architectures."""

    value: float

    def predict(self, encodings: Numbers) -> Numbers:
        return np.full(len(encodings), self.value)


@dataclass(frozen=True)
class RadialBasis:
    """An interpolant of some of the genes."""

    interpolant: RBFInterpolator
    columns: npt.NDArray[np.intp]

    def predict(self, encodings: Numbers) -> Numbers:
        if not len(encodings):
            return np.empty(0)
        return np.asarray(self.interpolant(np.asarray(encodings, float)[:, self.columns]), float)


@SURROGATES.add("rbf", meaning="radial basis functions through the population's scores")
def fit_rbf(encodings: Numbers, scores: Numbers) -> Surrogate:
    """Cubic with a linear tail where there are more points than the tail has coefficients; else linear with a constant tail, which
    any two points determine; the mean where there is only one."""
    points, values = merged(np.asarray(encodings, float), finite(np.asarray(scores, float)))
    varying = np.flatnonzero(np.ptp(points, axis=0) > 0)
    columns = varying[independent(points[:, varying])]
    if len(varying) == 0:
        return Constant(float(values.mean()))
    if len(points) > len(columns) + 1:
        return RadialBasis(RBFInterpolator(points[:, columns], values, kernel="cubic", degree=1), columns)
    return RadialBasis(RBFInterpolator(points[:, varying], values, kernel="linear", degree=0), varying)


def finite(scores: Numbers) -> Numbers:
    """A score that is not finite belongs to a network that failed: it counts as the worst finite one, or 0 if there is none."""
    good = np.isfinite(scores)
    return np.where(good, scores, scores[good].min() if good.any() else 0.0)


def merged(points: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
    """Equal rows become one with their mean value. Rows come out sorted, so that their order on the way in is forgotten."""
    order = np.lexsort((values, *points.T[::-1]))
    points, values = points[order], values[order]
    first = np.append(True, (points[1:] != points[:-1]).any(axis=1))
    group = np.cumsum(first) - 1
    return points[first], np.bincount(group, values) / np.bincount(group)


def independent(points: Numbers) -> npt.NDArray[np.intp]:
    """Columns that are no combination of a constant and the columns before them (Gram-Schmidt, twice for accuracy)."""
    rows, columns = points.shape
    basis = np.full((1, rows), rows**-0.5)
    kept = []
    for column in range(columns):
        rest = points[:, column]
        for _ in range(2):
            rest = rest - (basis @ rest) @ basis
        length = np.linalg.norm(rest)
        if length > INDEPENDENT * np.linalg.norm(points[:, column]):
            basis = np.vstack([basis, rest / length])
            kept.append(column)
    return np.array(kept, dtype=np.intp)
