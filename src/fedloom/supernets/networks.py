"""How the named networks compute. Widths of one network share their first channels; every network has its own weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.spaces.networks import (
    HEADS,
    NETWORKS,
    AttentionBlock,
    BasicBlock,
    LastNorm,
    Layer,
    Linear,
    MobileBlock,
    Networks,
    NetworksSettings,
    Patches,
    Piece,
)
from fedloom.supernets.base import SUPERNETS, Region, Supernet, Weights, resized
from fedloom.supernets.elastic import normed, product
from fedloom.supernets.inverted import run_branch
from fedloom.supernets.normalisation import EPS, Statistics

Shapes = Iterator[tuple[str, tuple[int, ...]]]


@SUPERNETS.add("networks", NetworksSettings, "every network its own weights, widths nested")
class NetworksSupernet(Supernet[Networks]):
    pathwise = True

    def __init__(self, space: Networks) -> None:
        super().__init__(space)
        self.regions = lru_cache(maxsize=64)(self.regions)  # type: ignore[method-assign]  # asked for at every training step

    def initial(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        whole = (self.space.named[name] for name in NETWORKS)
        shapes = (shape for architecture in whole for piece in self.space.pieces(architecture) for shape in _shapes(piece))
        return {name: _initial(name, shape, generator) for name, shape in shapes}

    def regions(self, architecture: Architecture) -> Mapping[str, Region]:
        """The first entries of every axis that has a width."""
        narrow, whole = (self._shapes_of(self.space.canonical((architecture.choices[0], width))) for width in (0, -1))
        own = self._shapes_of(architecture)
        return {
            name: tuple(
                slice(0, size) if least < most else slice(None) for size, least, most in zip(shape, narrow[name], whole[name], strict=True)
            )
            for name, shape in own.items()
        }

    def _shapes_of(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        return {name: shape for piece in self.space.pieces(architecture) for name, shape in _shapes(piece)}

    def forward(self, images: Tensor, weights: Weights, architecture: Architecture, statistics: Statistics | None = None) -> Tensor:
        x = resized(images, self.space.settings.input_size)
        for piece in self.space.pieces(architecture):
            x = _run(piece, x, weights, statistics)
        return x


# -- weights -----------------------------------------------------------------------
def _shapes(piece: Piece) -> Shapes:
    """The parameters of a piece."""
    name = piece.name
    match piece:
        case Layer():
            yield from _normed(name, piece.outputs, piece.inputs, piece.kernel)
        case BasicBlock():
            for layer in piece.layers:
                yield from _shapes(layer)
        case MobileBlock():
            if piece.expands:
                yield from _normed(f"{name}.expand", piece.middle, piece.inputs, 1)
            yield from _normed(f"{name}.depth", piece.middle, 1, piece.kernel)
            if piece.squeeze:
                for part, outputs, inputs in (("reduce", piece.squeeze, piece.middle), ("restore", piece.middle, piece.squeeze)):
                    yield f"{name}.squeeze.{part}.weight", (outputs, inputs, 1, 1)
                    yield f"{name}.squeeze.{part}.bias", (outputs,)
            yield from _normed(f"{name}.project", piece.outputs, piece.middle, 1)
        case Linear():
            yield f"{name}.weight", (piece.outputs, piece.inputs)
            if piece.bias:
                yield f"{name}.bias", (piece.outputs,)
        case Patches():
            yield f"{name}.weight", (piece.outputs, piece.inputs, piece.patch, piece.patch)
            yield f"{name}.bias", (piece.outputs,)
            yield f"{name}.token", (piece.outputs,)
            yield f"{name}.positions", (piece.tokens, piece.outputs)
        case AttentionBlock():
            for norm in ("before", "between"):
                yield from ((f"{name}.{norm}.{part}", (piece.width,)) for part in ("weight", "bias"))
            for linear in piece.linears:
                yield from _shapes(linear)
        case LastNorm():
            yield from ((f"{name}.{part}", (piece.width,)) for part in ("weight", "bias"))


def _normed(name: str, outputs: int, inputs: int, kernel: int) -> Shapes:
    yield f"{name}.conv.weight", (outputs, inputs, kernel, kernel)
    yield f"{name}.norm.weight", (outputs,)
    yield f"{name}.norm.bias", (outputs,)


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Convolutions as He et al. (2015) by what goes out, other layers with the variance that PyTorch gives them; norms do nothing yet."""
    if name.endswith((".token", ".positions")):
        return torch.randn(shape, generator=generator) * 0.02
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith(".weight") else torch.zeros(shape)
    outputs, inputs, *kernel = shape
    if name.endswith("conv.weight"):
        fan, gain = math.prod(kernel) * (outputs if inputs > 1 else 1), 2.0  # a depth-wise one goes out once
    else:
        fan, gain = inputs * math.prod(kernel), 1 / 3
    return torch.randn(shape, generator=generator) * math.sqrt(gain / fan)


# -- computation ---------------------------------------------------------------------
def _run(piece: Piece, x: Tensor, weights: Weights, statistics: Statistics | None) -> Tensor:
    """x: (n, channels, side, side), then (n, tokens, width) in the transformer, and (n, features) at the end."""
    match piece:
        case Layer():
            return normed(x, weights, piece.name, statistics, stride=piece.stride, act=piece.activation)
        case BasicBlock():
            return _basic(piece, x, weights, statistics)
        case MobileBlock():
            kernel, residual = weights[f"{piece.name}.depth.conv.weight"], x if piece.shortcut else None
            return run_branch(x, weights, piece, kernel, statistics, piece.activation, residual=residual)
        case Linear():
            x = x.mean((2, 3)) if x.ndim == 4 else x
            y = F.linear(x, weights[f"{piece.name}.weight"], weights[f"{piece.name}.bias"])
            return y if piece.name.startswith("classifier.") else F.hardswish(y)
        case Patches():
            patches = F.conv2d(x, weights[f"{piece.name}.weight"], weights[f"{piece.name}.bias"], piece.patch).flatten(2).mT
            token = weights[f"{piece.name}.token"].expand(x.shape[0], 1, -1)  # len() would fix the batch in an export
            return torch.cat([token, patches], 1) + weights[f"{piece.name}.positions"]
        case AttentionBlock():
            return _attention_block(piece, x, weights)
        case LastNorm():
            return _layer_norm(x[:, 0], weights, piece.name)


def _basic(block: BasicBlock, x: Tensor, weights: Weights, statistics: Statistics | None) -> Tensor:
    first, second, *across = block.layers
    y = _run(first, x, weights, statistics)
    x = _run(across[0], x, weights, statistics) if across else x
    return F.relu(normed(y, weights, second.name, statistics, residual=x))


def _attention_block(block: AttentionBlock, x: Tensor, weights: Weights) -> Tensor:
    parts, project, hidden, output = (linear.name for linear in block.linears)
    seen = product(_layer_norm(x, weights, f"{block.name}.before"), weights[f"{parts}.weight"])
    query, key, value = seen.unflatten(-1, (3, HEADS, -1)).movedim(1, 3).unbind(1)  # (n, heads, tokens, width of a head)
    attended = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value
    x = x + _linear(attended.transpose(1, 2).flatten(2), weights, project)
    inside = F.gelu(_linear(_layer_norm(x, weights, f"{block.name}.between"), weights, hidden))
    return x + _linear(inside, weights, output)


def _linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return product(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _layer_norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], EPS)
