"""Labels for the predictor: the accuracy of many architectures on many tasks, from one supernet.

One pass of logits per architecture over the scoring images serves every class subset, so a label costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples
from fedloom.core.seeds import derive_seed, rng
from fedloom.core.settings import setting
from fedloom.generator.conditions import mixed, taken
from fedloom.generator.proxy import Proxy, Task, subset_accuracies
from fedloom.supernets.base import Supernet, Weights
from fedloom.training.local import Draw, Trainer, one_of
from fedloom.training.recipe import TrainingSettings, falling
from fedloom.training.scoring import Scorer

ROUNDS = 8  # of drawing more architectures, where many are equal


@dataclass(frozen=True)
class SupernetSettings:
    epochs: int = setting(24, "passes over the public images", low=1)
    batch: int = setting(512, "images per step", low=2)
    rate: float = setting(0.4, "learning rate of SGD at the start; it falls by a cosine", low=0)
    largest: float = setting(1 / 3, "share of the epochs, at the start, that train only the largest network", low=0, high=1)
    sampling: str = setting(
        "auto",
        "what a step trains: one random subnet, or several that together use every choice (fair, FairNAS); "
        "auto: fair without the largest network if every choice has its own weights (darts), else random",
        choices=("auto", "random", "fair"),
    )
    half: bool = setting(False, "train in bfloat16 if the device is a GPU")

    def suited_to(self, supernet: Supernet[Any]) -> SupernetSettings:
        """What ``auto`` means for this supernet."""
        if self.sampling != "auto":
            return self
        return replace(self, sampling="fair", largest=0.0) if supernet.pathwise else replace(self, sampling="random")


@dataclass(frozen=True)
class LabelSettings:
    architectures: int = setting(10_240, "different architectures to score", low=8)
    images: int = setting(30, "scoring images per class for an architecture; other architectures are scored on other images", low=2)
    calibration: int = setting(512, "training images that measure normalisation statistics", low=2)
    half: bool = setting(True, "score in bfloat16 if the device is a GPU")


def half_precision(wanted: bool, images: Tensor) -> torch.autocast:
    """bfloat16 for what stands it, on a GPU."""
    return torch.autocast(images.device.type, torch.bfloat16, enabled=wanted and images.is_cuda)


def train_proxy_supernet(
    supernet: Supernet[Any],
    proxy: Proxy,
    conditions: tuple[str, ...],
    settings: SupernetSettings,
    weights: Weights,
    first: int,
    seed: int,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Epoch by epoch from ``first``: (epochs done, weights). Every image comes in a random one of the conditions, another in each epoch.

    The largest network comes first, then its subnets, as in once-for-all (Cai et al., 2020): residual blocks start as the identity, and
    random subnets alone leave them there, so that hardly anything would depend on the architecture.
    """
    settings = settings.suited_to(supernet)
    recipe = TrainingSettings(
        batch=settings.batch,
        rate=settings.rate,
        weight_decay=5e-5,
        label_smoothing=0.1,
        crop=min(4, proxy.image.size // 8),
        cutout=0,
        execution="sliced",
    )
    trainer = Trainer(supernet, recipe, proxy.pixels)

    def random(draw: np.random.Generator) -> list[Architecture]:
        return [supernet.space.sample(draw)]

    largest = one_of([supernet.space.named["largest"]])
    smaller: Draw = supernet.space.fair if settings.sampling == "fair" else random
    for epoch in range(first, settings.epochs):
        subnets = largest if epoch < round(settings.largest * settings.epochs) else smaller
        # The first epoch warms up; momentum starts afresh with every epoch.
        rate = falling(settings.rate, epoch / settings.epochs, "cosine") * (0.25 if epoch == 0 else 1.0)
        examples = mixed(proxy.train, conditions, rng(seed, "conditions", epoch))
        with half_precision(settings.half, examples.images):
            trained = trainer.train_supernet(weights, subnets, examples, [rate], rng(seed, "supernet", epoch))
        weights = trained.weights
        yield epoch + 1, dict(trained.weights)


def score_architectures(
    supernet: Supernet[Any],
    weights: Weights,
    proxy: Proxy,
    architectures: Sequence[Architecture],
    images: Tensor,
    measure: Callable[[Tensor], Tensor],
    settings: LabelSettings,
    condition: str = "plain",
) -> Iterator[Tensor]:
    """``measure`` of the logits (classes, images, all classes) of each architecture on images (classes, images, c, h, w), one by one."""
    classes, count = images.shape[:2]
    recipe = TrainingSettings(calibration=settings.calibration, execution="sliced")
    scorer = Scorer(supernet, recipe, proxy.pixels)
    pixels = proxy.pixels.normalise(taken(images.flatten(0, 1), condition))
    calibration = scorer.calibration_images(Examples(taken(proxy.train.images, condition), proxy.train.labels))

    with half_precision(settings.half, pixels):
        for part in scorer.logits(weights, architectures, pixels, calibration):
            for logits in part:
                yield measure(logits.float().view(classes, count, -1))


def one_accuracy(supernet: Supernet[Any], weights: Weights, proxy: Proxy, draw: np.random.Generator) -> float:
    """How far a supernet is: accuracy of a random subnet on a few scoring images of every class, told apart among all classes."""

    def measure(logits: Tensor) -> Tensor:
        return (logits.argmax(-1) == torch.arange(len(logits), device=logits.device)[:, None]).float().mean()

    images = proxy.scoring[:, :8]
    return float(next(score_architectures(supernet, weights, proxy, [supernet.space.sample(draw)], images, measure, LabelSettings())))


def task_measure(tasks: Sequence[Task], condition: str, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Accuracies on tasks, (tasks,), from the logits of every class's images in this condition; nan for tasks in other conditions."""
    own = [(number, task.classes) for number, task in enumerate(tasks) if task.condition == condition]
    groups = [
        (torch.tensor([number for number, _ in members], device=device), torch.tensor(np.stack([c for _, c in members]), device=device))
        for size in {len(classes) for _, classes in own}
        for members in [[(number, classes) for number, classes in own if len(classes) == size]]
    ]

    def measure(logits: Tensor) -> Tensor:
        result = logits.new_full((len(tasks),), torch.nan)
        for numbers, subsets in groups:
            result[numbers] = subset_accuracies(logits, subsets)
        return result

    return measure


def equally_hard(accuracies: Tensor, images: np.ndarray) -> Tensor:
    """Accuracies (architectures, tasks) as if all had been measured on the same images; images: (architectures,) which part each saw.

    Architectures are in random order, so the mean over those of a part tells how hard its images are. What is nan stays so.
    """
    result = accuracies.clone()
    for part in np.unique(images):
        rows = torch.from_numpy(images == part).to(accuracies.device)
        result[rows] += accuracies.nanmean(0) - accuracies[rows].nanmean(0)
    return result


def different_architectures(space: Any, count: int, seed: int) -> np.ndarray:
    """(count, genes) random architectures, no two equal; fewer only if the space hardly has more."""
    draw = np.random.default_rng(derive_seed(seed, "labelled architectures"))
    found = np.unique(space.sample_many(draw, 2 * count), axis=0)
    for _ in range(ROUNDS):
        if len(found) >= count:
            break
        found = np.unique(np.concatenate([found, space.sample_many(draw, 4 * count)]), axis=0)
    return draw.permutation(found)[:count]
