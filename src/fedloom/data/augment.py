"""Random crops, flips and cutout for a whole batch at once, on the device that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """What training images go through, in this order."""

    crop: int = 0  # pixels of padding before a random crop to the old size; 0 = off
    flip: bool = False  # left and right exchanged for about half of the images
    cutout: int = 0  # side of a blanked square at a random centre; 0 = off


def augment(images: Tensor, augmentation: Augmentation, rng: np.random.Generator, mean: Sequence[float]) -> Tensor:
    """Augmented copies of (n, channels, height, width) uint8 images.

    Padding and cutout take the pixel value nearest the channel's mean (0..1), which normalisation turns into about 0.
    The draws come from numpy, so every device sees the same ones.
    """
    count, channels, height, width = images.shape
    crop, side = augmentation.crop, augmentation.cutout
    draws = []
    if crop:
        draws.append(rng.integers(0, 2 * crop + 1, size=(count, 2)))
    if augmentation.flip:
        draws.append(rng.integers(0, 2, size=(count, 1)))
    if side:
        draws.append(rng.integers(0, (height, width), size=(count, 2)))
    if not draws:
        return images.clone()
    # One transfer for all kinds; one column each, (n, 1).
    columns = iter(torch.from_numpy(np.concatenate(draws, axis=1)).to(images.device, non_blocking=True).split(1, dim=1))

    row = torch.arange(height, device=images.device).expand(count, height)
    column = torch.arange(width, device=images.device).expand(count, width)
    source_row, source_column = row, column  # where an output pixel comes from; outside the image = padding
    if crop:
        source_row = source_row + next(columns) - crop
        shift = next(columns) - crop
    if augmentation.flip:
        source_column = torch.where(next(columns) == 1, width - 1 - column, column)
    if crop:
        source_column = source_column + shift
    position = source_row.clamp(0, height - 1)[:, :, None] * width + source_column.clamp(0, width - 1)[:, None, :]
    index = position.reshape(count, 1, height * width).expand(count, channels, height * width)
    moved = images.reshape(count, channels, height * width).gather(2, index).reshape(images.shape)
    if not crop and not side:
        return moved

    blank = (source_row != source_row.clamp(0, height - 1))[:, :, None] | (source_column != source_column.clamp(0, width - 1))[:, None, :]
    if side:
        from_top, from_left = row - next(columns) + side // 2, column - next(columns) + side // 2
        blank = blank | (((from_top >= 0) & (from_top < side))[:, :, None] & ((from_left >= 0) & (from_left < side))[:, None, :])
    fill = _per_channel(tuple(round(255 * value) for value in mean), torch.uint8, images.device)
    return torch.where(blank[:, None], fill, moved)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 images -> float32 with about zero mean and unit spread; ``mean`` and ``std`` on the 0..1 scale, one per channel."""
    scale = _per_channel(tuple(1 / (255 * value) for value in std), torch.float32, images.device)
    shift = _per_channel(tuple(-centre / spread for centre, spread in zip(mean, std, strict=True)), torch.float32, images.device)
    return torch.addcmul(shift, images.to(torch.float32), scale)


@cache  # moved to a device once, and never freed: captured graphs read it
def _per_channel(values: tuple[float, ...], kind: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=kind, device=device).view(-1, 1, 1)
