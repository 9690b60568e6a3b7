"""How images were taken: clients differ not only in what they photograph, but also in camera, light and distance.

Tasks of the predictor come in these conditions, because classes of one data set alone hardly prefer one architecture to another.
Every condition keeps the size of images, (n, channels, side, side) of 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client_site import Examples
from fedloom.supernets.elastic import in_float64

AT_ONCE = 4096  # images: bounds memory
NOISE = 30.0  # of 255, standard deviation
ZOOM = 0.6  # of the side


def _plain(images: Tensor) -> Tensor:
    return images


def _grey(images: Tensor) -> Tensor:
    return images.mean(1, keepdim=True).expand_as(images)


def _blurred(images: Tensor) -> Tensor:
    line = images.new_tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
    channels = images.shape[1]
    kernel = (line[:, None] * line).expand(channels, 1, 5, 5)
    return F.conv2d(F.pad(images, (2, 2, 2, 2), mode="replicate"), kernel, groups=channels)


def _noisy(images: Tensor) -> Tensor:
    """The noise follows from the images: the same ones are always the same."""
    seed = int(in_float64(images).sum().item()) % 2**31
    draw = torch.Generator(images.device).manual_seed(seed)
    return images + NOISE * torch.randn(images.shape, generator=draw, device=images.device)


def _closer(images: Tensor) -> Tensor:
    side, first, size = _window(images)
    part = images[:, :, first : first + size, first : first + size]
    return F.interpolate(part, size=(side, side), mode="bilinear", align_corners=False)


def _farther(images: Tensor) -> Tensor:
    """Smaller, in the middle of the mean colour."""
    _, first, size = _window(images)
    result = images.mean((2, 3), keepdim=True).expand_as(images).clone()
    result[:, :, first : first + size, first : first + size] = F.interpolate(images, size=(size, size), mode="area")
    return result


def _window(images: Tensor) -> tuple[int, int, int]:
    """Side, where the middle part starts and its size."""
    side = images.shape[-1]
    size = max(1, round(ZOOM * side))
    return side, (side - size) // 2, size


CONDITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": _plain,
    "grey": _grey,
    "blurred": _blurred,
    "noisy": _noisy,
    "closer": _closer,
    "farther": _farther,
}


def taken(images: Tensor, condition: str) -> Tensor:
    """Images (n, c, h, w) of 8 bits as this condition shows them."""
    if condition == "plain" or not len(images):
        return images
    parts = [CONDITIONS[condition](part.float()).round().clamp(0, 255).byte() for part in images.split(AT_ONCE)]
    return torch.cat(parts)


def mixed(examples: Examples, conditions: tuple[str, ...], draw: np.random.Generator) -> Examples:
    """Every image in one of these conditions, drawn evenly."""
    if conditions == ("plain",):
        return examples
    of = torch.from_numpy(draw.integers(len(conditions), size=len(examples.labels))).to(examples.labels.device)
    images = examples.images.clone()
    for number, condition in enumerate(conditions):
        rows = torch.nonzero(of == number)[:, 0]
        images[rows] = taken(examples.images[rows], condition)
    return Examples(images, examples.labels)
