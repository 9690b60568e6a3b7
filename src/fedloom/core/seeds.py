"""Every random draw has an address; the global generators are never used."""

from __future__ import annotations

import hashlib
from operator import index

import numpy as np


def derive_seed(*address: int | str) -> int:
    """A 63-bit seed that depends on every part of the address and on nothing else.

    >>> derive_seed(0, 3, "client-1", "shuffle") == derive_seed(0, 3, "client-1", "shuffle")
    True
    """
    # repr keeps 1 and "1" apart, and a separator inside a part cannot imitate two parts.
    text = "/".join(repr(str(part)) if isinstance(part, str) else repr(index(part)) for part in address)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def rng(*address: int | str) -> np.random.Generator:
    """The random generator of this address: the same address gives the same draws."""
    return np.random.default_rng(derive_seed(*address))
