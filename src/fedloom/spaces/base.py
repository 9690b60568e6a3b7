"""A search space as a list of genes: sampling, mutation, crossover, encoding and checking for every space."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidArchitecture, InvalidConfig, printable
from fedloom.core.registry import Registry, did_you_mean

Choices = Sequence[int] | npt.NDArray[np.integer]
Genes = Any  # (architectures, genes) choices: lists, an array or a tensor
COUNTED = 300_000  # choices of all genes together that are gone through to count architectures
MOST_CHOICES = 2**16  # of one gene: files keep a choice in 16 bits


@dataclass(frozen=True)
class Gene:
    """One decision: what it decides, the values it may take, and where in the network it has its effect."""

    name: str
    values: tuple[int, ...]
    labels: tuple[str, ...] = ()  # what the values mean, where they are only numbers of something
    stage: int = 0  # its stage or kind of cell, from 1; 0: before the stages, or all over the network
    place: int = 0  # its block or edge there, from 1; 0: the stage as a whole
    channels: bool = False  # whether its values, in rising order, are widths: a narrow layer is the first channels of a wide one

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise InvalidConfig(f'A gene needs a name, got {self.name!r}. Write Gene("width", (8, 12, 16))')
        where = f"The gene {self.name!r}"
        if not isinstance(self.values, Sequence) or not all(isinstance(value, Real) for value in self.values[: MOST_CHOICES + 1]):
            given = printable(repr(self.values), 60)
            raise InvalidConfig(f"{where} needs a tuple of numbers, such as (8, 12, 16), got {given}", gene=self.name)
        if not 1 <= len(self.values) <= MOST_CHOICES:
            raise InvalidConfig(f"{where} needs 1 to {MOST_CHOICES:,} values, got {len(self.values):,}", gene=self.name)
        object.__setattr__(self, "values", tuple(self.values))  # a list or a range does as well
        if twice := [value for value, times in Counter(self.values).items() if times > 1]:
            raise InvalidConfig(f"{where} has the value {twice[0]} more than once. Name every value once", gene=self.name)
        if self.labels and len(self.labels) != len(self.values):
            counts = f"{len(self.labels)} labels for {len(self.values)} values"
            raise InvalidConfig(f"{where} has {counts}. Give one label for each value, or none", gene=self.name)

    @property
    def shown(self) -> list[object]:
        """Its values for people: labels where there are any."""
        return [*self.labels] or [*self.values]


@dataclass(frozen=True)
class Cost:
    """What an architecture costs, by arithmetic."""

    parameters: int
    macs: int  # multiply-accumulates of one forward pass on one image
    activations: int  # numbers kept for the backward pass of one image


class Tally:
    """Adds up a cost layer by layer: weights, one multiply-accumulate per weight and output pixel, outputs kept for the backward pass."""

    def __init__(self) -> None:
        self.parameters = self.macs = self.activations = 0

    def convolution(self, inputs: int, outputs: int, kernel: int, pixels: int, norm: bool = True, bias: bool = False) -> None:
        """inputs: per group; pixels: of the output."""
        weights = inputs * outputs * kernel**2
        self.parameters += weights + 2 * outputs * norm + outputs * bias
        self.macs += weights * pixels
        self.activations += outputs * pixels * (2 if norm else 1)

    @property
    def cost(self) -> Cost:
        return Cost(self.parameters, self.macs, self.activations)


class Counted(ABC):
    """A piece of a network, which says what it costs."""

    @abstractmethod
    def count(self, tally: Tally) -> None: ...

    @cached_property
    def cost(self) -> Cost:
        """Counted once: many networks have the same piece."""
        tally = Tally()
        self.count(tally)
        return tally.cost


def total(costs: Sequence[Cost]) -> Cost:
    return Cost(sum([cost.parameters for cost in costs]), sum([cost.macs for cost in costs]), sum([cost.activations for cost in costs]))


@dataclass(frozen=True)
class ImageShape:
    """What a network sees and says: input channels, side in pixels, number of classes."""

    channels: int
    size: int
    classes: int


@dataclass(frozen=True)
class Box:
    """One block of a block diagram: what it is, its numbers, and how wide it is against the widest (0 to 1)."""

    label: str
    detail: str
    share: float


@dataclass(frozen=True)
class BlockDiagram:
    """A network as stages, each a title and its boxes in order."""

    stages: tuple[tuple[str, tuple[Box, ...]], ...]


@dataclass(frozen=True)
class CellGraph:
    """A cell as a graph: its nodes by name, in topological order, and edges (from, to, operation) between their places."""

    title: str
    nodes: tuple[str, ...]
    edges: tuple[tuple[int, int, str], ...]


Drawing = BlockDiagram | tuple[CellGraph, ...]


class SearchSpace(ABC):
    """Genes with a finite number of choices, some of them without effect when others switch their block off.

    An architecture is canonical: a gene without effect has choice 0, so every network has exactly one encoding.
    """

    name: str

    def __init__(self, settings: Any, image: ImageShape) -> None:
        self.settings, self.image = settings, image

    # -- what a space must say --------------------------------------------
    @property
    @abstractmethod
    def genes(self) -> tuple[Gene, ...]: ...

    @abstractmethod
    def cost(self, architecture: Architecture) -> Cost: ...

    # -- what it may say otherwise ------------------------------------------
    def active_many(self, choices: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """(architectures, genes) which genes have an effect under these choices; default: all."""
        return np.ones(choices.shape, bool)

    @property
    def follows(self) -> npt.NDArray[np.bool_]:
        """(genes, genes) whether gene j, the column, may act directly on what gene i, the row, has made: a graph without cycles.

        Default: a chain of places, stage by stage; in a stage from the genes of the whole stage to those of its last block.
        """
        places = [(gene.stage, gene.place) for gene in self.genes]
        number = np.array([sorted(set(places)).index(place) for place in places])
        return number[:, None] + 1 == number

    @cached_property
    def named(self) -> Mapping[str, Architecture]:
        """Architectures with a name: at least smallest, medium and largest, in this order of cost. Default: the
        first, the middle and the last choice of every gene."""
        choices = {"smallest": np.zeros_like(self.sizes), "medium": self.sizes // 2, "largest": self.sizes - 1}
        return {name: self.canonical(chosen) for name, chosen in choices.items()}

    @property
    def architectures(self) -> int:
        """How many different architectures there are; default: counted, one by one if genes can lose their effect."""
        most = math.prod(self.sizes.tolist())
        if type(self).active_many is SearchSpace.active_many:
            return most
        if most > COUNTED:
            raise InvalidConfig(f"{self.name} has too many architectures to count one by one. Give its class a property `architectures`")
        return len(np.unique(self.canonical_many(np.indices(self.sizes.tolist()).reshape(len(self.sizes), -1).T), axis=0))

    def input_sizes(self, genes: Genes) -> list[int]:
        """Side in pixels that images are resized to before each architecture sees them, 0 if they are not. Reads the genes only if
        one of them is the resolution."""
        return [0] * len(genes)

    def drawing(self, architecture: Architecture) -> Drawing:
        """What a picture of this architecture shows: default: its genes by stage."""
        rows: dict[str, list[Box]] = {}
        for gene, choice, active in zip(self.genes, architecture.choices, self.active(architecture.choices), strict=True):
            boxes = rows.setdefault(f"stage {gene.stage}" if gene.stage else self.name, [])
            if active:
                boxes.append(Box(str(gene.shown[choice]), gene.name, (choice + 1) / len(gene.values)))
        return BlockDiagram(tuple((title, tuple(boxes)) for title, boxes in rows.items()))

    # -- as the public implementation counts, where that is not as ``cost`` does -----
    def as_published(self, architecture: Architecture) -> tuple[int, int]:
        """Parameters and multiply-accumulates of its stand-alone network in the implementation that came with the paper."""
        cost = self.cost(architecture)
        return cost.parameters, cost.macs

    def supernet_as_published(self) -> int | None:
        """Parameters of its supernet, if they are not those of ours."""
        return None

    # -- what every space gets --------------------------------------------
    @property
    def compact(self) -> np.dtype[Any]:
        """The smallest type that holds every choice, for many architectures in memory and files."""
        return np.min_scalar_type(int(self.sizes.max()) - 1)

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """(genes,) number of choices of each gene."""
        sizes = [len(gene.values) for gene in self.genes]
        if max(sizes, default=1) == 1:
            raise InvalidConfig(
                f"{self.name} has one architecture only: give at least one of its genes two values or more", space=self.name
            )
        return np.array(sizes)

    def active(self, choices: Choices) -> npt.NDArray[np.bool_]:
        """(genes,) which genes have an effect under these choices."""
        return self.active_many(np.asarray(choices)[None])[0]

    def canonical_many(self, choices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(architectures, genes) the same with genes without effect set to 0."""
        return np.where(self.active_many(choices), choices, 0)

    def canonical(self, choices: Choices) -> Architecture:
        """The architecture these choices describe, genes without effect set to 0."""
        return Architecture(self.name, tuple(self.canonical_many(np.asarray(choices)[None])[0].tolist()))

    def from_values(self, values: Sequence[int | str]) -> Architecture:
        """The architecture with these values (or labels) of its genes, in their order, as papers and public code write them."""
        if len(values) != len(self.genes):
            raise InvalidArchitecture(f"{self.name} has {len(self.genes)} genes, got {len(values)} values")
        choices = []
        for index, (gene, value) in enumerate(zip(self.genes, values, strict=True)):
            if value not in gene.shown:
                allowed = ", ".join(map(str, gene.shown))
                raise InvalidArchitecture(f"gene {index} ({gene.name}) must be one of {allowed}; got {value!r}", gene=index)
            choices.append(gene.shown.index(value))
        return self.canonical(choices)

    def sample(self, rng: np.random.Generator) -> Architecture:
        """Every gene uniformly and independently."""
        return self.canonical(rng.integers(self.sizes))

    def sample_many(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """(count, genes) what as many calls of ``sample`` would draw."""
        return self.canonical_many(rng.integers(self.sizes, size=(count, len(self.sizes))))

    def fair(self, rng: np.random.Generator) -> list[Architecture]:
        """Strict fairness (FairNAS, Chu et al. 2021): as many architectures as the largest gene has choices, which together use every
        choice of every gene, equally often if all genes have as many. Exact where genes are always active (DARTS, NASViT); in
        MobileNetV3 a block that an architecture lacks does not use its choice."""
        count = int(self.sizes.max())
        columns = [np.concatenate([rng.permutation(size) for _ in range(-(-count // size))])[:count] for size in self.sizes]
        return [self.canonical(row) for row in np.stack(columns, axis=1)]

    def mutate(self, parent: Architecture, rng: np.random.Generator, probability: float = 0.1) -> Architecture:
        """Redraw each active gene with this probability, at least one of them; genes that come to life are drawn afresh."""
        choices = np.array(parent.choices)
        active = self.active(choices)
        chosen = (rng.random(len(choices)) < probability) & active
        chosen = chosen & (self.sizes > 1)
        if not chosen.any():
            chosen[rng.choice(np.flatnonzero(active & (self.sizes > 1)))] = True
        shift = 1 + rng.integers(np.maximum(self.sizes - 1, 1))  # 1..size-1: a different choice by construction
        changed = np.where(chosen, (choices + shift) % self.sizes, choices)
        return self.canonical(np.where(active, changed, rng.integers(self.sizes)))

    def crossover(self, first: Architecture, second: Architecture, rng: np.random.Generator, share: float = 0.5) -> Architecture:
        """Each gene from one of the parents, from the first with probability ``share``; from the one in which it has an effect when the
        other has it switched off."""
        a, b = np.array(first.choices), np.array(second.choices)
        in_a, in_b = self.active(a), self.active(b)
        from_first = np.where(in_a == in_b, rng.random(len(a)) < share, in_a)
        return self.canonical(np.where(from_first, a, b))

    def encode(self, architecture: Architecture) -> npt.NDArray[np.float64]:
        """(genes,) in [0, 1]; genes without effect are constant."""
        return self.encode_many([architecture])[0]

    def encode_many(self, architectures: Iterable[Architecture]) -> npt.NDArray[np.float64]:
        """(architectures, genes): ``encode`` is a row of it."""
        choices = np.array([architecture.choices for architecture in architectures], np.int64).reshape(-1, len(self.genes))
        return choices / np.maximum(self.sizes - 1, 1)

    def decode(self, genes: npt.ArrayLike) -> Architecture:
        """The nearest architecture; always valid."""
        top = self.sizes - 1
        return self.canonical(np.clip(np.rint(np.nan_to_num(np.asarray(genes, float), posinf=1, neginf=0) * top), 0, top).astype(int))

    def near(self, architecture: Architecture) -> Architecture:
        """The same, or what is near it among the choices that there are for whoever has this space."""
        return architecture

    def fits(self, architecture: Architecture) -> bool:
        """Whether it is within the budget; all are, where there is none."""
        return True

    def check(self, architecture: Architecture) -> None:
        """Raise InvalidArchitecture, naming the gene and its allowed values."""
        if architecture.space != self.name or len(architecture.choices) != len(self.genes):
            raise InvalidArchitecture(
                f"{architecture.id[:60]} is not a {self.name} architecture of {len(self.genes)} genes", architecture=architecture.id
            )
        for index, (gene, choice) in enumerate(zip(self.genes, architecture.choices, strict=True)):
            if not 0 <= choice < len(gene.values):
                raise InvalidArchitecture(f"gene {index} ({gene.name}) must be 0..{len(gene.values) - 1}, got {choice}", gene=index)
        idle = ~self.active(architecture.choices) & (np.array(architecture.choices) != 0)
        if idle.any():
            index = int(np.flatnonzero(idle)[0])
            raise InvalidArchitecture(f"gene {index} ({self.genes[index].name}) must be 0 because its block is absent", gene=index)

    def find(self, text: str, rng: np.random.Generator) -> Architecture:
        """An architecture by name (smallest, medium, largest, random) or by its id."""
        if text == "random":
            return self.sample(rng)
        if text in self.named:
            return self.named[text]
        if ":" not in text:
            raise InvalidArchitecture(f"There is no architecture named {text!r}. {did_you_mean(text, [*self.named, 'random'])}, or an id")
        architecture = Architecture.parse(text)
        self.check(architecture)
        return architecture


def round_to_eight(width: float) -> int:
    """The nearest multiple of 8 that does not lose more than a tenth (the MobileNet rule)."""
    rounded = max(8, int(width + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * width else rounded


SPACES: Registry[Callable[..., SearchSpace]] = Registry("search space")
