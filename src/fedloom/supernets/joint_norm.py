"""Layer normalisation over tokens and channels together, of active channels only: one kernel on a GPU, else torch's own operations.

Both give the same up to rounding and work under ``torch.vmap``, where one launch serves all groups.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.supernets import fused
from fedloom.supernets.elastic import below, constant
from fedloom.supernets.normalisation import EPS, under_vmap


def joint_norm(x: Tensor, weight: Tensor, bias: Tensor, width: Tensor | int) -> Tensor:
    """x: (n, tokens, channels), zero from channel ``width`` on, as is the result; weight, bias: (channels,). In groups x has them
    first, and the others unless all share them."""
    if _runs(x):
        if isinstance(width, int):
            width = constant((width,), x.device)[0]
        if torch.is_grad_enabled() or under_vmap():
            return _Joint.apply(x[None], weight[None], bias[None], width.reshape(1))[0].squeeze(0)
        parts = (x, weight, bias, width) if x.ndim == 4 else (x[None], weight[None], bias[None], width[None])
        y, _ = _Joint.forward(*(part if part.ndim == axes else part[None] for part, axes in zip(parts, (4, 2, 2, 1), strict=True)))
        return y if x.ndim == 4 else y[0]
    if isinstance(width, int):
        if weight.ndim == 1:
            return F.layer_norm(x, x.shape[-2:], weight.expand(x.shape[-2:]), bias.expand(x.shape[-2:]), EPS)
        return torch.addcmul(bias[:, None, None], F.layer_norm(x, x.shape[-2:], eps=EPS), weight[:, None, None])
    channels = below(x.shape[-1], width[..., None])[..., None, None, :] if width.ndim else below(x.shape[-1], width)
    weight, bias = (part[..., None, None, :] if part.ndim > 1 else part for part in (weight, bias))
    count = x.shape[-2] * (width[:, None, None, None] if width.ndim else width)
    away = torch.where(channels, x - x.sum((-2, -1), keepdim=True) / count, 0.0)
    variance = away.square().sum((-2, -1), keepdim=True) / count
    return torch.where(channels, away * torch.rsqrt(variance + EPS) * weight + bias, 0.0)


def _runs(x: Tensor) -> bool:
    """As ``fused.runs``: one network in full precision is left to torch."""
    return fused.can_run(x) and (x.ndim == 4 or x.dtype != torch.float32 or under_vmap())


def _kernels() -> Any:
    return import_module("fedloom.supernets.kernels.joint")


class _Joint(torch.autograd.Function):
    """x: (groups, n, tokens, c); weight, bias: (groups or 1, c); width: (groups or 1,). Also gives means and inverse deviations."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = (part if part.stride(-1) == 1 else part.contiguous() for part in (weight, bias))
        y, found = _kernels().joint(x.contiguous(), weight, bias, width, EPS)
        return y, found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, width = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, width, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        x, weight, width, found = ctx.saved_tensors
        given = weight if weight.stride(-1) == 1 else weight.contiguous()
        dx, sums = _kernels().joint_gradients(x.contiguous(), gradient.contiguous(), found, given, width)
        totals = sums.sum((0, 1))[None] if len(weight) == 1 else sums.sum(1)  # (groups or 1, 2, c)
        totals = totals.to(weight.dtype)
        return dx, totals[:, 1], totals[:, 0], None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        size = info.batch_size
        y, found = _Joint.apply(*fused._folded(size, in_dims, *inputs))
        return (fused._unfolded(size, y), fused._unfolded(size, found)), (0, 0)
