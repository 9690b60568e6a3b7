"""The one scoring function: accuracy and loss of networks on examples, normalisation calibrated per network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples
from fedloom.supernets.base import Supernet, Weights
from fedloom.supernets.elastic import Statistics
from fedloom.training.local import Pixels, runs_masked
from fedloom.training.recipe import TrainingSettings

CHUNK = 1000  # images per forward pass when statistics are known
MASKED_ROWS = 4096  # images times architectures per masked pass; bounds memory, not results


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
    def __init__(self, supernet: Supernet[Any], settings: TrainingSettings, pixels: Pixels) -> None:
        self.supernet, self.settings, self.pixels = supernet, settings, pixels

    def calibration_images(self, examples: Examples) -> Tensor:
        """Up to ``calibration`` training images, spread evenly over them (examples may lie sorted by class)."""
        count = min(self.settings.calibration, len(examples))
        spread = torch.linspace(0, len(examples) - 1, count, device=examples.labels.device).round().long()
        return self.pixels.normalise(examples.images[spread])

    @torch.no_grad()
    def score_subnets(self, weights: Weights, architectures: Sequence[Architecture], examples: Examples, train: Examples) -> list[Scored]:
        """Score subnets of a supernet: one pass measures the statistics on training images and the logits on examples."""
        if not architectures:
            return []
        calibration = self.calibration_images(train)
        images = torch.cat([calibration, self.pixels.normalise(examples.images)])
        run = self._logits_masked if runs_masked(self.supernet, self.settings, images.device) else self._logits_sliced
        results = [_measure(logits, examples.labels) for logits in run(images, len(calibration), weights, architectures)]
        # One transfer for all of them: (architectures, 2) accuracy and loss.
        numbers = torch.stack(results).tolist()
        return [Scored(a, Score(accuracy, loss)) for a, (accuracy, loss) in zip(architectures, numbers, strict=True)]

    def _logits_sliced(self, images: Tensor, rows: int, weights: Weights, architectures: Sequence[Architecture]) -> Iterator[Tensor]:
        for architecture in architectures:
            own = self.supernet.take(weights, architecture)
            yield self.supernet.forward(images, own, architecture, Statistics(rows=rows))[rows:]

    def _logits_masked(self, images: Tensor, rows: int, weights: Weights, architectures: Sequence[Architecture]) -> Iterator[Tensor]:
        choices = [architecture.choices for architecture in architectures]
        genes = torch.tensor(choices).to(images.device)
        chunk = max(1, MASKED_ROWS // len(images))
        logits = self.supernet.forward_many(
            images, weights, genes, Statistics(rows=rows), sizes=self.supernet.space.input_sizes(choices), chunk=chunk
        )
        return iter(logits[:, rows:])

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
