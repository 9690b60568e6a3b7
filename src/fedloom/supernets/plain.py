"""Ordinary torch modules that stand-alone networks of several spaces are made of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.architecture import Architecture
from fedloom.supernets.elastic import EPS, GROUP, Statistics


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


class StandAlone(nn.Module):
    """An architecture's own weights and statistics under their names, and the supernet's function that computes with them."""

    def __init__(
        self, compute: Callable[..., Tensor], architecture: Architecture, weights: Mapping[str, Tensor], statistics: Statistics
    ) -> None:
        super().__init__()
        self._compute, self._architecture, self._norms = compute, architecture, tuple(statistics)
        for name, tensor in weights.items():
            module, _, leaf = name.rpartition(".")
            self._module(module).register_parameter(leaf, nn.Parameter(tensor))
        for name, moments in statistics.items():
            for moment, tensor in zip(("running_mean", "running_var"), moments, strict=True):
                self._module(name).register_buffer(moment, tensor)

    def _module(self, path: str) -> nn.Module:
        """The module at a path such as block1.conv, made where it is missing."""
        module: nn.Module = self
        for part in filter(None, path.split(".")):
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module

    def forward(self, images: Tensor) -> Tensor:
        held = self.state_dict(keep_vars=True)
        known = Statistics({name: (held[f"{name}.running_mean"], held[f"{name}.running_var"]) for name in self._norms})
        return self._compute(images, held, self._architecture, None if self.training else known)
