"""How a gradient moves packed weights: SGD with momentum, Nesterov's or AdamW, in place and without reading anything back.

Weights are (entries,), or (rows, entries) for a stack. Only entries of the mask move: momentum and decay do not touch the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SQUARES, EPSILON = 0.999, 1e-8  # of AdamW: how slowly squares are forgotten, and what keeps it from dividing by 0


@dataclass(frozen=True)
class Sgd:
    """SGD with momentum as in PyTorch: the momentum is a sum of gradients, not a mean."""

    momentum: float
    moments = 1  # numbers kept for every weight

    def start(self, weights: Tensor) -> Tensor:
        """Moments before the first step."""
        return torch.zeros_like(weights)

    def step(self, weights: Tensor, moments: Tensor, gradient: Tensor, decay: Tensor, rate: Tensor | float, mask: Tensor | None) -> None:
        """rate: a number, or (rows, 1)."""
        with torch.no_grad():
            moved = moments * self.momentum + torch.addcmul(gradient, decay, weights)
            moved = moved if mask is None else torch.where(mask, moved, moments)
            moments.copy_(moved)
            weights.sub_(rate * (moved if mask is None else torch.where(mask, moved, 0.0)))


@dataclass(frozen=True)
class Nesterov(Sgd):
    """SGD that looks ahead (Sutskever et al., ICML 2013): a step is the gradient and the momentum after it."""

    def step(self, weights: Tensor, moments: Tensor, gradient: Tensor, decay: Tensor, rate: Tensor | float, mask: Tensor | None) -> None:
        with torch.no_grad():
            decayed = torch.addcmul(gradient, decay, weights)
            moved = moments * self.momentum + decayed
            moments.copy_(moved if mask is None else torch.where(mask, moved, moments))
            ahead = decayed + self.momentum * moved
            weights.sub_(rate * (ahead if mask is None else torch.where(mask, ahead, 0.0)))


@dataclass(frozen=True)
class AdamW:
    """Adam whose decay is beside the gradient (Loshchilov and Hutter, ICLR 2019). moments: (…, 3, entries) mean, square and steps.

    Steps are counted for every entry: one that a subnet trains for the first time is at its first step, however late that is."""

    momentum: float
    moments = 3

    def start(self, weights: Tensor) -> Tensor:
        return torch.zeros_like(weights).unsqueeze(-2).repeat_interleave(self.moments, -2)

    def step(self, weights: Tensor, moments: Tensor, gradient: Tensor, decay: Tensor, rate: Tensor | float, mask: Tensor | None) -> None:
        with torch.no_grad():
            means, squares, steps = moments.unbind(-2)
            count = steps + 1
            mean = torch.lerp(gradient, means, self.momentum)
            square = SQUARES * squares + (1 - SQUARES) * gradient.square()
            seen = -torch.expm1(count * math.log(SQUARES))  # 1 - SQUARES^count, exact also in float32
            scale = (square / seen).sqrt() + EPSILON
            moved = rate * (decay * weights + mean / (1 - self.momentum**count) / scale)
            for kept, now in ((means, mean), (squares, square), (steps, count)):
                kept.copy_(now if mask is None else torch.where(mask, now, kept))
            weights.sub_(moved if mask is None else torch.where(mask, moved, 0.0))


Optimiser = Sgd | AdamW

OPTIMISERS: dict[str, type[Optimiser]] = {"sgd": Sgd, "nesterov": Nesterov, "adamw": AdamW}  # as ``training.optimiser`` names them
