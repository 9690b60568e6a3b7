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


@dataclass(frozen=True)
class Modules:
    """The loss of a network whose classifier is the mean of some of ``count`` modules (FedMN, Wang et al., ICDM 2022). ``GATES``, (count,),
    say which: those above zero are active, and the highest in any case."""

    count: int

    GATES: ClassVar[str] = "gates"

    @property
    def still(self) -> frozenset[str]:
        return frozenset()

    def __call__(
        self, supernet: Supernet[Any], architecture: Architecture, loss: Loss, weights: Weights, images: Tensor, labels: Tensor
    ) -> Tensor:
        return loss(precise(supernet.forward(images, self.assembled(weights), architecture)), labels)

    def name(self, number: int, parameter: str) -> str:
        """Of a parameter of the classifier in a module."""
        return f"module{number}/{parameter}"

    def assembled(self, weights: Weights) -> Weights:
        """The network: what is in no module, and the classifier that the gates make of them."""
        pool = {name for name in weights if name.partition("/")[0] in {f"module{number}" for number in range(self.count)}}
        gates = self.opened(weights[self.GATES])
        shares, mean = gates / gates.sum(), dict[str, Tensor]()
        for name in sorted(pool):
            module, _, own = name.partition("/")
            part = shares[int(module.removeprefix("module"))].to(weights[name].dtype) * weights[name]
            mean[own] = mean[own] + part if own in mean else part
        return {**{name: tensor for name, tensor in weights.items() if name not in pool and name != self.GATES}, **mean}

    @staticmethod
    def opened(gates: Tensor) -> Tensor:
        """(count,) 1 for active modules and 0 for others; its derivative is that of the logistic function (straight through)."""
        soft = gates.sigmoid()
        hard = (gates >= gates.max().clamp(max=0.0)).to(soft.dtype)
        return hard + soft - soft.detach()


def precise(tensor: Tensor) -> Tensor:
    """In float32 where it is in half precision: sums and losses are."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
