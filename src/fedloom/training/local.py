"""The one local training loop: SGD with momentum on a fixed network, or on subnets of a supernet drawn step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples
from fedloom.core.server_site import ServerImages
from fedloom.data.augment import Augmentation, augment, normalise
from fedloom.maths.distillation import soft_cross_entropy
from fedloom.spaces.base import SearchSpace
from fedloom.supernets.base import Supernet, Weights
from fedloom.training.graphs import WeightsInTraining
from fedloom.training.packed import Packed, flattened, sgd
from fedloom.training.recipe import TrainingSettings

LESSON = 1000  # images that a teacher sees at once
KEPT_MASKS = 16  # architectures whose trained entries are remembered, a byte each


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


Draw = Callable[[np.random.Generator], Sequence[Architecture]]  # the subnets that one step trains together

Loss = Callable[..., Tensor]  # (n, classes) logits, (n,) labels, label_smoothing=… -> their loss
Teacher = Callable[[Tensor], Tensor]  # normalised images -> (n, classes) logits to learn from

Turn = tuple[Sequence[Architecture], Tensor, Tensor, float]  # subnets, images, labels, rate of one step


def trains_masked(supernet: Supernet[Any], settings: TrainingSettings, device: torch.device) -> bool:
    """Whether training runs masked; ``auto`` slices on a CPU."""
    return settings.execution == "masked" or (settings.execution == "auto" and device.type == "cuda" and supernet.masks_pay)


def one_of(archive: Sequence[Architecture]) -> Draw:
    """One subnet per step, drawn evenly from the archive."""
    return lambda rng: [archive[int(rng.integers(len(archive)))]]


def sandwich(space: SearchSpace, random: int) -> Draw:
    """The largest subnet, which a teacher teaches, then the smallest and random ones, which learn from it (Yu and Huang, ICCV 2019)."""
    return lambda rng: [space.named["largest"], space.named["smallest"], *(space.sample(rng) for _ in range(random))]


def gradients(weights: Weights, loss: Callable[[Weights], Tensor]) -> list[Tensor]:
    """One per weight; zero where the loss does not depend on it."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
    # ``backward`` and not ``grad``, which first looks for the ways to its inputs: with hundreds of small weights that takes time.
    loss(leaves).backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves.values()]


class Trainer:
    """Trains weights on examples. ``train_network`` moves a plain network, ``train_supernet`` the regions of drawn subnets, ``distil``
    the same on images without labels."""

    def __init__(self, supernet: Supernet[Any], settings: TrainingSettings, pixels: Pixels, loss: Loss = F.cross_entropy) -> None:
        self.supernet, self.settings, self.pixels, self.loss = supernet, settings, pixels, loss
        self.augmentation = Augmentation(settings.crop, settings.flip, settings.cutout)
        self._in_training: dict[str, tuple[Hashable, WeightsInTraining]] = {}  # the last one for a network and for the supernet
        self._masks: dict[tuple[Architecture, ...], Tensor] = {}

    def train_network(
        self,
        plain: Weights,
        architecture: Architecture,
        examples: Examples,
        rates: Sequence[float],
        rng: np.random.Generator,
        after_epoch: Callable[[Weights], None] | None = None,
    ) -> Trained:
        """One learning rate per epoch. Every entry of ``plain`` is trained. after_epoch: sees the weights, which move on afterwards."""
        batch, steps = self._batch(examples), len(rates) * self._steps(examples)
        self._in_training.pop("supernet", None)  # networks are trained alone before or after a search, not between its steps
        place = self._weights_in_training("network", plain, architecture)
        for step, (images, labels, rate) in enumerate(self.batches(examples, rates, rng), 1):
            place.run(partial(self._network_step, architecture), batch, images, labels, rate)
            if after_epoch and step % self._steps(examples) == 0:
                after_epoch(place.weights.views)
        return self._trained(place.weights.unpacked(), Counter({architecture: steps}), batch)

    def _network_step(
        self, architecture: Architecture, place: WeightsInTraining, images: Tensor, labels: Tensor, rate: Tensor | float
    ) -> None:
        gradient = flattened(self._gradients(place.weights.views, architecture, images, labels))
        sgd(place.weights.flat, place.momenta, gradient, place.decay, self.settings.momentum, rate, None)

    def train_supernet(self, weights: Weights, draw: Draw, examples: Examples, rates: Sequence[float], rng: np.random.Generator) -> Trained:
        """Each step draws subnets, sums their gradients on one batch and moves their regions only: momentum and decay do not
        touch other entries."""
        steps: Counter[Architecture] = Counter()

        def turns() -> Iterator[Turn]:
            for images, labels, rate in self.batches(examples, rates, rng):
                drawn = draw(rng)
                steps.update(drawn)
                yield drawn, images, labels, rate

        masked = trains_masked(self.supernet, self.settings, examples.labels.device)
        train = self._train_masked if masked else self._train_sliced
        return self._trained(train(weights, turns()), steps, self._batch(examples))

    def _train_sliced(self, weights: Weights, turns: Iterator[Turn]) -> dict[str, Tensor]:
        place, take = self._supernet_in_training(weights), self.supernet.take
        for drawn, images, labels, rate in turns:
            place.total.flat.zero_()
            for architecture in drawn:
                gradients = self._gradients(take(place.weights.views, architecture), architecture, images, labels)
                torch._foreach_add_(list(take(place.total.views, architecture).values()), gradients)
            mask = self._mask(drawn, labels.device)
            sgd(place.weights.flat, place.momenta, place.total.flat, place.decay, self.settings.momentum, rate, mask)
        return place.weights.unpacked()

    def _train_masked(self, weights: Weights, turns: Iterator[Turn]) -> dict[str, Tensor]:
        """The same at static shapes: on a GPU one captured step serves every architecture, because the architecture is an input."""
        place = self._supernet_in_training(weights)
        for drawn, images, labels, rate in turns:
            sizes = self.supernet.space.input_sizes([architecture.choices for architecture in drawn])
            order = sorted(range(len(drawn)), key=sizes.__getitem__)  # so that few different shapes need capturing
            ordered = tuple(sizes[index] for index in order)
            genes = torch.tensor([drawn[index].choices for index in order]).to(labels.device)
            key = (len(labels), ordered)
            place.run(partial(self._masked_step, ordered), key, images, labels, rate, genes, self._mask(drawn, labels.device))
        return place.weights.unpacked()

    def _masked_step(
        self,
        sizes: Sequence[int],
        place: WeightsInTraining,
        images: Tensor,
        labels: Tensor,
        rate: Tensor | float,
        genes: Tensor,
        mask: Tensor,
    ) -> None:
        gradient = flattened(self._masked_gradients(place.weights.views, genes, sizes, images, labels))
        sgd(place.weights.flat, place.momenta, gradient, place.decay, self.settings.momentum, rate, mask)

    def distil(
        self, weights: Weights, teacher: Teacher, draw: Draw, images: ServerImages, rates: Sequence[float], rng: np.random.Generator
    ) -> dict[str, Tensor]:
        """Supernet weights from a teacher's logits alone. Of the subnets that a step draws the first learns from the teacher, the others
        from what the first says before the step (in-place distillation, Yu et al., ECCV 2020); their gradients are summed."""
        place, take, device = self._supernet_in_training(weights), self.supernet.take, images.images.device
        for seen, _, rate in self._epochs(images.images, rates, rng):
            lessons = torch.cat([teacher(self.pixels.normalise(some)) for some in seen.split(LESSON)])
            for part in self._parts(images):
                lesson, drawn, pixels = lessons[part], draw(rng), self.pixels.normalise(seen[part])
                place.total.flat.zero_()
                for number, architecture in enumerate(drawn):
                    own = take(place.weights.views, architecture)
                    leaves = {name: tensor.detach().requires_grad_() for name, tensor in own.items()}
                    logits = self.supernet.forward(pixels, leaves, architecture)
                    gradients = torch.autograd.grad(soft_cross_entropy(logits, lesson), list(leaves.values()), materialize_grads=True)
                    torch._foreach_add_(list(take(place.total.views, architecture).values()), list(gradients))
                    lesson = lesson if number else logits.detach()
                mask = self._mask(drawn, device)
                sgd(place.weights.flat, place.momenta, place.total.flat, place.decay, self.settings.momentum, rate, mask)
        return place.weights.unpacked()

    # -- one step -----------------------------------------------------------
    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.loss(logits, labels, label_smoothing=self.settings.label_smoothing)

    def _gradients(self, weights: Weights, architecture: Architecture, images: Tensor, labels: Tensor) -> list[Tensor]:
        """One per weight; zero where an architecture lets a weight go to waste (DARTS: an input whose every edge is ``none``)."""
        pixels = self.pixels.normalise(images)
        return gradients(weights, lambda leaves: self._loss(self.supernet.forward(pixels, leaves, architecture), labels))

    def _masked_gradients(self, weights: Weights, genes: Tensor, sizes: Sequence[int], images: Tensor, labels: Tensor) -> list[Tensor]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
        logits = self.supernet.forward_many(self.pixels.normalise(images), leaves, genes, sizes=sizes)  # (subnets, n, classes)
        loss = self._loss(logits.flatten(0, 1), labels.repeat(len(genes))) * len(genes)
        return list(torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True))

    def _mask(self, drawn: Sequence[Architecture], device: torch.device) -> Tensor:
        """Which entries these architectures train, packed. Those of one architecture are remembered: an archive comes back."""
        key = tuple(drawn)
        if key in self._masks:
            return self._masks[key]
        self._marks.flat.zero_()
        for architecture in drawn:
            for part in self.supernet.take(self._marks.views, architecture).values():
                part.fill_(True)
        mask = self._marks.flat.to(device, copy=True)
        if len(drawn) == 1:
            if len(self._masks) >= KEPT_MASKS:
                self._masks.pop(next(iter(self._masks)))
            self._masks[key] = mask
        return mask

    @cached_property
    def _marks(self) -> Packed:
        return Packed.zeros(self.supernet.shapes, torch.bool, torch.device("cpu"))

    # -- batches --------------------------------------------------------------
    def _batch(self, examples: Sized) -> int:
        return min(self.settings.batch, len(examples))

    def _steps(self, examples: Sized) -> int:
        return len(examples) // self._batch(examples)

    def batches(self, examples: Examples, rates: Iterable[float], rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Equal batches in a new order each epoch, one epoch per rate; the few examples that do not fill a batch sit that epoch out."""
        for images, order, rate in self._epochs(examples.images, rates, rng):
            labels = examples.labels[order]
            for part in self._parts(examples):
                yield images[part], labels[part], rate

    def _epochs(self, images: Tensor, rates: Iterable[float], rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor, float]]:
        """All images in a new order each epoch, augmented; which they are, and the epoch's rate."""
        for rate in rates:
            order = torch.as_tensor(rng.permutation(len(images)), device=images.device)
            yield augment(images[order], self.augmentation, rng, self.pixels.mean), order, rate

    def _parts(self, examples: Sized) -> list[slice]:
        batch = self._batch(examples)
        return [slice(start, start + batch) for start in range(0, self._steps(examples) * batch, batch)]

    def _trained(self, weights: dict[str, Tensor], steps: Counter[Architecture], batch: int) -> Trained:
        macs = sum(self.supernet.space.cost(architecture).macs * times * batch for architecture, times in steps.items())
        return Trained(weights, steps, macs)

    # -- where packed weights train --------------------------------------------
    def _supernet_in_training(self, weights: Weights) -> WeightsInTraining:
        return self._weights_in_training("supernet", {name: weights[name] for name in self.supernet.shapes})  # in the order of masks

    def _weights_in_training(self, kind: str, weights: Weights, *what: Hashable) -> WeightsInTraining:
        """The last packed weights of this kind if they were for the same network: their captured steps can be used again."""
        key = (*what, *((name, tuple(tensor.shape), str(tensor.device)) for name, tensor in weights.items()))
        known = self._in_training.get(kind)
        if known is None or known[0] != key:
            self._in_training.pop(kind, None)  # frees its memory before the next one
            self._in_training[kind] = (key, WeightsInTraining(weights, self.settings.weight_decay))
        place = self._in_training[kind][1]
        place.load(weights)
        return place
