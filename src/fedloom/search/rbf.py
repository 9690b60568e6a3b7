"""Radial basis functions through a client's own scores (PerFedSDE-NAS, supplement Algorithm 1, line 12).

The kernel is lost from the paper; this is the cubic one with a linear tail that its first author uses elsewhere:
s(x) = sum_i lambda_i ||x - x_i||^3 + gamma . x + gamma_0, which passes through every point and reproduces linear functions.

A population that converges repeats architectures and stops varying in some genes, and then the tail has no unique solution. So equal
rows are merged, and columns that are constant, or a combination of others, are left out: they carry no information of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedloom.search.base import SURROGATES, Numbers, Surrogate

INDEPENDENT = 1e-6  # share of a column's length that other columns must leave unexplained; rounding leaves about 1e-15


@dataclass(frozen=True)
class Constant:
    """Knows no difference between architectures."""

    value: float

    def predict(self, encodings: Numbers) -> Numbers:
        return np.full(len(encodings), self.value)


@dataclass(frozen=True, eq=False)
class RadialBasis:
    """An interpolant of some of the genes: cubic with a linear tail, or linear with a constant one. It gives what scipy's
    ``RBFInterpolator`` gives, which compares points one pair after the other."""

    points: Numbers
    columns: npt.NDArray[np.intp]
    cubic: bool
    coefficients: Numbers  # (points + tail, 1)

    @classmethod
    def through(cls, points: Numbers, values: Numbers, columns: npt.NDArray[np.intp], cubic: bool) -> RadialBasis:
        from scipy.linalg.lapack import dgesv  # slow to import, needed here only

        points = points[:, columns]
        rows, tail = len(points), len(columns) + 1 if cubic else 1
        system, scores = np.zeros((rows + tail, rows + tail)), np.zeros((rows + tail, 1))
        system[:rows] = _basis(points, points, cubic)
        system[rows:, :rows] = system[:rows, rows:].T
        scores[:rows, 0] = values
        _, _, coefficients, failed = dgesv(system.T, scores, overwrite_a=True, overwrite_b=True)  # symmetric; LAPACK reads columns
        if failed:
            raise np.linalg.LinAlgError("no radial basis functions go through these points")
        return cls(points, columns, cubic, coefficients)

    def predict(self, encodings: Numbers) -> Numbers:
        if not len(encodings):
            return np.empty(0)
        return (_basis(np.asarray(encodings, float)[:, self.columns], self.points, self.cubic) @ self.coefficients)[:, 0]


def _basis(places: Numbers, points: Numbers, cubic: bool) -> Numbers:
    """(places, points + tail): what each coefficient counts at each place. The tail sees points between -1 and 1."""
    from scipy.spatial.distance import cdist  # slow to import, needed here only

    distances = cdist(places, points)
    if not cubic:
        return np.column_stack([-distances, np.ones(len(places))])
    lowest, highest = points.min(0), points.max(0)
    return np.column_stack(
        [distances * distances * distances, np.ones(len(places)), (places - (lowest + highest) / 2) / ((highest - lowest) / 2)]
    )


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
        return RadialBasis.through(points, values, columns, cubic=True)
    return RadialBasis.through(points, values, varying, cubic=False)


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
    """Columns that are no combination of a constant and the columns before them."""
    rows, columns = points.shape
    enough = INDEPENDENT * np.sqrt(np.square(points).sum(0))
    # Mostly all of them are: the diagonal says what each column adds to those before it.
    if columns < rows and (abs(np.diagonal(np.linalg.qr(np.column_stack([np.ones(rows), points]), mode="r"))[1:]) > enough).all():
        return np.arange(columns)
    basis, found, kept = np.empty((columns + 1, rows)), 1, []  # Gram-Schmidt, twice for accuracy
    basis[0] = rows**-0.5
    for column in range(columns):
        rest = points[:, column]
        for _ in range(2):
            rest = rest - (basis[:found] @ rest) @ basis[:found]
        length = math.sqrt(rest @ rest)
        if length > enough[column]:
            basis[found], found = rest / length, found + 1
            kept.append(column)
    return np.array(kept, dtype=np.intp)
