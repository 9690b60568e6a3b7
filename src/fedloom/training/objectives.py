"""What a network is trained for besides the loss of its logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.supernets.base import Supernet, Weights
from fedloom.training.adaptation import Adaptation

Loss = Callable[[Tensor, Tensor], Tensor]  # (n, classes) logits, (n,) labels


class Objective(Protocol):
    """One number from a network and a batch. It may read more weights than the network has. Equal ones do the same: steps are captured
    and stacked by them, so it must be hashable, and nothing may be read back to the host."""

    @property
    def still(self) -> frozenset[str]:
        """The weights that do not move."""
        ...

    def __call__(
        self, supernet: Supernet[Any], architecture: Architecture, loss: Loss, weights: Weights, images: Tensor, labels: Tensor
    ) -> Tensor: ...


class Lesson(NamedTuple):
    """What the steps of a network compute: the gradient of its objective, or of its loss, behind an inner step or as it is."""

    adaptation: Adaptation | None = None
    objective: Objective | None = None

    @property
    def still(self) -> frozenset[str]:
        return self.objective.still if self.objective else frozenset()


PLAIN = Lesson()


@dataclass(frozen=True)
class NearMean:
    """The loss of features that are shifted by ``SHIFT``, (features,), plus strength / 2 times the mean square of the way from the batch's
    mean features, not shifted, to ``MEAN``, (features,), which stays (DBE, Zhang et al., NeurIPS 2023, Eq. 4 to 6)."""

    strength: float

    SHIFT: ClassVar[str] = "features.shift"
    MEAN: ClassVar[str] = "features.mean"

    @property
    def still(self) -> frozenset[str]:
        return frozenset({self.MEAN})

    def __call__(
        self, supernet: Supernet[Any], architecture: Architecture, loss: Loss, weights: Weights, images: Tensor, labels: Tensor
    ) -> Tensor:
        features = precise(supernet.features(images, weights, architecture))
        weight, bias = (precise(weights[name]) for name in supernet.classifier(weights))
        logits = F.linear(features + precise(weights[self.SHIFT]), weight, bias)
        way = features.mean(0) - precise(weights[self.MEAN])
        return loss(logits, labels) + self.strength / 2 * way.square().mean()


def precise(tensor: Tensor) -> Tensor:
    """In float32 where it is in half precision: sums and losses are."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
