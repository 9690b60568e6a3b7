"""How a data set's pixels become numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.data.augment import normalise


@dataclass(frozen=True)
class Pixels:
    """Mean and spread of each channel, on the scale from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, images: Tensor) -> Tensor:
        """(…, channels, height, width) of 8 bits -> numbers. Channels last: convolutions on a CPU take half the time."""
        rows = images.flatten(0, -4)  # (n, channels, height, width)
        return normalise(rows, self.mean, self.std).contiguous(memory_format=torch.channels_last).unflatten(0, images.shape[:-3])
