"""What a supernet is: a computation whose weights, architecture and normalisation statistics are all arguments.

Weights arrive in messages and leave in messages, so a supernet holds none. Every parameter is a tensor at its largest
size; an architecture uses a rectangle of it (its *region*), and absent blocks use nothing.

Two executions, one truth. *Sliced* (``forward``): real slices, exactly the work of the subnet; for CPUs, export, deployment.
*Masked* (``forward_many``): static shapes, architectures as a tensor, many at once, nothing read back to the host; for GPUs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.registry import Registry
from fedloom.core.seeds import rng
from fedloom.spaces.base import SPACES, Cost, ImageShape, SearchSpace
from fedloom.supernets.neighbours import fitted
from fedloom.supernets.normalisation import Statistics
from fedloom.supernets.plain import StandAlone

Weights = Mapping[str, Tensor]
Region = tuple[slice, ...]  # one slice per axis of a parameter; slice(None) on axes that every architecture uses whole
Piece = Hashable  # a part of a network that works on what the part before it gives; see supernets/chain.py
Space = TypeVar("Space", bound=SearchSpace)


class Many(Protocol):
    """Several networks of one supernet, of one client or of several, run together."""

    @property
    def held(self) -> int: ...  # numbers of an image that are in memory at once, besides those inside a call

    def run(self, images: Tensor, rows: int) -> Tensor:
        """(networks, n, classes) logits. images: (clients, n, c, h, w), of which the first ``rows`` measure statistics; with 0 those
        that were measured before serve."""
        ...


class Supernet(ABC, Generic[Space]):
    # Whether masks pay on a GPU: one set of kernels then serves every architecture, at the price of running what it lacks as well.
    # A supernet that has ``masked`` may say that they do not.
    masks_pay: ClassVar[bool] = False
    # Whether training gives it weights that are zero outside an architecture's region (``among_zeros``).
    likes_zeros: ClassVar[bool] = False
    # Whether every choice has weights of its own, as in DARTS, instead of a part of the largest one's.
    pathwise: ClassVar[bool] = False
    # Whether a GPU scores many networks at once without masks. A ``Chain`` does so by its pieces, others say ``many``.
    in_groups: ClassVar[bool] = False

    @property
    def takes_groups(self) -> bool:
        """Whether ``run_piece`` also takes x: (groups, n, …) and weights with an axis of groups or shared by all; else vmap gives it one
        group at a time, which takes Python longer."""
        return False

    def kind(self, piece: Any) -> Hashable:
        """Pieces of one kind can run at once in ``run_alike``, though they differ in their choices."""
        return piece

    def kind_names(self, piece: Any) -> Iterable[str]:
        """The parameters that pieces of this piece's kind have in common, as large as any of them needs."""
        return self.piece_regions(piece)

    def run_alike(self, pieces: Sequence[Any], x: Tensor, weights: Weights, statistics: Statistics | None = None) -> Tensor:
        """``run_piece`` of several pieces of one kind, masked, where ``takes_groups``. x: (groups, n, …), a piece for each group;
        weights: ``kind_names`` whole, with an axis of groups or shared."""
        raise NotImplementedError(f"the supernet of {self.space.name} says ``kind`` but not ``run_alike``")

    def __init_subclass__(cls, **how: Any) -> None:
        super().__init_subclass__(**how)
        if "masked" in vars(cls) and "masks_pay" not in vars(cls):
            cls.masks_pay = cls.masked is not Supernet.masked

    def __init__(self, space: Space) -> None:
        self.space = space

    # -- what a supernet must say -----------------------------------------
    @abstractmethod
    def initial(self, seed: int) -> dict[str, Tensor]:
        """Fresh weights of the whole supernet."""

    @abstractmethod
    def regions(self, architecture: Architecture) -> Mapping[str, Region]:
        """Coverage: which entries of which parameter this architecture uses and trains. Absent parameters are not named."""

    @abstractmethod
    def forward(self, images: Tensor, weights: Weights, architecture: Architecture, statistics: Statistics | None = None) -> Tensor:
        """(n, classes) logits. ``weights`` are an architecture's own: from ``take``, or from ``plain``.

        Without statistics batch normalisation uses the moments of ``images``, as training does.
        """

    # -- what it may say otherwise ------------------------------------------
    def masked(self, images: Tensor, weights: Weights, genes: Tensor, statistics: Statistics | None = None) -> Tensor:
        """``forward`` of the architecture whose choices are ``genes``, (genes,) integers on the device, at static shapes.

        ``weights`` are the whole supernet's and ``images`` already have their input size. Must be safe under ``torch.vmap``
        over ``genes``: no value of a tensor may reach Python. A supernet without it always runs sliced.
        """
        raise InvalidConfig(f"The supernet of {self.space.name} has no masked execution. Set training.execution=sliced")

    def among_zeros(self, images: Tensor, weights: Weights, genes: Tensor) -> Tensor:
        """``masked`` in training, with weights that are zero outside the architecture's region. So hardly anything needs a mask. Gradients
        outside the region mean nothing; training drops them. For supernets that like zeros."""
        return self.masked(images, weights, genes)

    def many(self, subnets: Sequence[tuple[int, Architecture]], weights: Weights) -> Many:
        """Subnets that run together, each with the row of its client. weights: (clients, …), or (1, …) where all have the same."""
        raise InvalidConfig(f"The supernet of {self.space.name} runs one network after the other. Set training.execution=sliced")

    def plain(self, weights: Weights, architecture: Architecture) -> dict[str, Tensor]:
        """The weights of the stand-alone network, from the supernet's; names and shapes are those of ``network``."""
        return {name: tensor.clone() for name, tensor in self.take(weights, architecture).items()}

    def embedding(self, architecture: Architecture) -> tuple[Mapping[str, Region], tuple[int, ...]]:
        """Where the weights of a plain network lie in the supernet's, and the choices by which ``masked`` then computes that network."""
        return self.regions(architecture), architecture.choices

    def in_head(self, name: str) -> bool:
        """Whether a parameter, of the supernet or of a plain network, is the classifier's: of the layer that makes logits of features."""
        return name.startswith("classifier.")

    def classifier(self, weights: Weights) -> tuple[str, str]:
        """The names of the classifier's weight, (classes, features), and of its bias. A head of another kind is refused."""
        by_axes = {weights[name].ndim: name for name in weights if self.in_head(name)}
        if sorted(by_axes) != [1, 2] or sum(map(self.in_head, weights)) != 2:
            what = f"The head of {self.space.name} is not one linear layer with a weight and a bias, which the method needs"
            raise InvalidConfig(f"{what}. Choose another space or method")
        return by_axes[2], by_axes[1]

    def features(self, images: Tensor, weights: Weights, architecture: Architecture, statistics: Statistics | None = None) -> Tensor:
        """(n, features): what the classifier sees. ``forward`` with a classifier that hands on what it gets."""
        weight, bias = self.classifier(weights)
        same = torch.eye(weights[weight].shape[1], dtype=weights[weight].dtype, device=weights[weight].device)
        return self.forward(images, {**weights, weight: same, bias: torch.zeros_like(same[0])}, architecture, statistics)

    def network(self, architecture: Architecture) -> nn.Module:
        """The stand-alone network as plain torch modules, freshly initialised. Default: a module that holds its parameters
        and statistics by name and computes ``forward``."""
        image, statistics = self.space.image, Statistics(rows=2)
        own = self.plain(self.initial(0), architecture)
        with torch.no_grad():  # to learn what is normalised
            self.forward(torch.zeros(2, image.channels, image.size, image.size), own, architecture, statistics)
        return StandAlone(self.forward, architecture, own, statistics)

    # -- a network as a chain of pieces: one, the whole, unless a supernet is a ``Chain`` ------------
    def pieces(self, architecture: Architecture) -> tuple[Piece, ...]:
        """Everything that a piece's computation depends on is in it, besides its input, its weights and what all networks share.
        So networks with the same first pieces compute the same up to there."""
        return (architecture,)

    def piece_regions(self, piece: Any) -> Mapping[str, Region]:
        """``regions`` of a piece."""
        return self.regions(piece)

    def run_piece(self, piece: Any, x: Tensor, weights: Weights, statistics: Statistics | None = None) -> Tensor:
        """What a piece makes of the output of the piece before it; the first one gets images, the last one gives logits.

        ``weights`` are the piece's own, from ``take_piece``; there may be others beside them. Scoring runs it under ``torch.vmap``.
        """
        return self.forward(x, weights, piece, statistics)

    def piece_cost(self, piece: Any) -> Cost:
        return self.space.cost(piece)

    def piece_gives(self, piece: Any) -> int:
        """Numbers of one image that a piece hands on."""
        return self.space.image.classes

    # -- what every supernet gets -----------------------------------------
    def forward_many(
        self,
        images: Tensor,
        weights: Weights,
        genes: Tensor,
        statistics: Statistics | None = None,
        sizes: Sequence[int] | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """(architectures, n, classes) logits of many subnets of one supernet, masked; equal to ``forward`` of each.

        genes: (architectures, genes) choices. Statistics that are measured (``rows``) come back with a leading axis of
        architectures, channels that an architecture lacks at mean 0 and variance 1; those that are given have it or not.
        sizes: the input side of each architecture; without them a space with several reads them from the genes. A batch runs
        as one group per size. chunk: how many architectures at a time, to bound memory.
        """
        sizes = sizes or self.space.input_sizes(genes)
        if len(set(sizes)) == 1:
            return self._many(resized(images, sizes[0]), weights, genes, statistics, chunk)
        groups = {size: [index for index, s in enumerate(sizes) if s == size] for size in dict.fromkeys(sizes)}
        place = {index: row for row, index in enumerate(index for members in groups.values() for index in members)}
        logits: list[Tensor] = []
        measured: list[Mapping[str, tuple[Tensor, Tensor]]] = []
        for size, members in groups.items():
            known = (
                None
                if statistics is None
                else Statistics({k: (_some(m, members), _some(v, members)) for k, (m, v) in statistics.items()}, statistics.rows)
            )
            logits.append(self._many(resized(images, size), weights, _some(genes, members), known, chunk))
            measured.append(known or {})
        back = [place[index] for index in range(len(sizes))]
        if statistics is not None and statistics.rows:
            for name in measured[0]:
                mean, variance = (torch.cat([part[name][side] for part in measured]) for side in (0, 1))
                statistics[name] = (_some(mean, back), _some(variance, back))
        return _some(torch.cat(logits), back)

    def _many(self, images: Tensor, weights: Weights, genes: Tensor, statistics: Statistics | None, chunk: int | None) -> Tensor:
        known = dict(statistics or {})
        axes = {name: tuple(0 if moment.ndim == 2 else None for moment in moments) for name, moments in known.items()}

        def one(choices: Tensor, known: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
            own = None if statistics is None else Statistics(known, statistics.rows)
            return self.masked(images, weights, choices, own), dict(own or {}) if own is not None and own.rows else {}

        if len(genes) == 1:  # the same without the cost of vmap
            logits, measured = one(genes[0], {name: (m[0], v[0]) if m.ndim == 2 else (m, v) for name, (m, v) in known.items()})
            logits, measured = logits[None], {name: (m[None], v[None]) for name, (m, v) in measured.items()}
        else:
            logits, measured = torch.vmap(one, in_dims=(0, axes), chunk_size=chunk)(genes, known)
        if statistics is not None:
            statistics.update(measured)
        return logits

    def take_statistics(self, statistics: Statistics, architecture: Architecture) -> Statistics:
        """An architecture's part of statistics that are as wide as the supernet's normalisation layers."""
        regions = self.regions(architecture)
        taken = Statistics()
        for name, (mean, variance) in statistics.items():
            if f"{name}.weight" in regions:
                (part,) = regions[f"{name}.weight"]
                taken[name] = (mean[part], variance[part])
        return taken

    def take(self, weights: Weights, architecture: Architecture) -> dict[str, Tensor]:
        """An architecture's part of the supernet's weights, as views."""
        return {name: weights[name][region] for name, region in self.regions(architecture).items()}

    def take_piece(self, weights: Weights, piece: Piece) -> dict[str, Tensor]:
        """A piece's part of the supernet's weights, as views."""
        return {name: weights[name][region] for name, region in self.piece_regions(piece).items()}

    def extract(self, weights: Weights, architecture: Architecture, statistics: Statistics | None = None) -> nn.Module:
        """A plain network with outputs identical to ``forward`` in evaluation mode."""
        return self.load(architecture, self.plain(weights, architecture), statistics)

    def load(self, architecture: Architecture, plain: Weights, statistics: Statistics | None = None) -> nn.Module:
        """The stand-alone network with these plain weights and normalisation statistics."""
        network = fitted(self.network(architecture), plain)
        state = dict(plain)
        for name, (mean, variance) in (statistics or {}).items():
            state |= {f"{name}.running_mean": mean, f"{name}.running_var": variance}
        missing = set(network.state_dict()) - set(state)
        counters = {name for name in missing if name.endswith("num_batches_tracked")}
        network.load_state_dict({**state, **{name: torch.tensor(0) for name in counters}})
        return network.eval()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter of the supernet and its shape."""
        return {name: tuple(tensor.shape) for name, tensor in self.initial(0).items()}

    @cached_property
    def elastic_axes(self) -> dict[str, tuple[bool, ...]]:
        """For each parameter, the axes of which architectures may use a part: those whose region is not written ``slice(None)``."""
        draw = rng(0, "elastic axes")
        found: dict[str, tuple[bool, ...]] = {}
        for _ in range(10_000):  # a few draws name every parameter
            if set(found) == set(self.shapes):
                return found
            found |= {name: tuple(part != slice(None) for part in region) for name, region in self.regions(self.space.sample(draw)).items()}
        raise ValueError(f"no architecture uses {sorted(set(self.shapes) - set(found))}")

    def coverage(self, steps: Mapping[Architecture, int], counted: bool = True) -> dict[str, Tensor]:
        """How many steps trained each entry; not counted: whether any did, which takes less time. Axes that are always used whole have
        length 1 (compact: it broadcasts)."""
        counts = {}
        for name, shape in self.shapes.items():
            sizes = zip(shape, self.elastic_axes[name], strict=True)
            counts[name] = np.zeros([size if elastic else 1 for size, elastic in sizes], np.int32 if counted else bool)
        pieces: Counter[Piece] = Counter()  # few, however many the architectures
        for architecture, times in steps.items():
            pieces.update(dict.fromkeys(self.pieces(architecture), times))
        regions: dict[tuple[str, str], tuple[Region, int]] = {}  # fewer still: pieces differ in some of their parameters only
        for piece, times in pieces.items():
            for name, region in self.piece_regions(piece).items():
                key = name, str(region)
                regions[key] = region, times + (regions[key][1] if key in regions else 0)
        for (name, _), (region, times) in regions.items():
            part = counts[name][region]  # an axis that is always used whole is written ``slice(None)``
            if counted:
                part += times
            elif times:
                part[...] = True
        return {name: torch.from_numpy(count) for name, count in counts.items()}


def resized(images: Tensor, size: int) -> Tensor:
    """Images at this side in pixels; as they are when it is their own, or 0."""
    if size in (0, images.shape[-1]):
        return images
    flat = images.flatten(0, -4)  # (n, channels, height, width), also where groups come first
    return F.interpolate(flat, size=(size, size), mode="bicubic", align_corners=False).unflatten(0, images.shape[:-3])


def _some(rows: Tensor, chosen: Sequence[int]) -> Tensor:
    """These rows, by places that Python knows, without sending them to the device; a vector shared by all stays as it is."""
    return torch.stack([rows[index] for index in chosen]) if rows.ndim > 1 else rows


SUPERNETS: Registry[Callable[..., Supernet[Any]]] = Registry("supernet")


def make_supernet(name: str, space_settings: Any, image: ImageShape) -> Supernet[Any]:
    space = SPACES[name].make(space_settings, image)
    if name not in SUPERNETS:
        raise InvalidConfig(f"The space {name} has no supernet. Name the file that adds it, too, among the plugins", name=name)
    return SUPERNETS[name].make(space)
