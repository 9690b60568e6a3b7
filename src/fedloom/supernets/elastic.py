"""Layers whose weights, widths and statistics are arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.supernets import fused
from fedloom.supernets.normalisation import ACTIVATIONS, EPS, Statistics, plain_batch_norm, under_vmap

Extent = tuple[Tensor | None, Tensor | None]  # reach and active channels of a kernel, () each
GROUP = 8  # channels per group; divides every width of every space


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    name: str,
    statistics: Statistics | None,
    mask: Tensor | None = None,
    act: str = "none",
    residual: Tensor | None = None,
    gate: fused.Gate | None = None,
) -> Tensor:
    """Normalisation, then an activation, then the residual added. With a mask, (channels,) booleans, the other channels come out as
    zero before the residual, and leave no statistics. gate: weighs channels before the residual, where ``fused.gates``."""
    if not fused.runs(x):
        y = ACTIVATIONS[act](plain_batch_norm(x, weight, bias, name, statistics, mask))
        return y if residual is None else residual + y
    if statistics is None:
        return fused.norm_act(x, weight, bias, mask, act, residual)
    if statistics.rows:
        y, *moments = fused.norm_act_rows(x, weight, bias, statistics.rows, mask, act, residual, gate)
        statistics[name] = (moments[0], moments[1])
        return y
    mean, variance = statistics[name]
    scale = torch.rsqrt(variance + EPS)
    scale = scale if weight is None else scale * weight
    shift = (0.0 if bias is None else bias) - mean * scale
    if mask is not None:
        scale, shift = torch.where(mask, scale, 0.0), torch.where(mask, shift, 0.0)
    return fused.affine_act(x, scale, shift, act, residual, gate)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """Groups of fixed size, so a channel's group is the same at every width; the other channels come out as zero under a mask."""
    if mask is not None:
        weight, bias = weight * mask, bias * mask
    x = x.contiguous()  # the kernel asks for the layout, which vmap cannot answer for permuted tensors
    return F.group_norm(x, x.shape[1] // GROUP, weight, bias, eps=EPS)


# -- masks: what a gene decides, as arithmetic on tensors that never reaches Python ------------------------------------
def pick(values: Sequence[int], gene: Tensor) -> Tensor:
    """values[gene] for a gene that is a tensor: no constants to upload, nothing to read back."""
    return constant(tuple(values), gene.device).gather(0, gene.reshape(1)).reshape(())


# Constants are on a device once, and never freed: captured graphs read them.
@cache
def constant(values: tuple[Any, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


def zero(like: Tensor) -> Tensor:
    """() a constant, for ``torch.where``: of a number it would make a tensor at every call, which on a GPU is a launch."""
    return _number(0.0, like.dtype, like.device)


def one(like: Tensor) -> Tensor:
    """() a constant."""
    return _number(1.0, like.dtype, like.device)


@cache
def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


@cache
def counting(count: int, device: torch.device) -> Tensor:
    """0, 1, 2, …"""
    return torch.arange(count, device=device)


def picks(size: int, part: int, like: Tensor) -> Tensor:
    """(size², part²) the matrix that picks the middle of a flat kernel, and turned round puts it there."""
    return _picks(size, part, like.dtype, like.device)


@cache
def _picks(size: int, part: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    places = torch.arange(size**2).reshape(size, size)[centre(size, part), centre(size, part)].flatten()
    return (torch.arange(size**2)[:, None] == places).to(device, dtype)


def below(channels: int, width: Tensor) -> Tensor:
    """(channels,) True for the first ``width`` channels."""
    return counting(channels, width.device) < width


def only(x: Tensor, mask: Tensor) -> Tensor:
    """(n, channels, …) with zeros in all but the masked-in channels; also where they are not finite. In groups both have them first."""
    mask = mask.unsqueeze(-2)
    return torch.where(mask[(..., *[None] * (x.ndim - mask.ndim))], x, zero(x))


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A 1x1 convolution. A matrix product over the channels does it several times faster on small maps on a CPU, and on a GPU for
    several networks at once."""
    if x.is_cuda and not fused.runs(x):
        return F.conv2d(x, weight, bias)
    return product(x.movedim(-3, -1), weight.flatten(-3), bias).movedim(-1, -3)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer on the last axis. In groups x is (groups, …, inputs) and weight (groups, outputs, inputs), or shared."""
    if weight.ndim == 2:
        # As one matrix: under vmap a product of more axes would copy its weights for each of them.
        rows = x.flatten(0, -2)
        if not under_vmap():
            return F.linear(rows, weight, bias).unflatten(0, x.shape[:-1])
        y = _Product.apply(rows[None], weight[None], None if bias is None else bias[None]).squeeze(0)
        return y.unflatten(0, x.shape[:-1])
    rows = x.flatten(1, -2)
    y = rows @ weight.mT if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
    return y.unflatten(1, x.shape[1:-1])


def weight_gradient(gradient: Tensor, x: Tensor, shared: bool) -> Tensor:
    """(groups or 1, outputs, inputs) of a linear layer; shared: all groups have one weight. gradient: (groups, rows, outputs)."""
    dw = gradient.mT @ x
    return dw.sum(0, keepdim=True) if shared else dw


def bias_gradient(gradient: Tensor, shared: bool) -> Tensor:
    """(groups or 1, outputs). A product is faster than the library's sum."""
    db = (one(gradient).expand(len(gradient), 1, gradient.shape[1]) @ gradient).squeeze(1)
    return db.sum(0, keepdim=True) if shared else db


class _Product(torch.autograd.Function):
    """x @ weight.T + bias of several groups, in few launches. x: (groups, rows, inputs); weight: (groups or 1, outputs, inputs); bias:
    (groups or 1, outputs). Gradients are dense: torch's own of the weight is turned round, and packing it would copy it."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        turned = weight.mT.expand(len(x), -1, -1)
        return x @ turned if bias is None else torch.baddbmm(bias[:, None].expand(len(x), -1, -1), x, turned)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.shared = bias is not None and len(bias) < len(x)
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        dx = gradient @ weight.expand(len(x), -1, -1) if of_x else None
        dw = weight_gradient(gradient, x, len(weight) < len(x)) if of_weight else None
        db = bias_gradient(gradient, ctx.shared) if of_bias else None
        return dx, dw, db

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        return fused._unfolded(info.batch_size, _Product.apply(*fused._folded(info.batch_size, in_dims, *inputs))), 0


def convolved(
    x: Tensor, weight: Tensor, stride: int = 1, dilation: int = 1, reach: Tensor | None = None, active: Tensor | None = None
) -> Tensor:
    """A convolution that keeps the side unless it has a stride; weight: (outputs, inputs of a group, kernel, kernel).

    reach, active: of a masked depth-wise one, how far from the middle its taps go and how many channels matter, which saves work.

    On a GPU the layout decides who computes a depth-wise one in full precision. With channels last it is cuDNN, which builds a kernel for
    every new shape, a tenth of a second each, and every new architecture has new shapes. Otherwise it is torch's own kernel.
    """
    groups, kernel = x.shape[-3] // weight.shape[-3], weight.shape[-1]
    if kernel == 1 and groups == 1 and stride == 1:
        return pointwise(x, weight)
    if fused.runs(x) and groups == x.shape[-3] == weight.shape[-4] and kernel > 1:
        return fused.depthwise(x, weight, stride, dilation, reach, active)
    if fused.runs(x) and groups == 1 and dilation == 1:  # a matrix product: under vmap a convolution would become one in groups
        around = F.pad(x, [kernel // 2] * 4).unfold(-2, kernel, stride).unfold(-2, kernel, stride)  # (…, c, h, w, kernel, kernel)
        seen, taps = around.movedim(-5, -3).flatten(-3), weight.flatten(-3)
        gap = -seen.shape[-1] % 8  # GPUs multiply matrices faster whose rows are multiples of 16 bytes
        return product(F.pad(seen, (0, gap)), F.pad(taps, (0, gap))).movedim(-1, -3)
    x = x.contiguous() if x.is_cuda and groups > 1 else x
    return F.conv2d(x, weight, None, stride, dilation * (kernel // 2), dilation, groups)


def mean_pool(x: Tensor, kernel: int, stride: int, padding: int, counts_padding: bool) -> Tensor:
    """Means of kernel x kernel pixels. counts_padding: zeros around the map count among them. x: (n, c, h, w).

    On a GPU torch's gradient is wrong where channels lie last and there is padding (PyTorch issue 188344, in 2.11 and before). So zeros are
    put around the map there before it is pooled.
    """
    if not x.is_cuda or not padding:
        return F.avg_pool2d(x, kernel, stride, padding, count_include_pad=counts_padding)
    return mean_pool_of_padded(x, kernel, stride, padding, counts_padding)


def mean_pool_of_padded(x: Tensor, kernel: int, stride: int, padding: int, counts_padding: bool) -> Tensor:
    y = F.avg_pool2d(F.pad(x, [padding] * 4), kernel, stride)
    return y if counts_padding else y * _over_inside(*x.shape[-2:], kernel, stride, padding, x.dtype, x.device)


@cache
def _over_inside(h: int, w: int, kernel: int, stride: int, padding: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(pooled h, pooled w) the pixels of a kernel over those of them inside of the map."""
    ones = F.pad(torch.ones(1, 1, h, w, dtype=torch.float64), [padding] * 4)
    return (1 / F.avg_pool2d(ones, kernel, stride)[0, 0]).to(device, dtype)


def normed(
    x: Tensor,
    weights: Mapping[str, Tensor],
    name: str,
    statistics: Statistics | None,
    kernel: Tensor | None = None,
    stride: int = 1,
    mask: Tensor | None = None,
    norm: str = "batch",
    act: str = "none",
    residual: Tensor | None = None,
    extent: Extent = (None, None),
    gate: fused.Gate | None = None,
) -> Tensor:
    """A convolution, its normalisation and an activation, with the weights under ``name`` unless another kernel is given; then the
    residual is added. extent: what of a masked depth-wise kernel is not zero, its reach and its channels. gate: see ``batch_norm``."""
    kernel = weights[f"{name}.conv.weight"] if kernel is None else kernel
    x = convolved(x, kernel, stride, 1, *extent)
    scale, shift = weights[f"{name}.norm.weight"], weights[f"{name}.norm.bias"]
    if norm == "group":
        y = ACTIVATIONS[act](group_norm(x, scale, shift, mask))
        return y if residual is None else residual + y
    return batch_norm(x, scale, shift, f"{name}.norm", statistics, mask, act, residual, gate)


def biased(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """A 1x1 convolution with a bias and without normalisation."""
    return pointwise(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on the device, without waiting for what it computes."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def in_float64(numbers: Tensor) -> Tensor:
    """In float64; on the host where the device has no such numbers (``mps``)."""
    return (numbers if numbers.device.type in ("cpu", "cuda") else numbers.cpu()).double()


def centre(size: int, part: int) -> slice:
    """The middle ``part`` of ``size`` positions."""
    start = (size - part) // 2
    return slice(start, start + part)


def elastic_kernel(weight: Tensor, kernel: int, to_five: Tensor | None, to_three: Tensor | None) -> Tensor:
    """The active kernel of a 7x7 depth-wise weight (Once-for-all, section 3.3): centre, times a learned matrix, per step down.

    weight: (channels, 1, side, side), already cut to the entries the kernel needs; to_five: (rows, rows, 25); to_three: (9, 9). In
    groups each has an axis of groups before.
    """
    channels = weight.shape[:-3]
    if to_five is not None:
        # rows = 5 for a 5x5 kernel; for a 3x3 kernel only the 3x3 inner rows of the matrix are used, 9 of 25 outputs.
        rows = to_five.shape[-2]
        weight = (weight.reshape(*channels, 25) @ to_five.flatten(-3, -2).mT).reshape(*channels, 1, rows, rows)
    if to_three is not None:
        weight = (weight.reshape(*channels, 9) @ to_three.mT).reshape(*channels, 1, 3, 3)
    assert weight.shape[-1] == kernel
    return weight


def masked_kernel(weight: Tensor, gene: Tensor, to_five: Tensor, to_three: Tensor) -> Tensor:
    """``elastic_kernel`` for a gene (0, 1, 2: side 3, 5, 7), always seven wide: smaller kernels have zeros around them.

    weight: (channels, 1, 7, 7); to_five: (5, 5, 25); to_three: (9, 9). In groups gene is (groups,), and each has an axis of groups
    before unless all share it.
    """
    gene = gene.reshape(*gene.shape, 1, 1, 1, 1) if gene.ndim else gene
    middle = weight[..., centre(7, 5), centre(7, 5)]
    inner = to_five[..., centre(5, 3), centre(5, 3), :]
    five = F.pad(elastic_kernel(middle, 5, to_five, None), (1, 1, 1, 1))
    three = F.pad(elastic_kernel(middle, 3, inner, to_three), (2, 2, 2, 2))
    return torch.where(gene == 0, three, torch.where(gene == 1, five, weight))
