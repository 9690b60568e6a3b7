"""Gradients of what a network achieves after a step of its own (Per-FedAvg, Fallah et al., NeurIPS 2020, Algorithm 1).

The step is w' = w - rate grad(w, D). What counts is the loss at w' on other images D', so the gradient there, g' = grad(w', D'), is turned
by the step's own derivative: (I - rate H(w, D'')) g'. First order leaves H out. Hessian-free measures H g' on a third part of the images as
the difference of two gradients, to both sides of w along g'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Adaptation(NamedTuple):
    """rate: of the inner step. probe: how far to both sides of the weights H g' is measured, times g'; 0: first order."""

    rate: float
    probe: float = 0.0

    @property
    def parts(self) -> int:
        """Of a batch: for the inner step, for the loss after it, and for H g'."""
        return 3 if self.probe else 2


def pieces(adaptation: Adaptation | None, batch: int) -> list[slice]:
    """A batch cut into equal parts, a few images left over; without an adaptation it is whole."""
    parts = 1 if adaptation is None else adaptation.parts
    each = batch // parts
    return [slice(None)] if parts == 1 else [slice(number * each, (number + 1) * each) for number in range(parts)]


def images_run(adaptation: Adaptation | None, batch: int) -> int:
    """Images that a step runs forwards. The third part runs twice."""
    return batch if adaptation is None else (batch // adaptation.parts) * (4 if adaptation.probe else 2)


def adapted(gradient: Callable[[Tensor, int], Tensor], weights: Tensor, adaptation: Adaptation | None) -> Tensor:
    """gradient: at these packed weights, on the piece of the batch with this number. Rows of a stack do not touch each other."""
    if adaptation is None:
        return gradient(weights, 0)
    rate, probe = adaptation
    after = gradient(weights - rate * gradient(weights, 0), 1)
    if not probe:
        return after
    bent = gradient(weights + probe * after, 2) - gradient(weights - probe * after, 2)  # 2 probe H after
    return after - rate / (2 * probe) * bent
