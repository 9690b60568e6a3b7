"""Squeeze-excite: channels weighed by what the whole map shows.

Where kernels run (``fused.py``), it has a gradient of its own. Left to autograd, the two ways in which a map counts, as what is weighed
and as what decides the weights, would each write a map of gradients, and a third pass would add them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.supernets import fused
from fedloom.supernets.elastic import bias_gradient, biased, only, weight_gradient, zero


def squeezed(x: Tensor, weights: Mapping[str, Tensor], name: str, hidden: Tensor | None = None) -> Tensor:
    """x: (n, c, h, w); hidden: (units,) booleans, the hidden units that are there."""
    if torch.is_grad_enabled() and fused.runs(x) and fused.can_run(x):
        matrices = (weights[f"{name}.{layer}.weight"].flatten(1)[None] for layer in ("reduce", "restore"))
        biases = (weights[f"{name}.{layer}.bias"][None] for layer in ("reduce", "restore"))
        y, *_ = _Squeezed.apply(fused._last(x)[None], *matrices, *biases, None if hidden is None else hidden[None])
        return y.squeeze(0).permute(0, 3, 1, 2)
    return fused.gated(x, gate(x.mean((-2, -1), keepdim=True), weights, name, hidden))


def gate(means: Tensor, weights: Mapping[str, Tensor], name: str, hidden: Tensor | None = None) -> Tensor:
    """By how much channels are weighed, (n, c, 1, 1), of their means over the map."""
    inside = F.relu(biased(means, weights, f"{name}.reduce"))
    inside = inside if hidden is None else only(inside, hidden)
    return F.hardsigmoid(biased(inside, weights, f"{name}.restore"))


class _Squeezed(torch.autograd.Function):
    """x: (groups, n, h, w, c); reduce: (groups or 1, units, c), restore: (groups or 1, c, units), and their biases; hidden: (groups or 1,
    units). The results after the first are what the gradient needs: means (groups, n, c), units (groups, n, units), and what the gate is
    made of, (groups, n, c)."""

    @staticmethod
    def forward(x: Tensor, reduce: Tensor, restore: Tensor, of_units: Tensor, of_gate: Tensor, hidden: Tensor | None) -> tuple[Tensor, ...]:
        x = x.contiguous()
        means = x.mean((2, 3))
        inside = F.relu(_linear(means, reduce, of_units))
        inside = inside if hidden is None else only(inside, hidden)
        raw = _linear(inside, restore, of_gate)
        return fused._kernels().weighed(x, F.hardsigmoid(raw)), means, inside, raw

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, reduce, restore, of_units, of_gate, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.shared = [len(one) < len(x) for one in (reduce, restore, of_units, of_gate)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, reduce, restore, *output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None, None, None
        x, reduce, restore, means, inside, raw = ctx.saved_tensors
        dy, groups = gradient.contiguous(), len(x)
        slope = torch.where((raw > -3) & (raw < 3), fused._kernels().gate_gradient(x.contiguous(), dy, 1 / 6), zero(raw))
        units = torch.where(inside > 0, slope @ restore.expand(groups, -1, -1), zero(inside))
        pooled = units @ reduce.expand(groups, -1, -1)
        dx = fused._kernels().weighed(dy, F.hardsigmoid(raw), pooled) if ctx.needs_input_grad[0] else None
        shared_reduce, shared_restore, shared_units, shared_gate = ctx.shared
        return (
            dx,
            weight_gradient(units, means, shared_reduce),
            weight_gradient(slope, inside, shared_restore),
            bias_gradient(units, shared_units),
            bias_gradient(slope, shared_gate),
            None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        results = _Squeezed.apply(*fused._folded(info.batch_size, in_dims, *inputs))
        return tuple(fused._unfolded(info.batch_size, one) for one in results), (0, 0, 0, 0)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x: (groups, n, inputs)."""
    return torch.baddbmm(bias[:, None].expand(len(x), -1, -1), x, weight.mT.expand(len(x), -1, -1))
