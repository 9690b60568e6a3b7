"""One operation of a DARTS network, and the same operation on several edges that read one state."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.spaces.darts import Part
from fedloom.spaces.genotype import EDGES, INPUTS, NODES
from fedloom.supernets import fused
from fedloom.supernets.base import Weights
from fedloom.supernets.elastic import batch_norm, convolved, mean_pool, pointwise
from fedloom.supernets.normalisation import Statistics

SMALL = 2**15  # numbers in a state up to which a few grouped kernels take less time (on a CPU down to half) than many single ones
LEAVING = tuple(tuple(number for number, (source, _) in enumerate(EDGES) if source == state) for state in range(INPUTS + NODES))


def run_part(
    part: Part,
    x: Tensor,
    weights: Weights,
    statistics: Statistics | None,
    present: Tensor | None = None,
    reach: Tensor | None = None,
    rectified: bool = False,
) -> Tensor:
    """One operation. When ``present``, a boolean, is false it leaves no statistics, and what it returns means nothing.

    reach: () how far from the middle taps of its depth-wise kernels may differ from zero, which saves work. In groups, without
    gradients, x is (groups, n, …), and weights and reach have them first. rectified: x is already what its first rectifier gives.
    """
    for layer, following in zip(part.layers, (*part.layers[1:], None), strict=False):
        name = f"{part.name}.{layer.name}"
        if layer.kind == "rectify":
            x = x if rectified else F.relu(x)
        elif layer.kind == "convolve":
            x = convolved(x, weights[f"{name}.weight"], layer.stride, layer.dilation, reach)
        elif layer.kind == "halve":
            even, odd = halves(x)
            x = torch.cat([pointwise(even, weights[f"{name}.even.weight"]), pointwise(odd, weights[f"{name}.odd.weight"])], -3)
        elif layer.kind in ("max_pool", "average_pool"):
            x = pooled(x, layer.kind == "max_pool", layer.stride)
        else:
            mask = None if present is None else present.expand(layer.outputs)
            rectified = following is not None and following.kind == "rectify"  # in one pass where that is possible
            act = "relu" if rectified else "none"
            x = batch_norm(x, weights.get(f"{name}.weight"), weights.get(f"{name}.bias"), name, statistics, mask, act)
    return x


def run_parts(parts: Sequence[Part], x: Tensor, weights: Weights) -> Sequence[Tensor]:
    """One operation on several edges that leave one state, normalised by the moments of ``x`` as in training.

    What has no weights is the same on all edges and runs once. Elsewhere, on small maps, channels of all edges lie side by side as groups.
    """
    if parts and not parts[0].shapes:
        return [run_part(parts[0], x, weights, None)] * len(parts)
    if len(parts) < 2 or x.numel() > SMALL:
        return [run_part(part, x, weights, None) for part in parts]
    many, apart = len(parts), False  # apart: x has channels of its own for every edge

    def side_by_side(name: str) -> Tensor:
        return torch.cat([weights[f"{part.name}.{name}.weight"] for part in parts])

    for layer in parts[0].layers:
        if layer.kind == "rectify":
            x = F.relu(x)
        elif layer.kind == "halve":  # the first convolution of its operation: all edges read the same
            even, odd = halves(x)
            both = pointwise(even, side_by_side(f"{layer.name}.even")), pointwise(odd, side_by_side(f"{layer.name}.odd"))
            x, apart = torch.cat([half.unflatten(1, (many, -1)) for half in both], 2).flatten(1, 2), True
        elif layer.kind == "convolve":
            x, apart = x if apart else x.repeat(1, many, 1, 1), True
            if layer.kernel == 1:  # a product with zeros off the diagonal takes half the time of a grouped convolution
                x = pointwise(x, torch.block_diag(*side_by_side(layer.name).flatten(1).chunk(many))[..., None, None])
            else:
                x = convolved(x, side_by_side(layer.name), layer.stride, layer.dilation)
        else:
            x = batch_norm(x, None, None, layer.name, None)
    return x.chunk(many, 1)


def pooled(x: Tensor, maximum: bool, stride: int) -> Tensor:
    """The maximum or the mean of 3x3 pixels; what lies outside of the map does not count."""
    if x.ndim == 5 and fused.can_run(x):  # torch's kernels are slow where channels lie last
        made: Tensor = _kernels().pooled(x.movedim(2, -1).contiguous(), maximum, stride)
        return made.movedim(-1, 2)
    flat = x.flatten(0, -4)
    y = F.max_pool2d(flat, 3, stride, 1) if maximum else mean_pool(flat, 3, stride, 1, counts_padding=False)
    return y.unflatten(0, x.shape[:-3])


def add_rows(rows: Tensor, terms: Tensor, starts: Tensor, first: int) -> None:
    """Writes a row for each of ``starts``, from row ``first`` on: the sum of those in its part of ``terms``, in float32 whatever the
    precision. rows: (rows, …), dense; each part goes to the next start and may be empty."""
    if fused.can_run(rows):
        _kernels().sums(rows, terms, starts, first)
        return
    target = rows[first : first + len(starts)].flatten(1)
    target.copy_(F.embedding_bag(terms, rows.flatten(1), starts, mode="sum") if len(terms) else torch.zeros_like(target))


def pick_rows(rows: Tensor, index: Tensor, beside: int = 1, rectify: bool = False) -> Tensor:
    """(picked, n, h, w, c * beside): rows by an index of picked * beside, so many at a time side by side in channels; rectified if asked
    for. rows: (rows, n, h, w, c), dense."""
    if fused.can_run(rows):
        made: Tensor = _kernels().picked(rows, index, beside, rectify)
        return made
    x = rows[index] if beside == 1 else rows[index.unflatten(0, (-1, beside))].movedim(1, -2).flatten(-2)
    return F.relu(x) if rectify else x


def _kernels() -> Any:
    return import_module("fedloom.supernets.kernels.cells")


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Every second pixel, from the first and from the second on; at an odd side the latter lack a row and a column, filled with zeros."""
    lacking = x.shape[-1] % 2
    return x[..., ::2, ::2], F.pad(x[..., 1::2, 1::2], (0, lacking, 0, lacking))
