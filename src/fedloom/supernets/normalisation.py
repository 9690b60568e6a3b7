"""Batch normalisation by torch's own operations, with moments that are exact on a CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _are_functorch_transforms_active as under_vmap

EPS = 1e-5
ACTIVATIONS = {"none": lambda x: x, "relu": F.relu, "hardswish": F.hardswish, "silu": F.silu}  # all keep 0 at 0
SHORT = 256  # pixels whose sum in single precision, one by one, is off by a few roundings only
FEW = 2**16  # numbers that are summed in double precision faster than in blocks


class Statistics(dict[str, tuple[Tensor, Tensor]]):
    """Means and variances of every batch normalisation of one architecture, by layer name.

    With ``rows`` > 0 a forward pass measures them on its first ``rows`` images and normalises all images with them: a subnet is
    calibrated and scored in one pass.
    """

    def __init__(self, known: Mapping[str, tuple[Tensor, Tensor]] | None = None, rows: int = 0) -> None:
        super().__init__(known or {})
        self.rows = rows


def plain_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, name: str, statistics: Statistics | None, mask: Tensor | None = None
) -> Tensor:
    """With a mask, (channels,) booleans, the other channels come out as zero and leave no statistics.

    The mask multiplies scale and shift, not the output: no further pass over the activations.
    """
    if mask is not None:
        weight = mask.to(x.dtype) if weight is None else weight * mask
        bias = bias if bias is None else bias * mask
    if statistics is None:
        return _by_own_moments(x, weight, bias)
    if statistics.rows:
        statistics[name] = _moments(x[: statistics.rows], mask)
    mean, variance = statistics[name]
    if mask is None:
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=EPS)
    # Under vmap the library's kernel is several times slower on small maps than one multiplication and addition.
    assert weight is not None
    scale = torch.rsqrt(variance + EPS) * weight
    shift = (0.0 if bias is None else bias) - mean * scale
    return torch.addcmul(shift[:, None, None], x, scale[:, None, None])


def _by_own_moments(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """As in training. On a CPU long sums are exact (see ``_moments``); for short ones that would cost a sixth of a small network's step."""
    if not x.is_cpu or x.numel() <= SHORT * x.shape[1]:
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    if x.numel() < FEW or under_vmap():
        weight, bias = (None if part is None else part.double() for part in (weight, bias))
        return F.batch_norm(x.double(), None, None, weight, bias, training=True, eps=EPS).to(x.dtype)
    return _BatchNorm.apply(x, weight, bias)


def _moments(x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel; masked channels have mean 0 and variance 1.

    On a CPU they are as exact as sums in double precision. The library's are not where channels lie last: it adds pixel after pixel in
    single precision. So many pixels are added in blocks, each short, and few in double precision.
    """
    if x.is_cuda and mask is None and not under_vmap():  # two launches instead of five
        mean, inverse = torch.batch_norm_stats(x, 0.0)
        return mean, inverse.pow(-2)
    if mask is not None or under_vmap() or not x.is_cpu:
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        return (mean, variance) if mask is None else (torch.where(mask, mean, 0.0), torch.where(mask, variance, 1.0))
    x, channels = x.detach(), x.shape[1]
    blocks = 1 if x.numel() < FEW else _blocks(x.numel() // channels)
    if blocks == 1:
        mean, variance = torch.batch_norm_update_stats(x.double(), None, None, 0.0)
    else:
        found = torch.batch_norm_update_stats(x.permute(0, 2, 3, 1).reshape(-1, blocks * channels), None, None, 0.0)
        means, variances = (moment.double().view(blocks, channels) for moment in found)
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
    return mean.to(x.dtype), variance.to(x.dtype)


@cache
def _blocks(pixels: int) -> int:
    """Into how many blocks of equal length to split a sum: about the square root; 1 where no such number divides it."""
    root = math.isqrt(pixels)
    return next((count for count in range(root, root // 2, -1) if pixels % count == 0), 1)


class _BatchNorm(torch.autograd.Function):
    """Batch normalisation in training by ``_moments``; the gradient is the library's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        mean, variance = _moments(x)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + EPS))
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=EPS)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        return torch.ops.aten.native_batch_norm_backward(gradient, x, weight, None, None, mean, inverse, True, EPS, ctx.needs_input_grad)
