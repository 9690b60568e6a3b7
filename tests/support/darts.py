"""DARTS for tests: small instances, and the published network written out with plain torch modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.architecture import Architecture
from fedloom.spaces.base import ImageShape, SearchSpace
from fedloom.spaces.darts import DARTS, DARTSSettings
from fedloom.spaces.genotype import EDGES, INPUTS, OPERATIONS
from fedloom.supernets.darts import DARTSSupernet

TINY = DARTSSettings.tiny()


def space_of(classes: int = 10, size: int = 32, colours: int = 3, base: DARTSSettings | None = None, **changes: Any) -> DARTS:
    return DARTS(replace(base or DARTSSettings(), **changes), ImageShape(colours, size, classes))


def tiny_supernet(size: int = 8, **changes: Any) -> DARTSSupernet:
    return DARTSSupernet(space_of(3, size, 1, TINY, **changes))


def with_operations(space: DARTS, normal: str, reduction: str) -> Architecture:
    return Architecture("darts", tuple(space.operations.index(name) for name in (normal, reduction) for _ in EDGES))


def connected(space: SearchSpace, architecture: Architecture) -> Architecture:
    """Of ``operations=s2n``, with a skip where a node does not read an input of its cell; others as they are.

    One edge in three is ``none`` there: nodes are often empty, and what reads them has nothing to learn from. And no operation halves a map
    for nothing, so that cheapest would be a network which is cut off from its images.
    """
    if not isinstance(space, DARTS) or space.settings.operations != "s2n":
        return architecture
    skip = space.operations.index("skip_connect")
    inputs = [skip if source < INPUTS else 0 for source, _ in EDGES] * 2
    return replace(architecture, choices=tuple(map(max, architecture.choices, inputs)))


def one_hot(architecture: Architecture, operations: int = 8) -> Tensor:
    return F.one_hot(torch.tensor(architecture.choices), operations).float().reshape(2, 14, operations)


class Sequence(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.op = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


class Reduce(nn.Module):
    """Half of the channels from the even pixels, half from the odd ones; even sides only."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = (nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False) for _ in range(2))
        self.bn = nn.BatchNorm2d(outputs, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clamp(min=0)
        return self.bn(torch.cat([self.conv_1(x), self.conv_2(x[:, :, 1:, 1:])], 1))


class Nothing(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[:, :, :: self.stride, :: self.stride])


def published(operation: str, channels: int, stride: int) -> nn.Module:
    def separable(kernel: int, stride: int, dilation: int) -> list[nn.Module]:
        padding = dilation * (kernel - 1) // 2
        depth = nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False)
        return [nn.ReLU(), depth, nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels, affine=False)]

    kind, kernel = operation.split("_")[0], int(operation[-1]) if operation[-1].isdigit() else 0
    if kind == "none":
        return Nothing(stride)
    if kind == "skip":
        return nn.Identity() if stride == 1 else Reduce(channels, channels)
    if kind in ("max", "avg"):
        pool = nn.MaxPool2d(3, stride, 1) if kind == "max" else nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        return nn.Sequential(pool, nn.BatchNorm2d(channels, affine=False))
    return Sequence(*separable(kernel, stride, 1), *separable(kernel, 1, 1)) if kind == "sep" else Sequence(*separable(kernel, stride, 2))


class Edge(nn.Module):
    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self._ops = nn.ModuleList(published(operation, channels, stride) for operation in OPERATIONS)

    def forward(self, x: Tensor, coefficients: Tensor) -> Tensor:
        return torch.stack([c * operation(x) for c, operation in zip(coefficients, self._ops, strict=True)]).sum(0)


class PublishedCell(nn.Module):
    def __init__(self, before: int, last: int, channels: int, reduces: bool, reduced: bool) -> None:
        super().__init__()

        def narrow(inputs: int) -> nn.Module:
            return Sequence(nn.ReLU(), nn.Conv2d(inputs, channels, 1, bias=False), nn.BatchNorm2d(channels, affine=False))

        self.preprocess0 = Reduce(before, channels) if reduced else narrow(before)
        self.preprocess1 = narrow(last)
        self._ops = nn.ModuleList(Edge(channels, 2 if reduces and source < 2 else 1) for source, _ in EDGES)

    def forward(self, before: Tensor, last: Tensor, coefficients: Tensor) -> Tensor:
        states = [self.preprocess0(before), self.preprocess1(last)]
        edge = 0
        for _ in range(4):
            incoming = range(edge, edge + len(states))
            states.append(torch.stack([self._ops[number](states[number - edge], coefficients[number]) for number in incoming]).sum(0))
            edge = incoming.stop
        return torch.cat(states[2:], 1)


class PublishedNetwork(nn.Module):
    """The search network; its state dict has the keys of the public implementation."""

    def __init__(self, channels: int, cells: int, images: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(images, 3 * channels, 3, padding=1, bias=False), nn.BatchNorm2d(3 * channels))
        before = last = 3 * channels
        self.kinds = [int(index in (cells // 3, 2 * cells // 3)) for index in range(cells)]
        self.cells = nn.ModuleList()
        for index, kind in enumerate(self.kinds):
            channels *= 1 + kind
            self.cells.append(PublishedCell(before, last, channels, bool(kind), index > 0 and bool(self.kinds[index - 1])))
            before, last = last, 4 * channels
        self.classifier = nn.Linear(last, classes)

    def forward(self, images: Tensor, coefficients: Tensor) -> Tensor:
        before = last = self.stem(images)
        for kind, cell in zip(self.kinds, self.cells, strict=True):
            before, last = last, cell(before, last, coefficients[kind])
        return self.classifier(last.mean((2, 3)))


def random_state(network: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = network.state_dict()
    for name, tensor in state.items():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / max(1, tensor[0].numel()) ** 0.5)
            if name.endswith("running_var"):
                tensor.abs_().add_(0.5)
    return {name: tensor.clone() for name, tensor in state.items()}
