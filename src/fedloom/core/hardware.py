"""What clients compute and communicate with, in a simulation: tiers of devices with a speed, a memory and a link.

Times are worked out and not measured, so that they are the same on every machine that simulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import InvalidConfig
from fedloom.core.seeds import rng
from fedloom.core.settings import setting

BACKWARD = 2  # a backward pass costs about two forward ones


@dataclass(frozen=True)
class HardwareSettings:
    gmacs: tuple[float, ...] = setting(
        (100.0,), "thousand million multiply-accumulates per second in training on a client's device; one number per tier", low=1e-6
    )
    memory_mb: tuple[float, ...] = setting(
        (0.0,), "megabytes of memory for training; 0: no limit; one number per tier, or one for all", low=0
    )
    mbits: tuple[float, ...] = setting(
        (100.0,), "million bits per second of the client's link, each way; one number per tier, or one for all", low=1e-6
    )
    dropout: tuple[float, ...] = setting(
        (0.0,), "probability that a client drawn for a round is not there; one number per tier, or one for all", low=0, high=1
    )
    deadline: float = setting(0.0, "seconds after which a round ends without clients that have not reported; 0: wait for all", low=0)


@dataclass(frozen=True)
class Hardware:
    """Of one client."""

    tier: int = 0
    gmacs: float = 100.0
    memory_mb: float = 0.0  # 0 is no limit
    mbits: float = 100.0
    dropout: float = 0.0  # probability of not being there in a round

    def seconds(self, macs: int, bytes: int, scored: int = 0) -> float:
        """What training with so many forward multiply-accumulates takes, messages of so many bytes, and scoring, which has no backward
        pass, together."""
        return ((1 + BACKWARD) * macs + scored) / (self.gmacs * 1e9) + 8 * bytes / (self.mbits * 1e6)

    def utilisation(self, memory_mb: float) -> float:
        """Share of the memory that training takes; above 1 it does not fit; 0 without a limit."""
        return memory_mb / self.memory_mb if self.memory_mb else 0.0


def tiers(settings: HardwareSettings, least: int = 1) -> list[Hardware]:
    """What they describe, or a sentence that says why they describe nothing. least: tiers that something else has."""
    lists = {name: getattr(settings, name) for name in ("gmacs", "memory_mb", "mbits", "dropout")}
    count = max(least, *map(len, lists.values()))
    for name, values in lists.items():
        if not values or len(values) not in (1, count):
            what = f"hardware.{name} has {len(values)} numbers where there are {count} tiers"
            raise InvalidConfig(f"{what}. Give one for each tier, or one for all", key=f"hardware.{name}")
    return [Hardware(tier, **{name: values[tier % len(values)] for name, values in lists.items()}) for tier in range(count)]


def assigned(
    settings: HardwareSettings, clients: Sequence[str], seed: int, least: int = 1, given: Sequence[int] = ()
) -> dict[str, Hardware]:
    """Tiers in random order, as evenly as the number of clients allows; or as they are given, client by client. least: as in ``tiers``."""
    known = tiers(settings, least)
    order = rng(seed, "hardware").permutation(np.arange(len(clients)) % len(known)).tolist()
    return {client: known[tier] for client, tier in zip(clients, given or order, strict=True)}


def there(hardware: Hardware, seed: int, round: int, client: str) -> bool:
    """Whether a client that was drawn for a round takes part in it."""
    return hardware.dropout == 0 or float(rng(seed, "dropout", round, client).random()) >= hardware.dropout
