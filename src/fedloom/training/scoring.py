"""The one scoring function: accuracy and loss of networks on examples, normalisation calibrated per network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples
from fedloom.supernets.base import Supernet, Weights
from fedloom.supernets.elastic import Statistics
from fedloom.training.local import Pixels

CHUNK = 1000  # images per forward pass when statistics are known


@dataclass(frozen=True)
class Score:
    accuracy: float
    loss: float

    @property
    def rank(self) -> tuple[float, float]:
        """Smaller is better: by accuracy, ties by loss."""
        return (-self.accuracy, self.loss)


@dataclass(frozen=True)
class Scored:
    architecture: Architecture
    score: Score


def best_first(candidates: Sequence[Scored]) -> list[Scored]:
    """By accuracy, then loss, then choices: a total order, so that equal scores never depend on the order of arrival."""
    return sorted(candidates, key=lambda c: (*c.score.rank, c.architecture.choices))


class Scorer:
    def __init__(self, supernet: Supernet[Any], pixels: Pixels, calibration: int) -> None:
        self.supernet, self.pixels, self.calibration = supernet, pixels, calibration

    def calibration_images(self, examples: Examples) -> Tensor:
        """Up to ``calibration`` training images, spread evenly over them (examples may lie sorted by class)."""
        count = min(self.calibration, len(examples))
        spread = torch.linspace(0, len(examples) - 1, count, device=examples.labels.device).round().long()
        return self.pixels.normalise(examples.images[spread])

    @torch.no_grad()
    def score_subnets(
        self, weights: Weights, architectures: Sequence[Architecture], examples: Examples, train: Examples
    ) -> list[Scored]:
        """Score subnets of a supernet: one pass each measures the statistics on training images and the logits on examples."""
        calibration = self.calibration_images(train)
        images = torch.cat([calibration, self.pixels.normalise(examples.images)])
        results = []
        for architecture in architectures:
            statistics = Statistics(rows=len(calibration))
            logits = self.supernet.forward(images, self.supernet.take(weights, architecture), architecture, statistics)[len(calibration) :]
            results.append(_measure(logits, examples.labels))
        # One transfer for all of them: (architectures, 2) accuracy and loss.
        numbers = torch.stack(results).tolist() if results else []
        return [Scored(a, Score(accuracy, loss)) for a, (accuracy, loss) in zip(architectures, numbers, strict=True)]

    @torch.no_grad()
    def calibrate(self, plain: Weights, architecture: Architecture, train: Examples) -> Statistics:
        """Normalisation statistics of a plain network on its client's training images."""
        images = self.calibration_images(train)
        statistics = Statistics(rows=len(images))
        self.supernet.forward(images, plain, architecture, statistics)
        return Statistics(statistics)

    @torch.no_grad()
    def score_network(self, plain: Weights, architecture: Architecture, statistics: Statistics, examples: Examples) -> Score:
        parts = [self.pixels.normalise(images) for images in examples.images.split(CHUNK)]
        logits = torch.cat([self.supernet.forward(part, plain, architecture, statistics) for part in parts])
        accuracy, loss = _measure(logits, examples.labels).tolist()
        return Score(accuracy, loss)


def _measure(logits: Tensor, labels: Tensor) -> Tensor:
    """(2,) accuracy and cross-entropy, in float64 so that shares of small sets compare exactly.

    A network that diverged scores 0 and infinity: its argmax would be the first class, which may well be the client's commonest.
    """
    loss = F.cross_entropy(logits, labels).double()
    alive = loss.isfinite()
    hits = (logits.argmax(1) == labels).double().mean()
    return torch.stack([torch.where(alive, hits, 0.0), torch.where(alive, loss, torch.inf)])
