"""Budgets: limits on what an architecture may cost, kept by everything that is drawn from a space."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.seeds import rng as generator_at
from fedloom.core.settings import setting
from fedloom.spaces.base import Choices, Cost, Drawing, Gene, Genes, SearchSpace

TRIES = 20  # draws before one that does not fit is reduced until it does; if one in ten fits, that is one time in eight
BYTES = 4  # float32
MEGABYTE = 1e6


@dataclass(frozen=True)
class BudgetSettings:
    parameters: float | tuple[float, ...] = setting(
        0.0, "most parameters of a client's network; 0: no limit; a list: for each tier of clients", low=0
    )
    macs: float | tuple[float, ...] = setting(
        0.0, "most multiply-accumulates of a client's network for one image; 0: no limit; a list: for each tier", low=0
    )
    memory_mb: float | tuple[float, ...] = setting(
        0.0,
        "most megabytes to train a client's network: weights, gradients, momenta, activations of a batch; 0: no limit; "
        "a list: for each tier",
        low=0,
    )
    latency_ms: float | tuple[float, ...] = setting(
        0.0,
        "most milliseconds for one image, from latency_table, or else measured here: such a run does not repeat bit by bit; 0: no limit; "
        "a list: for each tier",
        low=0,
    )
    supernet: float | tuple[float, ...] = setting(
        0.0,
        "most parameters of the supernet that a client receives and returns, and that its networks lie in; 0: all that its other limits "
        "reach; a list: for each tier",
        low=0,
    )
    latency_table: str | tuple[str, ...] = setting(
        "",
        "file that `fedloom latency` wrote on the device that latency_ms is about; empty: measured here; a list: for each tier",
        path=True,
    )
    tiers: tuple[int, ...] = setting(
        (), "tier of each client, from 0, in the order of their names; empty: spread evenly, in an order that follows from the seed", low=0
    )

    @property
    def in_tiers(self) -> bool:
        """Whether clients may receive parts of a supernet."""
        return bool(self.lists or self.supernet)

    @property
    def lists(self) -> dict[str, tuple[Any, ...]]:
        """What is set for each tier."""
        named = ((item.name, getattr(self, item.name)) for item in fields(self) if item.name != "tiers")
        return {name: value for name, value in named if isinstance(value, tuple)}

    def of_tier(self, tier: int) -> BudgetSettings:
        """What holds for the clients of a tier, those limits that hold for all included."""
        return replace(self, tiers=(), **{name: values[tier % len(values)] for name, values in self.lists.items()})

    def of_all(self) -> BudgetSettings:
        """The limits that are the same for all clients."""
        known: dict[str, Any] = {item.name: item.default for item in fields(self) if item.name in self.lists}
        if "latency_table" in known:
            known["latency_ms"] = 0.0
        return replace(self, tiers=(), **known)


def tier_count(budget: BudgetSettings) -> int:
    return max((len(values) for values in budget.lists.values()), default=1)


def check_tiers(budget: BudgetSettings, tiers: int, clients: int) -> None:
    """Refuses lists that do not describe so many tiers and clients."""
    for name, values in budget.lists.items():
        if len(values) not in (1, tiers):
            what = f"budget.{name} has {len(values)} entries where there are {tiers} tiers"
            raise InvalidConfig(f"{what}. Give one for each tier, or one for all", key=f"budget.{name}")
    if budget.tiers and (len(budget.tiers) != clients or max(budget.tiers) >= tiers):
        what = f"budget.tiers must have {clients} numbers below {tiers}, the tier of each client"
        raise InvalidConfig(f"{what}, and has {list(budget.tiers)}", key="budget.tiers")


def training_memory_mb(cost: Cost, stored: int, batch: int, moments: int = 1) -> float:
    """Weights and momenta as stored, gradients of the network, activations of a batch. moments: for each weight, of the optimiser."""
    return BYTES * ((1 + moments) * stored + cost.parameters + batch * cost.activations) / MEGABYTE


Need = Callable[[Architecture], float]


@dataclass(frozen=True)
class Limit:
    """One line of a budget: the setting's name, the most it allows, and what an architecture needs of it."""

    name: str
    most: float
    need: Need
    unit: str
    measured: bool = False  # by a clock, so that it differs from time to time
    table: str = "budget"  # of the settings, that it was set in
    tier: str = ""  # such as [1], where it is of one tier
    nearest: Callable[[Architecture], Architecture] | None = None  # what keeps this line and is near an architecture, where that is known

    def needed(self, architecture: Architecture) -> str:
        """In words, never rounded to less: the number shown is one that suffices."""
        return f"{_number(math.ceil(self.need(architecture) * 1000) / 1000)} {self.unit}"

    def __str__(self) -> str:
        return f"{self.table}.{self.name}{self.tier} ({_number(self.most)})"


def bounded(space: SearchSpace, budget: BudgetSettings, batch: int, latency_ms: Need, moments: int = 1) -> SearchSpace:
    """The part of a space within a budget; the space itself, draws and all, without one. See ``limits_of``."""
    return narrowed(space, limits_of(space, budget, batch, latency_ms, moments))


def narrowed(space: SearchSpace, limits: Sequence[Limit]) -> SearchSpace:
    """A space within further limits."""
    if not limits:
        return space
    return Bounded(space.whole, (*space.limits, *limits)) if isinstance(space, Bounded) else Bounded(space, tuple(limits))


def limits_of(
    space: SearchSpace, budget: BudgetSettings, batch: int, latency_ms: Need, moments: int = 1, tier: str = ""
) -> tuple[Limit, ...]:
    """The lines of a budget without lists.

    batch, moments: examples per training step and numbers that its optimiser keeps for each weight, for the memory. latency_ms: of an
    architecture, measured or from a table; asked last, and only if there is a limit. tier: in words, for whom it holds.
    """

    def memory_mb(architecture: Architecture) -> float:
        cost = space.cost(architecture)
        return training_memory_mb(cost, cost.parameters, batch, moments)

    def limit(name: str, need: Need, unit: str, measured: bool = False) -> Limit:
        return Limit(name, getattr(budget, name), need, unit, measured, tier=tier)

    common = macs_limit(space, 0)
    lines = (
        limit("parameters", lambda architecture: space.cost(architecture).parameters, "parameters"),
        limit("macs", common.need, common.unit),
        limit("memory_mb", memory_mb, "MB to train it"),
        limit("latency_ms", latency_ms, "ms for an image", measured=not budget.latency_table),
    )
    return tuple(limit for limit in lines if limit.most)


def macs_limit(space: SearchSpace, most: float, table: str = "budget") -> Limit:
    return Limit("macs", most, lambda architecture: space.cost(architecture).macs, "multiply-accumulates", table=table)


def macs_by_data(space: SearchSpace, examples: int, fewest: int, most: int, steps: int) -> float:
    """A limit that rises with a client's number of examples, in equal steps: from what the smallest architecture needs, for the client
    with the fewest, to what the largest needs, for the one with the most. Where all have the same, everybody may have the largest."""
    share = min(max((examples - fewest) / (most - fewest), 0.0), 1.0) if most > fewest else 1.0
    least, largest = (space.cost(space.named[name]).macs for name in ("smallest", "largest"))
    return least + round(steps * share) / steps * (largest - least)


class Bounded(SearchSpace):
    """A space of which only the architectures within some limits are drawn; methods use it like any other.

    A draw that does not fit is repeated, up to a bound; then the last one is reduced. So draws are not uniform over what fits: the
    tighter the budget, the more of them lie just below it. Genes, names, encoding, costs and whatever a space has of its own (a
    genotype, an outline) are those of the whole space.
    """

    def __init__(self, whole: SearchSpace, limits: tuple[Limit, ...]) -> None:
        self.whole, self.limits, self.name = whole, limits, whole.name
        self._smallest = np.array(whole.named["smallest"].choices)
        if broken := self.broken(whole.named["smallest"]):
            needed = f"the architecture named smallest needs {broken.needed(whole.named['smallest'])}"
            cure = "Raise the budget (0 is no limit), or make the space smaller by the settings in its table"
            raise InvalidConfig(f"{broken} is too little for {self.name}: {needed}. {cure}", key=f"{broken.table}.{broken.name}")
        self._nearest = [limit.nearest for limit in limits if limit.nearest]

    # -- the budget ---------------------------------------------------------
    def broken(self, architecture: Architecture) -> Limit | None:
        """The first limit that an architecture exceeds."""
        return next((limit for limit in self.limits if limit.need(architecture) > limit.most), None)

    @property
    def repeatable(self) -> Bounded | None:
        """Within the limits that are the same wherever they are worked out; nothing without any."""
        same = tuple(limit for limit in self.limits if not limit.measured)
        return Bounded(self.whole, same) if same else None

    def fits(self, architecture: Architecture) -> bool:
        return self.broken(architecture) is None

    def near(self, architecture: Architecture) -> Architecture:
        for nearest in self._nearest:
            architecture = nearest(architecture)
        return architecture

    # -- draws ----------------------------------------------------------------
    def sample(self, rng: np.random.Generator) -> Architecture:
        return self._repeated(lambda: self.whole.sample(rng), rng)

    def sample_many(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        drawn = [self.sample(rng).choices for _ in range(count)]
        return np.array(drawn, np.int64).reshape(count, len(self.genes))

    def fair(self, rng: np.random.Generator) -> list[Architecture]:
        """As the whole space has it, those that do not fit reduced; choices that do not fit are then used less often than others."""
        return [self.reduced(architecture, rng) for architecture in self.whole.fair(rng)]

    def mutate(self, parent: Architecture, rng: np.random.Generator, probability: float = 0.1) -> Architecture:
        """A mutant that fits; where nothing near the parent does, this may be the parent itself."""
        return self._repeated(lambda: self.whole.mutate(parent, rng, probability), rng)

    def crossover(self, first: Architecture, second: Architecture, rng: np.random.Generator, share: float = 0.5) -> Architecture:
        """Parents that fit may have children that do not, hence repeated and reduced too."""
        return self._repeated(lambda: self.whole.crossover(first, second, rng, share), rng)

    def decode(self, genes: npt.ArrayLike) -> Architecture:
        """The nearest architecture, reduced if it does not fit; which genes give way depends on nothing but that architecture."""
        nearest = self.whole.decode(genes)
        return self.reduced(nearest, generator_at("reduced", nearest.id))

    def _repeated(self, draw: Callable[[], Architecture], rng: np.random.Generator) -> Architecture:
        for _ in range(TRIES):
            architecture = self.near(draw())
            if self.fits(architecture):
                return architecture
        return self.reduced(architecture, rng)

    def reduced(self, architecture: Architecture, rng: np.random.Generator) -> Architecture:
        """An architecture that fits: genes take the choices of the smallest one by one, in random order, until it does.

        Found by bisection. Costs need not fall with every gene; one step before what is returned, it did not fit.
        """
        architecture = self.near(architecture)
        if self.fits(architecture):
            return architecture
        order = rng.permutation(len(self._smallest))

        def after(genes: int) -> Architecture:
            return self.canonical(np.where(np.isin(np.arange(len(order)), order[:genes]), self._smallest, architecture.choices))

        too_few, enough = 0, len(order)  # all genes give the smallest, which fits
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self.fits(after(middle)):
                enough = middle
            else:
                too_few = middle
        return after(enough)

    def find(self, text: str, rng: np.random.Generator) -> Architecture:
        """An architecture by name or id, refused if it does not fit: a network asked for by name is never replaced by another."""
        if text == "random" and any(limit.measured for limit in self.limits):
            what = "A random architecture under budget.latency_ms would be another one after a resume, because latency is measured"
            raise InvalidConfig(f"{what}. Choose one by name or id")
        return self.sample(rng) if text == "random" else self._asked_for(self.whole.find(text, rng), text)

    def from_values(self, values: Sequence[int | str]) -> Architecture:
        """Refused if it does not fit, as by name."""
        architecture = self.whole.from_values(values)
        return self._asked_for(architecture, architecture.id)

    def _asked_for(self, architecture: Architecture, text: str) -> Architecture:
        if broken := self.broken(architecture):
            short = text if len(text) <= 60 else f"{text[:60]}…"
            what = f"The architecture {short} needs {broken.needed(architecture)}, more than {broken}"
            cure = "Choose a smaller one (smallest always fits), or raise the budget"
            raise InvalidConfig(f"{what}. {cure}", key=f"budget.{broken.name}")
        return architecture

    # -- as the whole space has it -----------------------------------------------
    @property
    def genes(self) -> tuple[Gene, ...]:
        return self.whole.genes

    @cached_property
    def named(self) -> Mapping[str, Architecture]:
        """All of them, also those that do not fit: a name means the same network whatever the budget."""
        return self.whole.named

    @property
    def architectures(self) -> int:
        """Of the whole space: how many of them fit is not known."""
        return self.whole.architectures

    @property
    def follows(self) -> npt.NDArray[np.bool_]:
        return self.whole.follows

    def active_many(self, choices: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        return self.whole.active_many(choices)

    def active(self, choices: Choices) -> npt.NDArray[np.bool_]:
        return self.whole.active(choices)

    def canonical_many(self, choices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self.whole.canonical_many(choices)

    def canonical(self, choices: Choices) -> Architecture:
        return self.whole.canonical(choices)

    def cost(self, architecture: Architecture) -> Cost:
        return self.whole.cost(architecture)

    def input_sizes(self, genes: Genes) -> list[int]:
        return self.whole.input_sizes(genes)

    def encode(self, architecture: Architecture) -> npt.NDArray[np.float64]:
        return self.whole.encode(architecture)

    def encode_many(self, architectures: Iterable[Architecture]) -> npt.NDArray[np.float64]:
        return self.whole.encode_many(architectures)

    def check(self, architecture: Architecture) -> None:
        self.whole.check(architecture)

    def drawing(self, architecture: Architecture) -> Drawing:
        return self.whole.drawing(architecture)

    def as_published(self, architecture: Architecture) -> tuple[int, int]:
        return self.whole.as_published(architecture)

    def supernet_as_published(self) -> int | None:
        return self.whole.supernet_as_published()

    def __getattr__(self, name: str) -> Any:
        """What this kind of space has and others have not: translations, which know no budget."""
        if name == "whole" or name.startswith("_"):  # ``whole`` is not yet there while a copy is being made
            raise AttributeError(name)
        return getattr(self.whole, name)


def _number(value: float) -> str:
    """20,000,000 and 0.125: thousands separated, no digits that say nothing."""
    return f"{value:,.3f}".rstrip("0").rstrip(".") if value >= 0.001 else f"{value:g}"
