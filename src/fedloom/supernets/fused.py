"""Depth-wise convolution, and normalisation with its activation, as single passes over maps whose channels lie last.

On a GPU Triton kernels (``kernels/``) compute them; elsewhere, and in float64, torch's own operations do (``plain_…``). Both give the
same up to rounding and work under ``torch.vmap``, where one launch serves all groups; gradients are taken outside of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch as functorch

from fedloom.supernets.normalisation import ACTIVATIONS, EPS, Statistics, plain_batch_norm, under_vmap

Gate = Callable[[Tensor], Tensor]  # by how much channels are weighed, of their means: (groups, n, c, 1, 1) both
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = False  # tests: run the kernels on a CPU; needs TRITON_INTERPRET=1 before Triton is imported


@cache
def available() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def runs(x: Tensor) -> bool:
    """Whether layers leave this to the kernels: in half precision, and several networks at once. One network in full precision is the
    reference, by torch's own operations. Several are x: (groups, n, c, h, w), without gradients, or vmap."""
    return x.ndim == 5 or (can_run(x) and (x.dtype != torch.float32 or under_vmap()))


def can_run(x: Tensor) -> bool:
    """Whether the kernels can compute this."""
    here = x.is_cuda or (INTERPRETED and os.environ.get("TRITON_INTERPRET") == "1")
    return here and x.dtype in PRECISIONS and available()


def gates(x: Tensor) -> bool:
    """Whether what normalises this map can weigh its channels in the same pass: several networks at once, without gradients."""
    return x.ndim == 5 and can_run(x)


def _kernels() -> Any:
    return import_module("fedloom.supernets.kernels")


# -- the operations -----------------------------------------------------------------------------------------------------
def depthwise(
    x: Tensor, weight: Tensor, stride: int = 1, dilation: int = 1, reach: Tensor | None = None, active: Tensor | None = None
) -> Tensor:
    """A depth-wise convolution that keeps the side unless it has a stride. x: (n, c, h, w); weight: (c, 1, k, k), k = 3, 5 or 7.

    reach: () how far from the middle taps may differ from zero, along either axis; those beyond count as zero and get no gradient.
    active: () how many channels matter; the others come out as zero and get no gradient.
    """
    if not can_run(x):
        return _plain(
            lambda x, weight, *marks: plain_depthwise(x, weight, stride, dilation, *marks), (x, weight, reach, active), (4, 4, 0, 0)
        )
    if not torch.is_grad_enabled():
        (x, weight, reach, active), level = _in_groups((x, weight, reach, active), (4, 4, 0, 0))
        return _in_vmap(_image(_Depthwise.forward(_pixels(x), weight, reach, active, stride, dilation)), level)
    parts = [None if part is None else part.reshape(1) for part in (reach, active)]
    return _Depthwise.apply(_last(x)[None], weight[None], *parts, stride, dilation).squeeze(0).permute(0, 3, 1, 2)


def norm_act(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None = None, act: str = "none", residual: Tensor | None = None
) -> Tensor:
    """Batch normalisation by the batch's own moments, then act, then the residual added. x: (n, c, h, w); weight, bias: (c,).

    mask: (c,) booleans; the other channels come out as act(0) = 0, before the residual, and get no gradient.
    """
    if not can_run(x):
        return plain_norm_act(x, weight, bias, mask, act, residual)
    return _NormAct.apply(*_grouped(x, weight, bias, mask, residual), act)[0].squeeze(0).permute(0, 3, 1, 2)


def norm_act_rows(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: int,
    mask: Tensor | None = None,
    act: str = "none",
    residual: Tensor | None = None,
    gate: Gate | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the moments of the first ``rows`` images, which come second and third: mean and biased variance, (c,) float32.

    Without gradients on a GPU. Masked channels have mean 0 and variance 1. gate: weighs channels before the residual, where ``gates``.
    """
    if not can_run(x):
        given = (x, weight, bias, mask, residual)
        return _plain(
            lambda x, weight, bias, mask, rest: plain_norm_act_rows(x, weight, bias, rows, mask, act, rest), given, (4, 1, 1, 1, 4)
        )
    (x, weight, bias, mask, residual), level = _in_groups((x, weight, bias, mask, residual), (4, 1, 1, 1, 4))
    y, found = _forward(_pixels(x), weight, bias, mask, None if residual is None else _pixels(residual), act, rows, gate)
    return _in_vmap(_image(y), level), _in_vmap(found[:, 0], level), _in_vmap(found[:, 1], level)


def affine_act(
    x: Tensor, scale: Tensor, shift: Tensor, act: str = "none", residual: Tensor | None = None, gate: Gate | None = None
) -> Tensor:
    """act(x * scale + shift) + residual, by channel; for known moments. Without gradients on a GPU. gate: as in ``norm_act_rows``."""
    if not can_run(x):
        return _plain(lambda x, scale, shift, rest: plain_affine_act(x, scale, shift, act, rest), (x, scale, shift, residual), (4, 1, 1, 4))
    (x, scale, shift, residual), level = _in_groups((x, scale, shift, residual), (4, 1, 1, 4))
    residual = None if residual is None else _dense(_pixels(residual))
    y = _applied(_dense(_pixels(x)), None, scale.contiguous(), shift.contiguous(), None, residual, act, gate)
    return _in_vmap(_image(y), level)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * gate: channels weighed by image. x: (n, c, h, w), gate: (n, c, 1, 1). Without gradients on a GPU."""
    if not (runs(x) and can_run(x)):
        return x * gate
    (x, gate), level = _in_groups((x, gate), (4, 4))
    return _in_vmap(_image(_kernels().weighed(_pixels(x).contiguous(), gate.flatten(2).contiguous())), level)


# -- the same by torch --------------------------------------------------------------------------------------------------
def plain_depthwise(
    x: Tensor, weight: Tensor, stride: int = 1, dilation: int = 1, reach: Tensor | None = None, active: Tensor | None = None
) -> Tensor:
    channels, kernel = weight.shape[0], weight.shape[-1]
    if reach is not None:
        near = (torch.arange(kernel, device=x.device) - kernel // 2).abs() <= reach
        weight = torch.where(near & near[:, None], weight, 0.0)
    y = F.conv2d(x, weight.to(x.dtype), None, stride, dilation * (kernel // 2), dilation, channels)
    if active is not None:
        y = torch.where((torch.arange(channels, device=x.device) < active)[:, None, None], y, 0.0)
    return y


def plain_norm_act(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None = None, act: str = "none", residual: Tensor | None = None
) -> Tensor:
    y = plain_batch_norm(_single(x), weight, bias, "", None, mask)
    return _added(ACTIVATIONS[act](y).to(x.dtype), residual)


def plain_norm_act_rows(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: int,
    mask: Tensor | None = None,
    act: str = "none",
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = Statistics(rows=rows)
    y = plain_batch_norm(_single(x), weight, bias, "norm", statistics, mask)
    return _added(ACTIVATIONS[act](y).to(x.dtype), residual), *statistics["norm"]


def plain_affine_act(x: Tensor, scale: Tensor, shift: Tensor, act: str = "none", residual: Tensor | None = None) -> Tensor:
    y = torch.addcmul(shift[:, None, None], _single(x), scale[:, None, None])
    return _added(ACTIVATIONS[act](y).to(x.dtype), residual)


def _plain(function: Callable[..., Any], tensors: Sequence[Tensor | None], axes: Sequence[int]) -> Any:
    """A function of single networks; of several where the first tensor has groups. axes: how many each has without them."""
    first = tensors[0]
    assert first is not None
    if first.ndim == axes[0]:
        return function(*tensors)
    there = [index for index, tensor in enumerate(tensors) if tensor is not None]

    def one(*own: Tensor) -> Any:
        return function(*(dict(zip(there, own, strict=True)).get(index) for index in range(len(tensors))))

    given = [(tensor, 0 if tensor.ndim > count else None) for tensor, count in zip(tensors, axes, strict=True) if tensor is not None]
    return torch.vmap(one, in_dims=tuple(dim for _, dim in given))(*(tensor for tensor, _ in given))


def _single(x: Tensor) -> Tensor:
    """Half precision made single."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _added(y: Tensor, residual: Tensor | None) -> Tensor:
    return y if residual is None else y + residual


# -- groups -------------------------------------------------------------------------------------------------------------
# The functions below take tensors with a leading axis of groups; vmap adds its axis to it. Where a tensor has one group and x has
# several, all share it.


def _last(x: Tensor) -> Tensor:
    """(n, h, w, c) of (n, c, h, w), dense unless vmap, which settles that for all groups together."""
    x = x.permute(0, 2, 3, 1)
    return x if under_vmap() else x.contiguous()


def _grouped(x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, residual: Tensor | None) -> tuple[Any, ...]:
    vectors = (None if part is None else part[None] for part in (weight, bias, mask))
    return _last(x)[None], *vectors, None if residual is None else _last(residual)[None]


def _dense(x: Tensor) -> Tensor:
    """(groups, n, h, w, c) of which each group is dense; several groups may be one."""
    channels = x.shape[-1]
    return x if x[0].is_contiguous() and x.stride(0) % channels == 0 else x.contiguous()


def _folded(size: int, dims: Any, *tensors: Tensor | None) -> list[Any]:
    """Tensors with vmap's axis of this size folded into their groups. The first gets all of them; others stay shared where they are."""
    inner = max(tensor.shape[0] if dim is None else tensor.movedim(dim, 0).shape[1] for tensor, dim in _present(tensors, dims))
    folded: list[Any] = []
    for number, (tensor, dim) in enumerate(zip(tensors, dims, strict=False)):
        if tensor is None or (number and dim is None and tensor.shape[0] == 1):
            folded.append(tensor)
            continue
        tensor = tensor[None] if dim is None else tensor.movedim(dim, 0)
        folded.append(tensor.expand(size, inner, *tensor.shape[2:]).flatten(0, 1))
    return folded


def _present(tensors: Any, dims: Any) -> Any:
    return [(tensor, dim) for tensor, dim in zip(tensors, dims, strict=False) if tensor is not None]


def _unfolded(size: int, y: Tensor) -> Tensor:
    return y.unflatten(0, (size, -1))


def _shared(gradient: Tensor, like: Tensor | None) -> Tensor | None:
    """(groups, c) as the vectors ``like`` need it."""
    if like is None:
        return None
    return (gradient.sum(0, keepdim=True) if len(like) == 1 else gradient).to(like.dtype)


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


# -- without gradients: past vmap, whose rules for functions of one's own take longer than most kernels ---------------------
PLAIN = -1  # in place of vmap's level: tensors come with their axis of groups


def _in_groups(tensors: Sequence[Tensor | None], axes: Sequence[int]) -> tuple[list[Any], int | None]:
    """Tensors with a leading axis of groups, of length one where they are shared, and the level of vmap, if that has the groups. The
    first tensor has them all. axes: how many each has without groups."""
    found: list[Any] = []
    level = PLAIN if tensors[0] is not None and tensors[0].ndim > axes[0] else None
    for tensor, count in zip(tensors, axes, strict=True):
        if tensor is None:
            found.append(None)
        elif functorch.is_batchedtensor(tensor):
            found.append(functorch.get_unwrapped(tensor).movedim(functorch.maybe_get_bdim(tensor), 0))
            level = functorch.maybe_get_level(tensor)
        else:
            found.append(tensor if tensor.ndim > count else tensor[None])
    if any(part is not None and functorch.is_batchedtensor(part) for part in found):
        raise NotImplementedError("fused operations without gradients run under one vmap, not under several")
    groups = max(len(part) for part in found if part is not None)
    if len(found[0]) < groups:
        found[0] = found[0].expand(groups, *found[0].shape[1:])
    return found, level


def _in_vmap(y: Tensor, level: int | None) -> Tensor:
    """y: (groups, …)."""
    if level == PLAIN:
        return y
    return y[0] if level is None else functorch._add_batch_dim(y, 0, level)


def _pixels(x: Tensor) -> Tensor:
    """(groups, n, h, w, c) of (groups, n, c, h, w)."""
    return x.permute(0, 1, 3, 4, 2)


def _image(y: Tensor) -> Tensor:
    return y.permute(0, 1, 4, 2, 3)


# -- autograd -----------------------------------------------------------------------------------------------------------
class _Depthwise(torch.autograd.Function):
    """x: (groups, n, h, w, c); weight: (groups or 1, c, 1, k, k); reach, active: (groups or 1,)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, reach: Tensor | None, active: Tensor | None, stride: int, dilation: int) -> Tensor:
        reach, active = _each(reach, len(x)), _each(active, len(x))
        return _kernels().depthwise_forward(_dense(x), _taps(weight), weight.shape[-1], stride, dilation, reach, active)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, reach, active, ctx.stride, ctx.dilation = inputs
        ctx.save_for_backward(x, weight, reach, active)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, reach, active = ctx.saved_tensors
        dy, settings = _dense(gradient), (weight.shape[-1], ctx.stride, ctx.dilation, _each(reach, len(x)), _each(active, len(x)))
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _kernels().depthwise_input_gradient(dy, _taps(weight), *x.shape[2:4], *settings)
        if ctx.needs_input_grad[1]:
            dw = _kernels().depthwise_weight_gradient(_dense(x), dy, weight, *settings)
        return dx, dw, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        x, weight, reach, active = _folded(info.batch_size, in_dims, *inputs[:4])
        return _unfolded(info.batch_size, _Depthwise.apply(_dense(x), weight, reach, active, *inputs[4:])), 0


def _taps(weight: Tensor) -> Tensor:
    """(groups, k * k, c) float32: the taps of neighbouring channels side by side."""
    return weight.flatten(2).transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def _each(numbers: Tensor | None, groups: int) -> Tensor | None:
    """(groups,) of (groups or 1,), one after the other."""
    return None if numbers is None else numbers.expand(groups).contiguous()


class _NormAct(torch.autograd.Function):
    """x, residual: (groups, n, h, w, c); weight, bias, mask: (groups or 1, c). The second result is the moments, (groups, 3, c)."""

    @staticmethod
    def forward(x: Tensor, weight: Any, bias: Any, mask: Any, residual: Any, act: str) -> tuple[Tensor, Tensor]:
        return _forward(x, weight, bias, mask, residual, act, x.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, bias, mask, residual, ctx.act = inputs
        ctx.residual = None if residual is None else (len(residual) == 1 < len(x), residual.dtype)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, mask, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, _: Any) -> Any:
        if gradient is None:
            return None, None, None, None, None, None
        x, weight, bias, mask, found = ctx.saved_tensors
        vectors = (_vector(weight), _vector(bias), _bytes(mask))
        dx = totals = None
        if any(ctx.needs_input_grad[:3]):
            own = [part for part in (weight, bias) if part is not None and len(part) == len(x)]
            dtype = own[0].dtype if own else torch.float32  # shared ones are added up first
            dx, totals = _kernels().gradients(_dense(x), _dense(gradient), found, *vectors, ctx.act, dtype, ctx.needs_input_grad[0])
        dw, db = (None, None) if totals is None else (_shared(totals[:, 1], weight), _shared(totals[:, 0], bias))
        added = None
        if ctx.residual is not None:
            shared, dtype = ctx.residual
            added = (gradient.sum(0, keepdim=True) if shared else gradient).to(dtype)
        return dx, dw, db, None, added, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        size = info.batch_size
        x, weight, bias, mask, residual = _folded(size, in_dims, *inputs[:5])
        y, found = _NormAct.apply(_dense(x), weight, bias, mask, residual, *inputs[5:])
        return (_unfolded(size, y), _unfolded(size, found)), (0, 0)


def _forward(
    x: Tensor, weight: Any, bias: Any, mask: Any, residual: Any, act: str, rows: int, gate: Gate | None = None
) -> tuple[Tensor, Tensor]:
    """The result, and moments as (groups, 3, c)."""
    x, flags = _dense(x), _bytes(mask)
    found = _kernels().moments(x, flags, rows, EPS)
    residual = None if residual is None else _dense(residual)
    return _applied(x, found, _vector(weight), _vector(bias), flags, residual, act, gate), found


def _applied(x: Tensor, found: Any, weight: Any, bias: Any, flags: Any, residual: Any, act: str, gate: Gate | None) -> Tensor:
    """Normalised, and weighed by the gate, which decides by what the map will be: it is read twice and written once."""
    if gate is None:
        return _kernels().apply(x, found, weight, bias, flags, residual, act)
    means = _kernels().pooled(x, found, weight, bias, flags, act)
    return _kernels().apply(x, found, weight, bias, flags, residual, act, gate(means[..., None, None]).flatten(2).contiguous())


def _vector(vector: Tensor | None) -> Tensor | None:
    """(groups, c), a group's numbers one after the other."""
    return vector if vector is None or vector.stride(-1) == 1 else vector.contiguous()
