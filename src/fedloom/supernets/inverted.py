"""What networks of inverted residual blocks (MobileNetV3, NASViT) have in common: as functions of a supernet's weights, and as modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.spaces.convolutions import InvertedBlock, Outline
from fedloom.supernets import fused
from fedloom.supernets.base import Weights, resized
from fedloom.supernets.elastic import GROUP, Extent, normed, only, pointwise, product
from fedloom.supernets.normalisation import ACTIVATIONS, EPS, Statistics
from fedloom.supernets.squeeze import gate, squeezed

Masks = tuple[Tensor | None, Tensor | None, Tensor | None]
ALL: Masks = (None, None, None)  # nothing is masked


def run_network(
    x: Tensor,
    weights: Weights,
    outline: Outline[Any],
    run: Callable[[Tensor, Any], Tensor],
    statistics: Statistics | None,
    act: str,
    masks: Masks = ALL,
    norm: str = "batch",
) -> Tensor:
    """(n, classes) logits. run: computes a block; masks: of the layers outside the blocks, which are stem, head and features."""
    stem, head, features = masks
    x = run_stem(x, weights, outline.stem_stride, statistics, act, stem, norm)
    for block in outline.blocks:
        x = run(x, block)
    return run_head(x, weights, statistics, act, head, features, norm)


def run_stem(
    x: Tensor,
    weights: Weights,
    stride: int,
    statistics: Statistics | None,
    act: str,
    mask: Tensor | None = None,
    norm: str = "batch",
) -> Tensor:
    """x: images at the side that the network sees them."""
    return normed(x, weights, "stem", statistics, stride=stride, mask=mask, norm=norm, act=act)


def run_head(
    x: Tensor,
    weights: Weights,
    statistics: Statistics | None,
    act: str,
    mask: Tensor | None = None,
    features: Tensor | None = None,
    norm: str = "batch",
) -> Tensor:
    """(n, classes) logits from the last map. mask, features: of the channels of its two layers."""
    x = normed(x, weights, "head", statistics, mask=mask, norm=norm, act=act).mean((-2, -1), keepdim=True)
    x = ACTIVATIONS[act](pointwise(x, weights["features.conv.weight"])).flatten(-3)
    x = x if features is None else only(x, features)
    return product(x, weights["classifier.weight"], weights["classifier.bias"])


def run_branch(
    x: Tensor,
    weights: Weights,
    block: InvertedBlock,
    kernel: Tensor,
    statistics: Statistics | None,
    act: str,
    masks: Masks = ALL,
    norm: str = "batch",
    residual: Tensor | None = None,
    extent: Extent = (None, None),
) -> Tensor:
    """A block without its shortcut, or with it as the residual; masks: of its middle channels, squeeze-excite units and outputs;
    extent: of its masked kernel."""
    middle, hidden, outputs = masks
    y = normed(x, weights, f"{block.name}.expand", statistics, mask=middle, norm=norm, act=act) if block.expands else x
    squeeze, depth = f"{block.name}.squeeze", (f"{block.name}.depth", statistics, kernel, block.stride, middle, norm, act)
    if block.squeeze and statistics is not None and norm == "batch" and fused.gates(y):
        y = normed(y, weights, *depth, extent=extent, gate=partial(gate, weights=weights, name=squeeze, hidden=hidden))
    else:
        y = normed(y, weights, *depth, extent=extent)
        y = squeezed(y, weights, squeeze, hidden) if block.squeeze else y
    return normed(y, weights, f"{block.name}.project", statistics, mask=outputs, norm=norm, residual=residual)


# -- ordinary modules: for export and deployment. Parameter names are those of ``Supernet.plain`` --------------------
class PlainNetwork(nn.Module):
    """One architecture. block_of: makes the module of a block."""

    def __init__(self, outline: Outline[Any], block_of: Callable[[Any], nn.Module], act: str, input_size: int, norm: str = "batch") -> None:
        super().__init__()
        self.outline, self.act, self.input_size = outline, ACTIVATIONS[act], input_size
        self.stem = normed_convolution(outline.image.channels, outline.stem, 3, outline.stem_stride, norm=norm)
        for block in outline.blocks:  # "first", "stage1.block1", …
            stage, _, place = block.name.partition(".")
            if not place:
                self.add_module(stage, block_of(block))
                continue
            if not hasattr(self, stage):
                self.add_module(stage, nn.ModuleDict())
            self.get_submodule(stage).add_module(place, block_of(block))
        self.head = normed_convolution(outline.last, outline.head, norm=norm)
        self.features = nn.Sequential(OrderedDict(conv=nn.Conv2d(outline.head, outline.features, 1, bias=False)))
        self.classifier = nn.Linear(outline.features, outline.image.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.act(self.stem(resized(images, self.input_size)))
        for block in self.outline.blocks:
            x = self.get_submodule(block.name)(x)
        x = self.act(self.head(x)).mean((2, 3), keepdim=True)
        return self.classifier(self.act(self.features(x)).flatten(1))


class PlainBranch(nn.Module):
    """A block without its shortcut."""

    def __init__(self, block: InvertedBlock, act: str, norm: str = "batch") -> None:
        super().__init__()
        self.act = ACTIVATIONS[act]
        self.expand = normed_convolution(block.inputs, block.middle, norm=norm) if block.expands else None
        self.depth = normed_convolution(block.middle, block.middle, block.kernel, block.stride, block.middle, norm)
        self.squeeze = SqueezeExcite(block.middle, block.squeeze) if block.squeeze else None
        self.project = normed_convolution(block.middle, block.outputs, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else self.act(self.expand(x))
        y = self.act(self.depth(y))
        return self.project(y if self.squeeze is None else self.squeeze(y))


class SqueezeExcite(nn.Module):
    """Channels weighed by what the whole map shows."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.reduce, self.restore = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.reduce(x.mean((2, 3), keepdim=True)))
        return x * F.hardsigmoid(self.restore(hidden))


def normed_convolution(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, norm: str = "batch") -> nn.Sequential:
    """A convolution and its normalisation, under the names conv and norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    layer = nn.BatchNorm2d(outputs, eps=EPS) if norm == "batch" else nn.GroupNorm(outputs // GROUP, outputs, eps=EPS)
    return nn.Sequential(OrderedDict(conv=conv, norm=layer))
