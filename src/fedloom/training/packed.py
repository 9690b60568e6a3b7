"""All weights of a network in one vector: a training step then moves them with a handful of kernels instead of hundreds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.supernets.base import Weights


@dataclass(frozen=True)
class Packed:
    """``views`` are the weights by name, each a part of ``flat``."""

    flat: Tensor
    views: dict[str, Tensor]

    @classmethod
    def of(cls, weights: Weights) -> Packed:
        """A copy."""
        return cls(flat := flattened(weights.values()), _views(flat, {name: tensor.shape for name, tensor in weights.items()}))

    @classmethod
    def zeros(cls, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device) -> Packed:
        """Room for weights of these shapes."""
        flat = torch.zeros(sum(_padded(math.prod(shape)) for shape in shapes.values()), dtype=dtype, device=device)
        return cls(flat, _views(flat, shapes))

    def unpacked(self) -> dict[str, Tensor]:
        """A copy of each weight, free of the vector."""
        return {name: view.clone() for name, view in self.views.items()}


ALIGNED = 8  # entries: GPU kernels read weights in words of 16 bytes and fail on addresses in between


def _padded(entries: int) -> int:
    return -(-entries // ALIGNED) * ALIGNED


def _views(flat: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    parts = flat.split([_padded(size) for size in sizes.values()])
    return {name: part[: sizes[name]].view(tuple(shapes[name])) for name, part in zip(sizes, parts, strict=True)}


def flattened(tensors: Iterable[Tensor]) -> Tensor:
    """One vector of all entries; each tensor starts at an aligned place, with zeros in the gaps."""
    parts = []
    for tensor in tensors:
        parts.append(tensor.detach().reshape(-1))
        gap = _padded(tensor.numel()) - tensor.numel()
        if gap:
            parts.append(tensor.new_zeros(gap))
    return torch.cat(parts)


def sgd(
    weights: Tensor, momenta: Tensor, gradient: Tensor, decay: Tensor, momentum: float, rate: Tensor | float, mask: Tensor | None
) -> None:
    """One step of SGD with momentum and decay on packed weights, in place; entries outside the mask do not move."""
    with torch.no_grad():
        moved = momenta * momentum + torch.addcmul(gradient, decay, weights)
        moved = moved if mask is None else torch.where(mask, moved, momenta)
        momenta.copy_(moved)
        weights.sub_(rate * (moved if mask is None else torch.where(mask, moved, 0.0)))
