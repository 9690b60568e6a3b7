"""Random weights, images and regions of any supernet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.supernets.base import Region, Supernet
from fedloom.supernets.normalisation import Statistics
from fedloom.training.pixels import Pixels

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}  # float32, some twenty layers, logits of order one


@dataclass(frozen=True)
class InPrecision(Pixels):
    """Images as numbers of a given precision."""

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.25,)
    precision: torch.dtype = torch.float32

    def normalise(self, images: Tensor) -> Tensor:
        return super().normalise(images).to(self.precision)


def weights_of(supernet: Supernet[Any], seed: int = 0) -> dict[str, Tensor]:
    """Initial weights, every entry perturbed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + (0.3 if tensor.ndim == 1 else 0.1) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in supernet.initial(seed).items()
    }


def images_of(supernet: Supernet[Any], count: int, seed: int = 0) -> Tensor:
    image = supernet.space.image
    return torch.randn(count, image.channels, image.size, image.size, generator=torch.Generator().manual_seed(seed))


def mask(shape: tuple[int, ...], region: Region | None) -> Tensor:
    """True inside the region; nothing is inside an absent parameter."""
    inside = torch.zeros(shape, dtype=torch.bool)
    if region is not None:
        inside[region] = True
    return inside


def masks(supernet: Supernet[Any]) -> bool:
    """Whether a supernet has the masked execution, which is optional."""
    return type(supernet).masked is not Supernet.masked


@torch.no_grad()
def measured(supernet: Supernet[Any], weights: dict[str, Tensor], architecture: Architecture, images: Tensor) -> Statistics:
    statistics = Statistics(rows=len(images))
    supernet.forward(images, weights, architecture, statistics)
    return Statistics(statistics)
