"""A fleet of unequal devices: what the clients of each tier may have of a space, and of its supernet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedloom.core.errors import InvalidConfig
from fedloom.spaces.base import SearchSpace
from fedloom.spaces.budget import Bounded, Limit, narrowed
from fedloom.supernets.base import Supernet
from fedloom.supernets.reach import Choices, Reach, kept, reach_limit, reachable


@dataclass(frozen=True)
class Tier:
    """One class of devices. Its limits are public: server and clients work out the same part from them.

    private: limits that only the client itself knows. They narrow what it draws, not what it receives. supernet_limit: most entries of
    the supernet that it receives, 0 for no limit; place: in the settings, for a sentence.
    """

    supernet: Supernet[Any]
    limits: tuple[Limit, ...]
    private: tuple[Limit, ...] = ()
    supernet_limit: float = 0.0
    place: str = ""

    @cached_property
    def _choices(self) -> Choices | None:
        """Those within reach; nothing where no limit, or only such as each device measures for itself, says anything of them."""
        whole, counted = self.supernet.space, self._counted
        if counted is whole and not self.supernet_limit:
            return None
        choices = reachable(counted) if isinstance(counted, Bounded) else np.arange(int(whole.sizes.max())) < whole.sizes[:, None]
        return kept(self.supernet, choices, self.supernet_limit) if self.supernet_limit else choices

    @cached_property
    def _counted(self) -> SearchSpace:
        """Within the limits that are the same wherever they are worked out."""
        space = narrowed(self.supernet.space, self.limits)
        return (space.repeatable if isinstance(space, Bounded) else None) or self.supernet.space

    @property
    def _reach_limits(self) -> tuple[Limit, ...]:
        whole, choices = self.supernet.space, self._choices
        return () if choices is None or choices.sum() == whole.sizes.sum() else (reach_limit(whole, choices),)

    @cached_property
    def space(self) -> SearchSpace:
        if self.supernet_limit and (part := self.reach) and part.entries > self.supernet_limit:
            what = f"budget.supernet{self.place} ({self.supernet_limit:,.0f}) is too little for {self.supernet.space.name}"
            cure = "Raise it, or make the space smaller by the settings in its table"
            needed = f"the smallest part of its supernet has {part.entries:,} parameters"
            raise InvalidConfig(f"{what}: {needed}. {cure}", key="budget.supernet")
        return narrowed(self.supernet.space, (*self.limits, *self._reach_limits, *self.private))

    @cached_property
    def reach(self) -> Reach | None:
        """The part of the supernet that the limits can reach; nothing where that is all of it."""
        if self._choices is None:
            return None
        return Reach.of(self.supernet, narrowed(self._counted, self._reach_limits), self._choices)


@dataclass(frozen=True)
class Fleet:
    """tier_of: the tier of every client of the federation, which all of them may know."""

    tiers: tuple[Tier, ...]
    tier_of: Mapping[str, int]

    @cached_property
    def unknown(self) -> Tier:
        """For a client that is not of the federation: what every tier can have."""
        limits = {str(limit): limit for tier in self.tiers for limit in tier.limits}
        least = min((tier.supernet_limit for tier in self.tiers if tier.supernet_limit), default=0.0)
        return Tier(self.tiers[0].supernet, tuple(limits.values()), self.tiers[0].private, least)

    def of(self, client: str) -> Tier:
        return self.tiers[self.tier_of[client]] if client in self.tier_of else self.unknown
