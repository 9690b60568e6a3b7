"""Layers whose weights, widths and statistics are arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _are_functorch_transforms_active as under_vmap

EPS = 1e-5
GROUP = 8  # channels per group; divides every width of every space
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


def batch_norm(
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
    if x.is_cuda or x.numel() <= SHORT * x.shape[1]:
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
    if x.is_cuda and mask is None:  # two launches instead of five
        mean, inverse = torch.batch_norm_stats(x, 0.0)
        return mean, inverse.pow(-2)
    if mask is not None or under_vmap():
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


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """Groups of fixed size, so a channel's group is the same at every width; the other channels come out as zero under a mask."""
    if mask is not None:
        weight, bias = weight * mask, bias * mask
    x = x.contiguous()  # the kernel asks for the layout, which vmap cannot answer for permuted tensors
    return F.group_norm(x, x.shape[1] // GROUP, weight, bias, eps=EPS)


# -- masks: what a gene decides, as arithmetic on tensors that never reaches Python ------------------------------------
def pick(values: Sequence[int], gene: Tensor) -> Tensor:
    """values[gene] for a gene that is a tensor: no constants to upload, nothing to read back."""
    chosen = torch.zeros_like(gene)
    for index, value in enumerate(values):
        chosen = chosen + value * (gene == index)
    return chosen


def below(channels: int, width: Tensor) -> Tensor:
    """(channels,) True for the first ``width`` channels."""
    return torch.arange(channels, device=width.device) < width


def only(x: Tensor, mask: Tensor) -> Tensor:
    """(n, channels, …) with zeros in all but the masked-in channels; also where they are not finite."""
    return torch.where(mask.reshape(1, -1, *[1] * (x.ndim - 2)), x, 0.0)


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A 1x1 convolution. On a CPU a matrix product over the channels does it several times faster on small maps."""
    if x.is_cuda:
        return F.conv2d(x, weight, bias)
    return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)


def convolved(x: Tensor, weight: Tensor, stride: int = 1, dilation: int = 1) -> Tensor:
    """A convolution that keeps the side unless it has a stride; weight: (outputs, inputs of a group, kernel, kernel).

    On a GPU the layout decides who computes a depth-wise one. With channels last it is cuDNN, which builds a kernel for every new shape,
    a tenth of a second each, and every new architecture has new shapes. Otherwise it is torch's own kernel, one for all shapes.
    """
    groups, kernel = x.shape[1] // weight.shape[1], weight.shape[-1]
    if kernel == 1 and groups == 1 and stride == 1:
        return pointwise(x, weight)
    x = x.contiguous() if x.is_cuda and groups > 1 else x
    return F.conv2d(x, weight, None, stride, dilation * (kernel // 2), dilation, groups)


def normed(
    x: Tensor,
    weights: Mapping[str, Tensor],
    name: str,
    statistics: Statistics | None,
    kernel: Tensor | None = None,
    stride: int = 1,
    mask: Tensor | None = None,
    norm: str = "batch",
) -> Tensor:
    """A convolution and its normalisation, with the weights under ``name`` unless another kernel is given."""
    kernel = weights[f"{name}.conv.weight"] if kernel is None else kernel
    x = convolved(x, kernel, stride)
    scale, shift = weights[f"{name}.norm.weight"], weights[f"{name}.norm.bias"]
    if norm == "group":
        return group_norm(x, scale, shift, mask)
    return batch_norm(x, scale, shift, f"{name}.norm", statistics, mask)


def biased(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """A 1x1 convolution with a bias and without normalisation."""
    return pointwise(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def squeezed(x: Tensor, weights: Mapping[str, Tensor], name: str, hidden: Tensor | None = None) -> Tensor:
    """Squeeze-excite: channels weighed by what the whole map shows; under a mask, of hidden units."""
    inside = F.relu(biased(x.mean((2, 3), keepdim=True), weights, f"{name}.reduce"))
    inside = inside if hidden is None else only(inside, hidden)
    return x * F.hardsigmoid(biased(inside, weights, f"{name}.restore"))


def centre(size: int, part: int) -> slice:
    """The middle ``part`` of ``size`` positions."""
    start = (size - part) // 2
    return slice(start, start + part)


def elastic_kernel(weight: Tensor, kernel: int, to_five: Tensor | None, to_three: Tensor | None) -> Tensor:
    """The active kernel of a 7x7 depth-wise weight (Once-for-all, section 3.3): centre, times a learned matrix, per step down.

    weight: (channels, 1, side, side), already cut to the entries the kernel needs; to_five: (rows, rows, 25); to_three: (9, 9).
    """
    channels = weight.shape[0]
    if to_five is not None:
        # rows = 5 for a 5x5 kernel; for a 3x3 kernel only the 3x3 inner rows of the matrix are used, 9 of 25 outputs.
        rows = to_five.shape[0]
        weight = (weight.reshape(channels, 25) @ to_five.reshape(rows * rows, 25).T).reshape(channels, 1, rows, rows)
    if to_three is not None:
        weight = (weight.reshape(channels, 9) @ to_three.T).reshape(channels, 1, 3, 3)
    assert weight.shape[-1] == kernel
    return weight


def masked_kernel(weight: Tensor, gene: Tensor, to_five: Tensor, to_three: Tensor) -> Tensor:
    """``elastic_kernel`` for a gene (0, 1, 2: side 3, 5, 7), always seven wide: smaller kernels have zeros around them.

    weight: (channels, 1, 7, 7); to_five: (5, 5, 25); to_three: (9, 9).
    """
    middle = weight[:, :, centre(7, 5), centre(7, 5)]
    inner = to_five[centre(5, 3), centre(5, 3)]
    five = F.pad(elastic_kernel(middle, 5, to_five, None), (1, 1, 1, 1))
    three = F.pad(elastic_kernel(middle, 3, inner, to_three), (2, 2, 2, 2))
    return torch.where(gene == 0, three, torch.where(gene == 1, five, weight))
