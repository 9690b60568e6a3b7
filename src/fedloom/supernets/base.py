"""What a supernet is: a computation whose weights, architecture and normalisation statistics are all arguments.

Weights arrive in messages and leave in messages, so a supernet holds none. Every parameter is a tensor at its largest
size; an architecture uses a rectangle of it (its *region*), and absent blocks use nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fedloom.core.architecture import Architecture
from fedloom.core.registry import Registry
from fedloom.core.seeds import rng
from fedloom.spaces.base import SearchSpace
from fedloom.supernets.elastic import Statistics

Weights = Mapping[str, Tensor]
Region = tuple[slice, ...]  # one slice per axis of a parameter; slice(None) on axes that every architecture uses whole
Space = TypeVar("Space", bound=SearchSpace)


class Supernet(ABC, Generic[Space]):
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

    @abstractmethod
    def plain(self, weights: Weights, architecture: Architecture) -> dict[str, Tensor]:
        """The weights of the stand-alone network, from the supernet's; names and shapes are those of ``network``."""

    @abstractmethod
    def network(self, architecture: Architecture) -> nn.Module:
        """The stand-alone network as plain torch modules, freshly initialised."""

    # -- what every supernet gets -----------------------------------------
    def take(self, weights: Weights, architecture: Architecture) -> dict[str, Tensor]:
        """An architecture's part of the supernet's weights, as views."""
        return {name: weights[name][region] for name, region in self.regions(architecture).items()}

    def extract(self, weights: Weights, architecture: Architecture, statistics: Statistics | None = None) -> nn.Module:
        """A plain network with outputs identical to ``forward`` in evaluation mode."""
        return self.load(architecture, self.plain(weights, architecture), statistics)

    def load(self, architecture: Architecture, plain: Weights, statistics: Statistics | None = None) -> nn.Module:
        """The stand-alone network with these plain weights and normalisation statistics."""
        network = self.network(architecture)
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

    def coverage(self, steps: Mapping[Architecture, int]) -> dict[str, Tensor]:
        """How many steps trained each entry. Axes that are always used whole have length 1 (compact: it broadcasts)."""
        counts = {}
        for name, shape in self.shapes.items():
            sizes = zip(shape, self.elastic_axes[name], strict=True)
            counts[name] = torch.zeros([size if elastic else 1 for size, elastic in sizes], dtype=torch.int32)
        for architecture, times in steps.items():
            for name, region in self.regions(architecture).items():
                axes = self.elastic_axes[name]
                counts[name][tuple(part if elastic else slice(None) for part, elastic in zip(region, axes, strict=True))] += times
        return counts


SUPERNETS: Registry[Callable[..., Supernet[Any]]] = Registry("supernet")
