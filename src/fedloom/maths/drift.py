"""Control variates against the drift of clients (SCAFFOLD, Karimireddy et al., ICML 2020)."""

from __future__ import annotations

from collections.abc import Iterable

from fedloom.core.messages import Array, Arrays


def reach(rates: Iterable[float], momentum: float) -> float:
    """How far SGD goes when every gradient is 1; one rate per step. Without momentum it is the sum of the rates, K eta in the paper."""
    way = pace = 0.0
    for rate in rates:
        pace = momentum * pace + 1
        way += rate * pace
    return way


def control_change(shared: Arrays, update: Arrays, reach: float) -> dict[str, Array]:
    """c_i+ - c_i with c_i+ = c_i - c + (x - y) / reach (option II): y - x is the update, c is shared, and c_i falls out."""
    return {name: -array - update[name] / array.dtype.type(reach) for name, array in shared.items()}
