"""Architectures as weights on operations, learned by gradients (MiLeNAS, He et al., CVPR 2020, first order).

Pure functions of tables (…, operations); what is not present has coefficient 0 and never moves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]
Present = npt.NDArray[np.bool_]


def softmax(alphas: Table, present: Present) -> Table:
    """The coefficients of a mixture, over the operations that are present; an edge without any has zeros."""
    highest = np.where(present, alphas, -np.inf).max(-1, keepdims=True, initial=-1e300)
    weights: Table = np.where(present, np.exp(np.where(present, alphas - highest, 0.0)), 0.0)
    shares: Table = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return shares


def through_softmax(coefficients: Table, gradient: Table) -> Table:
    """The gradient by alphas of a loss whose gradient by coefficients is known: p_k (g_k - sum_j p_j g_j)."""
    inside: Table = coefficients * (gradient - (coefficients * gradient).sum(-1, keepdims=True))
    return inside


def mixed_level_step(alphas: Table, present: Present, train: Table, validation: Table, rate: float, weight: float) -> Table:
    """alpha - rate (dF_train / d alpha + weight dF_validation / d alpha), both losses given by their gradients by the coefficients."""
    step = through_softmax(softmax(alphas, present), train + weight * validation)
    return alphas - rate * step


def strongest(alphas: Table, present: Present) -> Present:
    """Of every edge its largest alpha among those present, the first of equals; nothing where nothing is present."""
    chosen: Present = np.arange(alphas.shape[-1]) == np.where(present, alphas, -np.inf).argmax(-1)[..., None]
    return chosen & present
