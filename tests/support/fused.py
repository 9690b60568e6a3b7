"""What the tests of fused operations share: random maps, the exact results, and how far from them a result may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.supernets import fused
from fedloom.supernets.normalisation import EPS
from fedloom.supernets.squeeze import squeezed

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest number


def random(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def images(*shape: int, **more: Any) -> Tensor:
    """Random (…, n, c, h, w) whose channels lie last."""
    return random(*shape, **more).movedim(-3, -1).contiguous().movedim(-1, -3)


def error(found: Tensor, right: Tensor) -> float:
    """Relative to the largest number."""
    return float((found.double() - right).abs().max() / right.abs().max().clamp(min=1e-30))


def compare(ours: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], close: float | None = None) -> list[float]:
    """Results and gradients of all inputs; plain computes in float64. The errors, relative to the largest number."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    y, expected = ours(*leaves), plain(*exact)
    assert y.dtype == inputs[0].dtype and y.shape == expected.shape
    upstream = random(*y.shape, seed=99, device=str(y.device), dtype=y.dtype)
    found = [y, *torch.autograd.grad(y, leaves, upstream)]
    right = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
    errors = [error(one.detach(), other.detach()) for one, other in zip(found, right, strict=True)]
    for number, (gradient, leaf) in enumerate(zip(found[1:], leaves, strict=True)):
        assert gradient.dtype == leaf.dtype and gradient.shape == leaf.shape, number
    assert max(errors) < (close or CLOSE[inputs[0].dtype]), errors
    return errors


def exact_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, act: str, rows: int | None = None) -> Tensor:
    """By the definition, in whatever precision x has."""
    ones = torch.ones(x.shape[1], device=x.device, dtype=x.dtype)
    weight, bias = ones if weight is None else weight, 0 * ones if bias is None else bias
    weight, bias = (weight, bias) if mask is None else (weight * mask, bias * mask)
    variance, mean = torch.var_mean(x[:rows], (0, 2, 3), correction=0, keepdim=True)
    normalised = (x - mean) / torch.sqrt(variance + EPS)
    return fused.ACTIVATIONS[act](normalised * weight[:, None, None] + bias[:, None, None])


def vectors(*shape: int) -> list[Tensor]:
    return [random(*shape, seed=1) + 1, random(*shape, seed=2)]


def exact_joint_norm(x: Tensor, weight: Tensor, bias: Tensor, widths: Sequence[int]) -> Tensor:
    """Of the first channels of each group alone: the others are not looked at, and have no gradient. x: (groups, n, tokens, c)."""
    made = [
        F.pad(F.layer_norm(one[..., :n], (x.shape[-2], n), eps=EPS) * w[:n] + b[:n], (0, x.shape[-1] - n))
        for one, w, b, n in zip(x, weight, bias, widths, strict=True)
    ]
    return torch.stack(made)


# -- squeeze-excite -----------------------------------------------------------------------------------------------------
UNITS = 16


def layers(channels: int, groups: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Weights and biases of both layers. Units and gates lie on both sides of where slopes jump, and far enough from there that no
    rounding takes them across."""
    shapes = ((UNITS, channels, 1, 1), (UNITS,), (channels, UNITS, 1, 1), (channels,))
    reduce, of_units, restore, of_gate = (random(*groups, *shape, seed=seed) for seed, shape in enumerate(shapes, 1))
    given = (0.1 * reduce, 2 * of_units.sign(), 0.02 * restore, 2 * (2 * of_gate).round())  # gates around -4, -2, 0, 2, 4, …
    return [one.to(dtype) for one in given]


def squeezed_by(x: Tensor, *given: Tensor, hidden: Tensor | None = None) -> Tensor:
    names = ("se.reduce.weight", "se.reduce.bias", "se.restore.weight", "se.restore.bias")
    return squeezed(x, dict(zip(names, given, strict=True)), "se", hidden)


def exactly_squeezed(x: Tensor, reduce: Tensor, of_units: Tensor, restore: Tensor, of_gate: Tensor, hidden: Tensor | None = None) -> Tensor:
    inside = F.relu(F.linear(x.mean((-2, -1)), reduce.flatten(-3), of_units))
    inside = inside if hidden is None else torch.where(hidden, inside, 0.0)
    return x * F.hardsigmoid(F.linear(inside, restore.flatten(-3), of_gate))[..., None, None]
