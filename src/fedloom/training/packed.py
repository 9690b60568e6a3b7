"""All weights of a network in one vector: a training step then moves them with a handful of kernels instead of hundreds."""

from __future__ import annotations

from collections.abc import Iterable
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
        flat = flattened(weights.values())
        parts = flat.split([_padded(tensor) for tensor in weights.values()])
        views = {name: part[: tensor.numel()].view(tensor.shape) for part, (name, tensor) in zip(parts, weights.items(), strict=True)}
        return cls(flat, views)

    def unpacked(self) -> dict[str, Tensor]:
        """A copy of each weight, free of the vector."""
        return {name: view.clone() for name, view in self.views.items()}


ALIGNED = 8  # entries: GPU kernels read weights in words of 16 bytes and fail on addresses in between


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() // ALIGNED) * ALIGNED


def flattened(tensors: Iterable[Tensor]) -> Tensor:
    """One vector of all entries; each tensor starts at an aligned place, with zeros in the gaps."""
    parts = []
    for tensor in tensors:
        parts.append(tensor.detach().reshape(-1))
        gap = _padded(tensor) - tensor.numel()
        if gap:
            parts.append(tensor.new_zeros(gap))
    return torch.cat(parts)


def sgd(
    weights: Tensor, momenta: Tensor, gradient: Tensor, decay: Tensor, momentum: float, rate: Tensor | float, mask: Tensor | None
) -> None:
    """One step of SGD with momentum and decay on packed weights, in place; entries outside the mask do not move."""
    with torch.no_grad():
        moved = momenta * momentum + gradient + decay * weights
        moved = moved if mask is None else torch.where(mask, moved, momenta)
        momenta.copy_(moved)
        weights.sub_(rate * (moved if mask is None else torch.where(mask, moved, 0.0)))
