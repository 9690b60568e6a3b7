"""How a client trains: the settings behind ``[training]``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.settings import setting
from fedloom.training.optimisers import OPTIMISERS, Optimiser


@dataclass(frozen=True)
class TrainingSettings:
    epochs: int = setting(5, "local epochs per participation; perfedsde uses perfedsde.iterations instead, one epoch each", low=1)
    batch: int = setting(50, "examples per step", low=2)
    optimiser: str = setting("sgd", "SGD with momentum, with Nesterov's momentum, or AdamW, whose rates are far lower", choices=OPTIMISERS)
    rate: float = setting(0.05, "learning rate at the start", low=0)
    schedule: str = setting("cosine", "how the rate falls over all rounds", choices=("cosine", "constant"))
    warmup: float = setting(
        0.0, "share of all rounds in which the rate rises evenly from near 0, so it holds for any number", low=0, high=1
    )
    momentum: float = setting(0.9, "momentum; of AdamW the share of the last mean gradient in the next (beta 1)", low=0, high=1)
    weight_decay: float = setting(5e-4, "weight decay (not for biases and normalisation); of AdamW times the rate, so far higher", low=0)
    label_smoothing: float = setting(0.1, "share of the target spread over all classes", low=0, high=1)
    crop: int = setting(4, "augmentation: random crop after padding by this many pixels; 0: off", low=0)
    flip: bool = setting(True, "augmentation: random horizontal flip")
    cutout: int = setting(8, "augmentation: side of a random square that is blanked, in pixels; 0: off", low=0)
    calibration: int = setting(256, "training images that measure normalisation statistics before scoring", low=2)
    finetune_epochs: int = setting(10, "epochs of local fine-tuning at the end; 0: off", low=0)
    finetune_rates: tuple[float, ...] = setting((0.02, 0.005, 0.001), "rates to try for fine-tuning; validation data choose", low=0)
    choice: str = setting(
        "accuracy",
        "which fine-tuned network a client keeps: the most accurate on validation data (ties: lowest loss), untuned among them; or, by "
        "evidence, the one tuned at the first of finetune_rates, unless another's validation loss is clearly lower",
        choices=("accuracy", "evidence"),
    )
    evidence: float = setting(
        1.0, "choice=evidence: clearly lower is by more than this many standard errors of the paired loss differences per image", low=0
    )
    rejoin: bool = setting(
        False, "train what was chosen once more, from the same start, on training and validation images together; test that network"
    )
    execution: str = setting(
        "auto",
        "how networks run: sliced, masked (static shapes), auto: the faster; reference: sliced, one at a time, nothing reused",
        choices=("auto", "sliced", "masked", "reference"),
    )
    precision: str = setting(
        "auto",
        "of activations: full (float32), half (bfloat16; weights, moments and sums stay float32), or auto: half on a GPU",
        choices=("auto", "full", "half"),
    )


def computing(settings: TrainingSettings, weights: Tensor) -> torch.dtype:
    """The precision of activations."""
    half = settings.precision == "half" or (settings.precision == "auto" and weights.is_cuda and settings.execution != "reference")
    return torch.bfloat16 if half else weights.dtype


def falling(rate: float, done: float, schedule: str) -> float:
    """The learning rate after this share of the training."""
    return rate if schedule == "constant" else rate * 0.5 * (1 + math.cos(math.pi * done))


def rate_of(settings: TrainingSettings, epoch: int, epochs: int, start: float | None = None) -> float:
    """The learning rate of one epoch of a training of so many. Warm-up rises epoch by epoch; the fall goes on beside it."""
    first = settings.rate if start is None else start
    risen = min(1.0, (epoch + 1) / (settings.warmup * epochs)) if settings.warmup else 1.0
    return falling(first, epoch / epochs, settings.schedule) * risen


def optimiser_of(settings: TrainingSettings) -> Optimiser:
    return OPTIMISERS[settings.optimiser](settings.momentum)
