"""Client-level differential privacy: short updates, Gaussian noise, and what a number of noisy sums tells about one client.

McMahan et al. (ICLR 2018): a client shortens its update to length C, and the sum of a round's updates gets noise of standard deviation
z C. Here every one of k participants adds N(0, z^2 C^2 / k), so that nobody ever holds a sum without noise (Kairouz et al., ICML 2021).
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import Array, Arrays

UNIT = 2.0**-53  # of 53 bits, as many as a double holds
LARGEST = math.sqrt(-2 * math.log(UNIT))  # number that ``gaussian`` can draw


def length(update: Arrays) -> float:
    """Euclidean norm over all arrays."""
    return float(np.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in update.values())))


def shortened(update: Arrays, longest: float) -> dict[str, Array]:
    """The update, scaled so that it is no longer than ``longest``; shorter ones stay as they are."""
    factor = longest / max(length(update), longest)
    if factor == 1:
        return dict(update)
    # Rounding to float32 may add to the length, at most 2^-24 of it: more than that is taken off before.
    return {name: (array * (factor * (1 - 2.0**-20))).astype(array.dtype) for name, array in update.items()}


def noisy(update: Arrays, deviation: float, key: bytes) -> dict[str, Array]:
    """The update with Gaussian noise in every entry, in the order of the arrays' names."""
    noise = gaussian(key, sum(array.size for array in update.values()))
    found, start = {}, 0
    for name in sorted(update):
        array = update[name]
        part = noise[start : start + array.size].reshape(array.shape)
        found[name], start = (array + deviation * part).astype(array.dtype), start + array.size
    return {name: found[name] for name in update}


def gaussian(key: bytes, count: int) -> npt.NDArray[np.float64]:
    """(count,) standard normal numbers, which nobody without the key can tell from others: Box-Muller on the stream of SHAKE-256.

    A generator made for statistics would not do. Entries that a client did not train hold nothing but noise, and from enough of its numbers
    such a generator's state can be computed, and with it the noise of all other entries.
    """
    pairs = (count + 1) // 2
    bits = np.frombuffer(hashlib.shake_256(key).digest(16 * pairs), "<u8") >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((bits[:pairs] + 1.0) * UNIT))  # of numbers from above 0 to 1
    angle = (2 * np.pi * UNIT) * bits[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def epsilon(precision: float, delta: float) -> float:
    """The smallest epsilon for which Gaussian mechanisms together are (epsilon, delta)-private, by dp-accounting.

    precision: the sum of 1 / z^2 over them, each with its own noise multiplier z. Together they are as private as one with the
    multiplier 1 / sqrt(precision), also if each depends on what came before (Dong, Roth and Su, 2022, corollary 3.3).
    """
    accountant = need_accountant()
    with np.errstate(divide="ignore"):  # at the ends of its search for the root
        return 0.0 if precision == 0 else float(accountant.get_epsilon_gaussian(precision**-0.5, delta))


def need_accountant() -> Any:
    """dp-accounting, or a sentence that says how to get it. It is loaded where it is needed: that takes half a second."""
    try:
        import dp_accounting
    except ImportError as error:
        what = "privacy.noise needs dp-accounting, which says what it protects, and which is not installed"
        raise InvalidConfig(f"{what}. Install it with: pip install 'fedloom[privacy]'", key="privacy.noise") from error
    return dp_accounting
