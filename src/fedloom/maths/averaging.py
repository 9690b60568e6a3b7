"""How clients' updates become one. Pure: new arrays out, inputs untouched, and the order of clients does not matter.

Notation: client i with n_i examples sends delta_ip for parameter entry p; c_ip says in how many training steps it trained p
(0 where it did not). Arrays c may be compact: they broadcast to the shape of delta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedloom.core.messages import Array, Arrays

Rule = Callable[[Sequence[Arrays], Sequence[Arrays], Sequence[float]], dict[str, Array]]


def fedavg(updates: Sequence[Arrays], coverage: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    """sum_i n_i delta_ip / sum_i n_i (McMahan et al., 2017); coverage is not read: what one client trained moves by its share."""
    ones = [{name: np.ones((1,) * array.ndim) for name, array in update.items()} for update in updates]
    return _ratio(updates, ones, examples)


def coverage(updates: Sequence[Arrays], coverage: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    """sum_i n_i m_ip delta_ip / sum_i n_i m_ip with m_ip = [c_ip > 0]: the mean over the clients that trained p.

    PerFedSDE-NAS, Eq. 5 as reconstructed: equals ``fedavg`` on entries everybody trained; entries nobody trained stay.
    """
    return _ratio(updates, _trained(coverage), examples)


def coverage_equal(updates: Sequence[Arrays], coverage: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    """As ``coverage`` with every client weighing the same (PerFedRLNAS: divide by the number of clients that hold p)."""
    return _ratio(updates, _trained(coverage), [1.0] * len(updates))


def coverage_effort(updates: Sequence[Arrays], coverage: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    """sum_i n_i c_ip delta_ip / sum_i n_i c_ip: whoever trained p more often weighs more."""
    return _ratio(updates, coverage, examples)


def _trained(coverage: Sequence[Arrays]) -> list[dict[str, Array]]:
    return [{name: counts > 0 for name, counts in client.items()} for client in coverage]


def _ratio(updates: Sequence[Arrays], weights: Sequence[Arrays], examples: Sequence[float]) -> dict[str, Array]:
    """Entry-wise weighted mean; 0 where no client has weight. Sums are made in float64, so the order of clients is lost in rounding."""
    mean = {}
    for name, first in updates[0].items():
        total = np.zeros(first.shape)
        weight = np.zeros(weights[0][name].shape)
        for update, client_weights, count in zip(updates, weights, examples, strict=True):
            share = count * client_weights[name].astype(np.float64)
            total += share * update[name]
            weight = weight + share  # compact arrays of different shapes broadcast
        mean[name] = np.divide(total, weight, out=np.zeros_like(total), where=np.broadcast_to(weight > 0, total.shape)).astype(first.dtype)
    return mean


AVERAGING: dict[str, Rule] = {rule.__name__: rule for rule in (coverage, coverage_equal, coverage_effort, fedavg)}
