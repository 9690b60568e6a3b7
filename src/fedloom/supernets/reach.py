"""The part of a supernet that a budget can reach: what a weak client receives, trains and returns.

Every choice of a gene that some architecture within the budget can have is within reach. The part is, of each parameter, the smallest
rectangle that holds what all combinations of such choices use. So it may hold a little more than architectures that fit use together;
it never holds less. A limit on the part itself (``budget.supernet``) takes the highest choices away until it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.core.architecture import Architecture
from fedloom.core.errors import BadReport, InvalidConfig
from fedloom.core.messages import Array, Arrays
from fedloom.core.seeds import rng
from fedloom.spaces.base import SearchSpace
from fedloom.spaces.budget import Bounded, Limit
from fedloom.supernets.base import Region, Supernet

PROBES = 20  # architectures by which a part is checked when it is made

Bounds = list[tuple[int, int]]  # first and last of each axis
Choices = npt.NDArray[np.bool_]  # (genes, widest) whether a choice is within reach


def reachable(space: Bounded) -> Choices:
    """For every choice: whether the smallest architecture fits with it. If a gene has no effect there (a block that is absent), with the
    one change that gives it effect; if there is none, the choice counts as within reach."""
    whole, smallest = space.whole, np.array(space.whole.named["smallest"].choices)
    found = np.zeros((len(whole.genes), int(whole.sizes.max())), bool)
    found[np.arange(len(smallest)), smallest] = True  # also of a gene that has no effect within this budget
    for gene, size in enumerate(whole.sizes.tolist()):
        bases = list(_with_effect(whole, smallest, gene))
        for choice in range(size):
            found[gene, choice] |= not bases or any(space.fits(whole.canonical(_changed(base, gene, choice))) for base in bases)
    return found


def _with_effect(space: SearchSpace, smallest: npt.NDArray[np.int64], gene: int) -> Iterator[npt.NDArray[np.int64]]:
    """The smallest architecture, or those with one change in which a gene has effect."""
    if space.active(smallest.tolist())[gene]:
        yield smallest
        return
    for other, size in enumerate(space.sizes.tolist()):
        for choice in range(size):
            changed = _changed(smallest, other, choice)
            if space.active(changed.tolist())[gene]:
                yield changed
                break  # larger choices of the same gene cost more


def _changed(choices: npt.NDArray[np.int64], gene: int, choice: int) -> npt.NDArray[np.int64]:
    changed = choices.copy()
    changed[gene] = choice
    return changed


def reach_limit(space: SearchSpace, choices: Choices) -> Limit:
    """Keeps a client to its part. Without ``budget.supernet``, where costs rise with choices, nothing that fits is out of reach."""

    def outside(architecture: Architecture) -> float:
        own = np.array(architecture.choices)
        return float((~choices[np.arange(len(own)), own] & space.active(architecture.choices)).sum())

    widest = choices.shape[1]
    distances = np.abs(np.arange(widest)[:, None] - np.arange(widest))  # between choices of one gene
    lower = np.where(choices[:, None], distances, 2 * widest).argmin(-1)  # (genes, widest) the nearest that is allowed, of two the lower

    def nearest(architecture: Architecture) -> Architecture:
        own = np.array(architecture.choices)
        return space.canonical(lower[np.arange(len(own)), own])

    return Limit("reach", 0.0, outside, "choices beyond what its budget reaches", nearest=nearest)


def kept(supernet: Supernet[Any], choices: Choices, entries: float) -> Choices:
    """The choices that are left when the highest ones go until what they use is no more than so many entries of the supernet. The choices
    of the smallest architecture stay; if it alone uses more, they are all that stays."""
    smallest = np.array(supernet.space.named["smallest"].choices)
    sizes = supernet.space.sizes
    going = [(int(gene), int(choice)) for gene, choice in zip(*np.nonzero(choices), strict=True) if choice != smallest[gene]]
    going.sort(key=lambda one: (-one[1] / (sizes[one[0]] - 1), -one[0]))  # evenly from all genes; of equals the last, which uses most

    def without(count: int) -> Choices:
        left = choices.copy()
        for gene, choice in going[:count]:
            left[gene, choice] = False
        return left

    if _entries(_bounds_of(supernet, choices)) <= entries:
        return choices
    too_few, enough = 0, len(going)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if _entries(_bounds_of(supernet, without(middle))) <= entries:
            enough = middle
        else:
            too_few = middle
    return without(enough)


def _bounds_of(supernet: Supernet[Any], choices: Choices) -> dict[str, Bounds]:
    """Of each parameter the rectangle that all combinations of these choices use.

    Where larger choices use all that smaller ones use, the architecture of the largest tells. Choices with weights of their own are added
    one by one, and in pairs, for weights that belong to two choices (in NASViT: to a depth at a resolution).
    """
    space = supernet.space
    highest = np.array([int(np.flatnonzero(row)[-1]) for row in choices])
    bounds: dict[str, Bounds] = {}

    def add(corner: npt.NDArray[np.int64]) -> bool:
        """Whether it has weights that were not known."""
        regions = supernet.regions(space.canonical(corner))
        new = not regions.keys() <= bounds.keys()
        for name, region in regions.items():
            own = _bounds(region, supernet.shapes[name])
            bounds[name] = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(bounds.get(name, own), own, strict=True)]
        return new

    add(highest)
    ones = [(int(gene), int(choice)) for gene, choice in zip(*np.nonzero(choices), strict=True) if choice != highest[gene]]
    own = [one for one in ones if add(_changed(highest, *one))]
    if not supernet.pathwise:
        for number, first in enumerate(own):
            for second in own[:number]:
                if first[0] != second[0]:
                    add(_changed(_changed(highest, *first), *second))
    return bounds


def _entries(bounds: Mapping[str, Bounds]) -> int:
    return sum(math.prod(stop - start for start, stop in pairs) for pairs in bounds.values())


@dataclass(frozen=True)
class Reach:
    """A rectangle of each parameter of a supernet; parameters that are not named are not in it. shapes: of the whole supernet."""

    regions: Mapping[str, Region]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, supernet: Supernet[Any], space: SearchSpace, choices: Choices) -> Reach | None:
        """Nothing where it is the whole supernet. space: the client's."""
        bounds = _bounds_of(supernet, choices)
        part = cls({name: tuple(slice(*pair) for pair in pairs) for name, pairs in bounds.items()}, supernet.shapes)
        draw = rng("part")
        if not all(part.holds(supernet.regions(space.sample(draw))) for _ in range(PROBES)):
            what = (
                f"The supernet of {space.name} uses weights that no larger choice of a gene uses, so a budget for each tier cannot cut it"
            )
            raise InvalidConfig(f"{what}. Set one limit for all", key="budget")
        whole = {name: tuple(slice(0, size) for size in shape) for name, shape in supernet.shapes.items()}
        return None if part.regions == whole else part

    def holds(self, regions: Mapping[str, Region]) -> bool:
        """Whether all of these entries are in it."""
        for name, region in regions.items():
            if name not in self.regions:
                return False
            pairs = zip(_bounds(region, self.shapes[name]), self._bounds[name], strict=True)
            if any(own[0] < mine[0] or own[1] > mine[1] for own, mine in pairs):
                return False
        return True

    @cached_property
    def _bounds(self) -> dict[str, Bounds]:
        return {name: _bounds(region, self.shapes[name]) for name, region in self.regions.items()}

    @property
    def entries(self) -> int:
        return _entries(self._bounds)

    def cut(self, arrays: Arrays) -> dict[str, Array]:
        """The part of arrays of the supernet. An axis of length 1 that stands for all of a longer one (see ``Supernet.coverage``) stays."""
        return {name: np.ascontiguousarray(arrays[name][self._places(name, arrays[name].shape)]) for name in self.regions}

    def _places(self, name: str, shape: tuple[int, ...]) -> Region:
        return tuple(slice(None) if have == 1 else part for have, part in zip(shape, self.regions[name], strict=True))

    def placed(self, arrays: Arrays) -> dict[str, Array]:
        """Back in arrays of the supernet's shapes, with zeros around it. An axis of length 1 stays where it stands for a whole axis of
        the supernet, and is written out where it stands for a part of one."""
        if set(arrays) != set(self.regions):
            raise BadReport("A report does not have the arrays of its client's part of the supernet")
        placed = {}
        for name, shape in self.shapes.items():
            if name not in arrays:
                kind = next(iter(arrays.values())).dtype
                placed[name] = np.zeros((1,) * len(shape) if kind.kind in "biu" else shape, kind)
                continue
            own, bounds = arrays[name], self._bounds[name]
            compact = [have == 1 and pair == (0, size) for have, pair, size in zip(own.shape, bounds, shape, strict=True)]
            room = np.zeros([1 if one else size for one, size in zip(compact, shape, strict=True)], own.dtype)
            room[tuple(slice(None) if one else part for one, part in zip(compact, self.regions[name], strict=True))] = own
            placed[name] = room
        return placed


def _bounds(region: Region, shape: tuple[int, ...]) -> Bounds:
    """First and last of each axis; steps, if there are any, are filled."""
    return [(start, stop) for start, stop, _ in (part.indices(size) for part, size in zip(region, shape, strict=True))]
