"""Frozen image features: what a client's images look like, as numbers that guide the generator of architectures.

``SmallFeatures`` is a network of ours, small enough to be shipped. ``ResNet18`` is the network of He et al. (CVPR 2016) as trained on
ImageNet, for users who have its public weights. Both map images to one vector each and are never trained at a client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import InvalidData
from fedloom.supernets.foreign.state_dict import read_state, some

CHUNK = 64  # images at a time, to bound memory; always as many on a GPU, whose library looks for kernels anew at each other number
CLASSIFIER = ("classifier.", "fc.")  # layers that only training needs: features end before them
COUNTER = "num_batches_tracked"  # of batch normalisation; only training needs it


class ImageNetwork(nn.Module, ABC):
    """A network whose last maps, averaged over their area, are an image's features."""

    name: ClassVar[str]
    size: ClassVar[int]  # features
    side: ClassVar[int]  # pixels; images of other sizes are resized
    mean: ClassVar[tuple[float, ...]]  # on the 0..1 scale, fixed whatever the data: part of what the weights mean
    std: ClassVar[tuple[float, ...]]

    @abstractmethod
    def maps(self, pixels: Tensor) -> Tensor:
        """(n, size, rows, columns) from prepared pixels (n, 3, side, side)."""

    def features(self, images: Tensor) -> Tensor:
        """(n, size) from images (n, 1 or 3, h, w) of values 0 to 255."""
        return self.maps(prepared(images, self.side, self.mean, self.std)).mean((2, 3))


@dataclass(frozen=True)
class FeatureExtractor:
    """A frozen network that turns images into features."""

    network: ImageNetwork

    @property
    def name(self) -> str:
        return self.network.name

    @property
    def size(self) -> int:
        return self.network.size

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """images: uint8 (n, 1 or 3, h, w) on any device -> (n, size) float32 on the network's device."""
        device = next(self.network.parameters()).device
        images = images.to(device)
        count, gap = len(images), -len(images) % CHUNK if device.type == "cuda" else 0
        images = torch.cat([images, images.new_zeros(gap, *images.shape[1:])]) if gap else images
        parts = [self.network.features(chunk) for chunk in images.split(CHUNK) if len(chunk)]
        return torch.cat([torch.empty(0, self.size, device=device), *parts])[:count]


def prepared(images: Tensor, side: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalised RGB pixels at this side. images: (n, 1 or 3, h, w), values 0 to 255; one channel is repeated to three.

    Larger images are averaged over areas, smaller ones are interpolated bilinearly.
    """
    count, channels, height, width = images.shape
    if channels not in (1, 3):
        raise InvalidData(f"Image features need images of 1 or 3 channels, these have {channels}", channels=channels)
    pixels = images.float() / 255
    if min(height, width) >= side:
        pixels = F.interpolate(pixels, size=(side, side), mode="area") if max(height, width) > side else pixels
    else:
        pixels = F.interpolate(pixels, size=(side, side), mode="bilinear", align_corners=False, antialias=True)
    shift, scale = (pixels.new_tensor(values)[:, None, None] for values in (mean, std))
    return (pixels.expand(count, 3, side, side) - shift) / scale


# -- the shipped network ----------------------------------------------------------------
class SmallFeatures(ImageNetwork):
    """Seven convolutions for images of 32 pixels, 128 features, 0.33 M parameters, 13 M multiply-accumulates.

    Group normalisation, so that nothing depends on a batch. ``classes`` adds the linear classifier that training needs.
    """

    name = "small"
    size = 128
    side = 32
    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)

    def __init__(self, classes: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            Down(16, 32),  # 16 x 16
            Residual(32),
            Down(32, 64),  # 8 x 8
            Residual(64),
            Residual(64),
            Down(64, 128),  # 4 x 4
            Residual(128),
            norm(128),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(self.size, classes) if classes else None

    def maps(self, pixels: Tensor) -> Tensor:
        return self.layers(pixels)  # (n, 128, 4, 4)

    def forward(self, images: Tensor) -> Tensor:
        """(n, classes) logits, for training."""
        if self.classifier is None:
            raise ValueError("made without classes: there is no classifier")
        return self.classifier(self.features(images))


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // 8, channels)


class Down(nn.Module):
    """Normalise, then a convolution that halves the sides."""

    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.conv = nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(self.norm(x)))


class Residual(nn.Module):
    """One pre-activation convolution beside the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.relu(self.norm(x)))


# -- ImageNet's network -------------------------------------------------------------------
class ResNet18(ImageNetwork):
    """ResNet-18 (He et al., CVPR 2016, Table 1) without its classifier; parameters have their names in public weight files."""

    name = "resnet18"
    size = 512
    side = 224
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))

    def maps(self, pixels: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(pixels)))
        x = F.max_pool2d(x, 3, stride=2, padding=1)  # (n, 64, 56, 56)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return x  # (n, 512, 7, 7)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside the identity, or beside a 1 x 1 convolution where the shape changes."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, wider, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(wider)
        self.conv2 = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(wider)
        self.downsample = (
            nn.Sequential(nn.Conv2d(channels, wider, 1, stride=stride, bias=False), nn.BatchNorm2d(wider))
            if stride > 1 or channels != wider
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + shortcut)


# -- loading ----------------------------------------------------------------------------------
def load_features(file: str, device: torch.device | str = "cpu") -> FeatureExtractor:
    """The extractor whose weights are in a user's file: ResNet-18 of ImageNet, or a ``SmallFeatures``; .pth or .safetensors."""
    with torch.random.fork_rng(devices=[]):  # new networks draw weights, which the file's replace
        small, large = SmallFeatures(), ResNet18()
    names = {*small.state_dict(), *large.state_dict()}
    state = read_state(Path(file), names.__contains__).tensors
    return frozen_extractor(small if any(key.startswith("layers.") for key in state) else large, state, file, device)


def frozen_extractor(
    network: ImageNetwork, state: Mapping[str, Tensor], source: str, device: torch.device | str = "cpu"
) -> FeatureExtractor:
    """This network with these weights, which must be all of its and no others; a classifier among them is left out."""
    wanted = {key: tensor for key, tensor in network.state_dict().items() if not key.endswith(COUNTER)}
    given = {key: tensor for key, tensor in state.items() if not key.startswith(CLASSIFIER) and not key.endswith(COUNTER)}
    what = f"{source} does not hold the weights of {type(network).__name__}"
    cure = "Image features are made by ResNet-18 with the names of the public ImageNet weights, resnet18-*.pth"
    if missing := [key for key in wanted if key not in given]:
        raise InvalidData(f"{what}: it lacks {len(missing)} of {len(wanted)} tensors, such as {some(missing)}. {cure}", file=source)
    if unknown := [key for key in given if key not in wanted]:
        raise InvalidData(f"{what}: it has tensors of another network, such as {some(unknown)}. {cure}", file=source)
    for key, tensor in given.items():
        shape, expected = tuple(tensor.shape), tuple(wanted[key].shape)
        if shape != expected:
            raise InvalidData(f"{what}: {key} is {shape} where {expected} belongs. {cure}", file=source)
        if not tensor.is_floating_point() or not tensor.isfinite().all() or (key.endswith("running_var") and (tensor < 0).any()):
            raise InvalidData(f"{source}: {key} holds values that cannot be used. Copy or download the file again", file=source)
    network.load_state_dict({key: tensor.float() for key, tensor in given.items()}, strict=False)  # all but the counters, as checked
    return FeatureExtractor(network.to(device).eval().requires_grad_(False))
