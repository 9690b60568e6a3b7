"""All weights of a network in one vector: a training step then moves them with a handful of kernels instead of hundreds.

Several networks of one shape are stacked: a row each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property

import torch
from torch import Tensor

from fedloom.supernets.base import Weights

Shapes = Mapping[str, Sequence[int]]


class Packed(Mapping[str, Tensor]):
    """Weights by name, each a part of ``flat``: (entries,), or (networks, entries) where several are stacked."""

    def __init__(self, flat: Tensor, shapes: Shapes) -> None:
        self.flat, self.shapes = flat, {name: tuple(shape) for name, shape in shapes.items()}

    @cached_property
    def views(self) -> dict[str, Tensor]:
        """Hundreds of them: many a copy is only passed on as a whole."""
        return _views(self.flat, self.shapes)

    @classmethod
    def of(cls, weights: Weights) -> Packed:
        """A copy."""
        if isinstance(weights, Packed):
            return weights.copy()
        return cls(flattened(weights.values()), {name: tensor.shape for name, tensor in weights.items()})

    @classmethod
    def stack(cls, networks: Sequence[Weights]) -> Packed:
        """Copies of networks that have the same names and shapes, (networks, entries). The first says in which order parameters lie: what
        a client remembers comes back from its file in another order than what it receives."""
        order = list(networks[0])
        rows = [
            own if isinstance(own, Packed) and list(own.shapes) == order else cls.of({name: own[name] for name in order})
            for own in networks
        ]
        return cls(torch.stack([row.flat for row in rows]), rows[0].shapes)

    @classmethod
    def zeros(cls, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Packed:
        """Room for weights of these shapes."""
        return cls(torch.zeros(sum(padded(math.prod(shape)) for shape in shapes.values()), dtype=dtype, device=device), shapes)

    def copy(self) -> Packed:
        return Packed(self.flat.clone(), self.shapes)

    def row(self, number: int) -> Packed:
        """A copy of one network of a stack."""
        return Packed(self.flat[number].clone(), self.shapes)

    def span(self, names: Iterable[str]) -> Packed:
        """What lies from the first to the last of these, as a view; also others that lie among them."""
        order, chosen = list(self.shapes), set(names)
        places = [place for place, name in enumerate(order) if name in chosen]
        sizes = [padded(math.prod(shape)) for shape in self.shapes.values()]
        begin, some = sum(sizes[: places[0]]), slice(places[0], places[-1] + 1)
        return Packed(self.flat.narrow(-1, begin, sum(sizes[some])), {name: self.shapes[name] for name in order[some]})

    def to(self, dtype: torch.dtype) -> Packed:
        """The same in another precision; itself in its own."""
        return self if dtype == self.flat.dtype else Packed(self.flat.to(dtype), self.shapes)

    def on_host(self) -> Packed:
        """The same in the host's memory; itself if it is there. A GPU writes directly only to memory that is pinned, and much faster."""
        if not self.flat.is_cuda:
            return self
        return Packed(torch.empty_like(self.flat, device="cpu", pin_memory=True).copy_(self.flat), self.shapes)

    def load(self, weights: Weights) -> None:
        if isinstance(weights, Packed) and weights.layout == self.layout:
            self.flat.copy_(weights.flat)
        else:
            for name, view in self.views.items():
                view.copy_(weights[name])

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...]]]:
        """What lies where."""
        return list(self.shapes.items())

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


ALIGNED = 8  # entries: GPU kernels read weights in words of 16 bytes and fail on addresses in between


def padded(entries: int) -> int:
    return -(-entries // ALIGNED) * ALIGNED


def _views(flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """By strides, in one call each: to cut ``flat`` and to shape its parts takes twice as long."""
    if flat.stride(-1) != 1 or flat.shape[-1] != sum(padded(math.prod(shape)) for shape in shapes.values()):
        raise ValueError(f"{tuple(flat.shape)} entries, {flat.stride(-1)} apart, are not weights of these shapes")
    rows, apart, start, views = flat.shape[:-1], flat.stride()[:-1], flat.storage_offset(), {}
    for name, shape in shapes.items():
        views[name] = flat.as_strided((*rows, *shape), (*apart, *_strides(shape)), start)
        start += padded(math.prod(shape))
    return views


@cache
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of entries that lie one after the other."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def flattened(tensors: Iterable[Tensor], stacked: bool = False) -> Tensor:
    """One vector of all entries; each tensor starts at an aligned place, with zeros in the gaps. stacked: a row per network."""
    parts: list[Tensor] = []
    nothing: Tensor | None = None
    for tensor in tensors:
        part = tensor.detach().flatten(1 if stacked else 0)
        parts.append(part)
        gap = padded(part.shape[-1]) - part.shape[-1]
        if gap:
            nothing = part.new_zeros(*part.shape[:-1], ALIGNED) if nothing is None else nothing
            parts.append(nothing[..., :gap])
    return torch.cat(parts, -1)
