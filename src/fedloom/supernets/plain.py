"""Ordinary torch modules that stand-alone networks of several spaces are made of."""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.supernets.elastic import EPS, GROUP


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
