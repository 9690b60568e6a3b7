"""The one local training loop: SGD with momentum on a fixed network, or on subnets of a supernet drawn step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples
from fedloom.data.augment import Augmentation, augment, normalise
from fedloom.supernets.base import Supernet, Weights
from fedloom.training.graphs import GraphedStep
from fedloom.training.recipe import TrainingSettings

# A graph costs about as much as this many eager steps to capture.
WORTH_A_GRAPH = 40


@dataclass(frozen=True)
class Pixels:
    """How a data set's pixels become numbers."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, images: Tensor) -> Tensor:
        # Channels last: convolutions on a CPU take half the time.
        return normalise(images, self.mean, self.std).contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Trained:
    """New weights, how many steps trained each architecture, and the forward multiply-accumulates spent."""

    weights: dict[str, Tensor]
    steps: Counter[Architecture]
    macs: int


class Trainer:
    """Trains weights on examples. ``train_network`` moves a plain network, ``train_supernet`` the regions of drawn subnets."""

    def __init__(self, supernet: Supernet[Any], settings: TrainingSettings, pixels: Pixels) -> None:
        self.supernet, self.settings, self.pixels = supernet, settings, pixels
        self.augmentation = Augmentation(settings.crop, settings.flip, settings.cutout)
        self._graph: GraphedStep | None = None  # the last captured step; a fixed network needs only one

    def train_network(
        self, plain: Weights, architecture: Architecture, examples: Examples, rates: Sequence[float], rng: np.random.Generator
    ) -> Trained:
        """One learning rate per epoch. Every entry of ``plain`` is trained."""
        weights = _copy(plain)
        batch = self._batch(examples)
        steps = len(rates) * self._steps(examples)
        if next(iter(weights.values())).is_cuda and (steps >= WORTH_A_GRAPH or self._has_graph(architecture, weights, batch)):
            weights = self._replay(weights, architecture, examples, rates, rng)
        else:
            momenta = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            for images, labels, rate in self._batches(examples, rates, rng):
                self._step(weights, momenta, architecture, images, labels, rate)
        return self._trained(weights, Counter({architecture: steps}), batch)

    def train_supernet(
        self,
        weights: Weights,
        archive: Sequence[Architecture],
        examples: Examples,
        rates: Sequence[float],
        rng: np.random.Generator,
    ) -> Trained:
        """Each step draws a subnet from the archive, evenly, and trains its region only: momentum and decay do not touch other entries."""
        weights = _copy(weights)
        momenta = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        steps: Counter[Architecture] = Counter()
        for images, labels, rate in self._batches(examples, rates, rng):
            architecture = archive[int(rng.integers(len(archive)))]
            take = self.supernet.take
            self._step(take(weights, architecture), take(momenta, architecture), architecture, images, labels, rate)
            steps[architecture] += 1
        return self._trained(weights, steps, self._batch(examples))

    # -- one step -----------------------------------------------------------
    def _step(
        self, weights: Weights, momenta: Weights, architecture: Architecture, images: Tensor, labels: Tensor, rate: float | Tensor
    ) -> None:
        """Moves ``weights`` and ``momenta`` in place; both may be views into larger tensors."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
        logits = self.supernet.forward(self.pixels.normalise(images), leaves, architecture)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.settings.label_smoothing)
        gradients = list(torch.autograd.grad(loss, list(leaves.values())))
        with torch.no_grad():
            decayed = [(g, w) for g, w in zip(gradients, weights.values(), strict=True) if w.ndim > 1]
            torch._foreach_add_([g for g, _ in decayed], [w for _, w in decayed], alpha=self.settings.weight_decay)
            moved = list(momenta.values())
            torch._foreach_mul_(moved, self.settings.momentum)
            torch._foreach_add_(moved, gradients)
            # The rate is multiplied in, not passed as alpha, so that it may be a tensor inside a captured graph.
            torch._foreach_sub_(list(weights.values()), torch._foreach_mul(moved, rate))

    # -- batches --------------------------------------------------------------
    def _batch(self, examples: Examples) -> int:
        return min(self.settings.batch, len(examples))

    def _steps(self, examples: Examples) -> int:
        return len(examples) // self._batch(examples)

    def _batches(self, examples: Examples, rates: Sequence[float], rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Equal batches in a new order each epoch; the few examples that do not fill a batch sit that epoch out."""
        batch = self._batch(examples)
        for rate in rates:
            order = torch.as_tensor(rng.permutation(len(examples)), device=examples.labels.device)
            images, labels = augment(examples.images[order], self.augmentation, rng, self.pixels.mean), examples.labels[order]
            for start in range(0, self._steps(examples) * batch, batch):
                yield images[start : start + batch], labels[start : start + batch], rate

    def _trained(self, weights: dict[str, Tensor], steps: Counter[Architecture], batch: int) -> Trained:
        macs = sum(self.supernet.space.cost(architecture).macs * times * batch for architecture, times in steps.items())
        return Trained(weights, steps, macs)

    # -- captured steps (GPU) ------------------------------------------------
    def _has_graph(self, architecture: Architecture, weights: Weights, batch: int) -> bool:
        return self._graph is not None and self._graph.key == GraphedStep.key_of(architecture, weights, batch)

    def _replay(
        self, weights: dict[str, Tensor], architecture: Architecture, examples: Examples, rates: Sequence[float], rng: np.random.Generator
    ) -> dict[str, Tensor]:
        batch = self._batch(examples)
        if not self._has_graph(architecture, weights, batch):
            self._graph = None  # free its memory before the next capture
            self._graph = GraphedStep(self._step, weights, architecture, examples.images[:batch], examples.labels[:batch])
        assert self._graph is not None
        self._graph.load(weights)
        for images, labels, rate in self._batches(examples, rates, rng):
            self._graph.step(images, labels, rate)
        return self._graph.weights_now()


def _copy(weights: Weights) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}
