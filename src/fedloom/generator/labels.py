"""Labels for the predictor: the accuracy of many architectures on many tasks, from one supernet.

One pass of logits per architecture over the scoring images serves every class subset, so a label costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.seeds import derive_seed, rng
from fedloom.core.settings import setting
from fedloom.generator.proxy import Proxy, Subset, subset_accuracies
from fedloom.supernets.base import Supernet, Weights
from fedloom.training.local import Draw, Trainer, one_of
from fedloom.training.recipe import TrainingSettings, falling
from fedloom.training.scoring import Scorer


@dataclass(frozen=True)
class SupernetSettings:
    epochs: int = setting(24, "passes over the public images", low=1)
    batch: int = setting(512, "images per step", low=2)
    rate: float = setting(0.4, "learning rate of SGD at the start, falling as a cosine", low=0)
    largest: float = setting(1 / 3, "share of the epochs, the first ones, that train the largest network alone", low=0, high=1)
    sampling: str = setting(
        "random", "what a step trains: one random subnet, or several that use every choice (FairNAS)", choices=("random", "fair")
    )


@dataclass(frozen=True)
class LabelSettings:
    architectures: int = setting(10_240, "different architectures to score", low=8)
    images: int = setting(30, "scoring images per class", low=2)
    calibration: int = setting(512, "training images on which normalisation statistics are measured", low=2)
    half: bool = setting(True, "score in bfloat16 where the device is a GPU")


def train_proxy_supernet(
    supernet: Supernet[Any], proxy: Proxy, settings: SupernetSettings, weights: Weights, first: int, seed: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Epoch by epoch from ``first``: (epochs done, weights).

    The largest network comes first, then its subnets, as in once-for-all (Cai et al., 2020): residual blocks start as the identity, and
    random subnets alone leave them there, so that hardly anything would depend on the architecture.
    """
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
        trained = trainer.train_supernet(weights, subnets, proxy.train, [rate], rng(seed, "supernet", epoch))
        weights = trained.weights
        yield epoch + 1, trained.weights


def score_architectures(
    supernet: Supernet[Any],
    weights: Weights,
    proxy: Proxy,
    architectures: Sequence[Architecture],
    images: Tensor,
    measure: Callable[[Tensor], Tensor],
    settings: LabelSettings,
) -> Iterator[Tensor]:
    """``measure`` of the logits (classes, images, all classes) of each architecture on images (classes, images, c, h, w), one by one."""
    classes, count = images.shape[:2]
    recipe = TrainingSettings(calibration=settings.calibration, execution="sliced")
    scorer = Scorer(supernet, recipe, proxy.pixels)
    pixels = proxy.pixels.normalise(images.flatten(0, 1))
    calibration = scorer.calibration_images(proxy.train)
    with torch.autocast(pixels.device.type, torch.bfloat16, enabled=settings.half and pixels.is_cuda):
        for part in scorer.logits(weights, architectures, pixels, calibration):
            for logits in part:
                yield measure(logits.float().view(classes, count, -1))


def task_measure(tasks: Sequence[Subset], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Accuracies on all these tasks, (tasks,), from the logits of every class's images."""
    sizes = {size: [number for number, task in enumerate(tasks) if len(task) == size] for size in {len(task) for task in tasks}}
    groups = [
        (torch.tensor(numbers, device=device), torch.tensor(np.stack([tasks[n] for n in numbers]), device=device))
        for numbers in sizes.values()
    ]

    def measure(logits: Tensor) -> Tensor:
        result = logits.new_empty(len(tasks))
        for numbers, subsets in groups:
            result[numbers] = subset_accuracies(logits, subsets)
        return result

    return measure


def different_architectures(space: Any, count: int, seed: int) -> np.ndarray:
    """(count, genes) random architectures, no two equal; fewer only if the space has fewer."""
    draw = np.random.default_rng(derive_seed(seed, "labelled architectures"))
    found = np.unique(space.sample_many(draw, 2 * count), axis=0)
    return draw.permutation(found)[:count]
