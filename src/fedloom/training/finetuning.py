"""The end of every method: networks tuned on their client's data, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples
from fedloom.core.seeds import rng
from fedloom.maths.evidence import kept
from fedloom.supernets.base import Weights
from fedloom.training.holds import Part, Pull
from fedloom.training.local import NetworkJob, Trainer
from fedloom.training.recipe import TrainingSettings, falling
from fedloom.training.scoring import NetworkRequest, Score, Scorer


class Finalist(NamedTuple):
    """A network that may become a client's own. part: what fine-tuning moves; pull: towards what."""

    architecture: Architecture
    plain: Weights
    part: Part = "whole"
    pull: Pull | None = None


@dataclass(frozen=True)
class Tuned:
    """A finalist after fine-tuning at one rate (0: as it came), and what it achieves on the selecting examples."""

    finalist: int
    rate: float
    weights: Weights
    score: Score
    losses: npt.NDArray[np.float64]  # (examples,); empty where the choice does not need them


@dataclass(frozen=True)
class Choice:
    """The network to keep, what the prior finalist came to, and the multiply-accumulates that training took."""

    winner: Tuned
    prior: Tuned
    macs: int

    @property
    def notes(self) -> dict[str, float]:
        """For the client's diary: numbers that there are."""
        notes = {
            "finalist": float(self.winner.finalist),
            "left_prior": float(self.winner.finalist > 0),
            "finetune_rate": self.winner.rate,
            "prior_loss": self.prior.score.loss,
            "chosen_loss": self.winner.score.loss,
        }
        return {name: value for name, value in notes.items() if isfinite(value)}


@dataclass(frozen=True)
class Finetuning:
    trainer: Trainer
    scorer: Scorer
    settings: TrainingSettings

    @property
    def rates(self) -> list[float]:
        """Those that train anything."""
        return [rate for rate in self.settings.finetune_rates if rate and self.settings.finetune_epochs]

    def choose(self, finalists: Sequence[Finalist], train: Examples, selecting: Examples, seed: int) -> Choice:
        """Tune the first finalist, the prior, at every rate and choose one. Tune the others at that rate, then choose a finalist: networks
        that are compared differ in their architecture alone."""

        def tuned(pairs: Sequence[tuple[int, float]]) -> list[Tuned]:
            """Of these finalists at these rates, all of them together."""
            jobs = [self.job(finalists[number], rate, train, seed) for number, rate in pairs if rate]
            trained = self.trainer.train_networks(jobs)
            spent.extend(one.macs for one in trained)
            following = iter(trained)
            weights = [next(following).weights if rate else finalists[number].plain for number, rate in pairs]
            return self._measured(finalists, pairs, weights, train, selecting)

        spent: list[int] = []
        prior = self._best(tuned([(0, 0.0), *((0, rate) for rate in self.rates)]), self._usual)
        others = tuned([(number, prior.rate) for number in range(1, len(finalists))]) if len(finalists) > 1 else []
        return Choice(self._best([prior, *others], 0), prior, sum(spent))

    def _measured(
        self, finalists: Sequence[Finalist], pairs: Sequence[tuple[int, float]], weights: Sequence[Weights], train: Examples, on: Examples
    ) -> list[Tuned]:
        by_evidence = self.settings.choice == "evidence"
        rows = list(zip(pairs, weights, strict=True))
        requests = [NetworkRequest(own, finalists[number].architecture, train, (on,), by_evidence) for (number, _), own in rows]
        measured = self.scorer.score_networks(requests)
        losses = torch.stack([one.losses[0] for one in measured]).cpu().numpy() if by_evidence else np.empty((len(rows), 0))
        return [
            Tuned(number, rate, own, found.scores[0], each)
            for ((number, rate), own), found, each in zip(rows, measured, losses, strict=True)
        ]

    @property
    def _usual(self) -> int:
        """The place of the first of ``finetune_rates`` among the prior's networks: untuned, then at each rate that trains."""
        return int(bool(self.rates) and self.settings.finetune_rates[0] > 0)

    def _best(self, candidates: Sequence[Tuned], first: int) -> Tuned:
        if self.settings.choice == "evidence":
            return candidates[kept([one.losses for one in candidates], self.settings.evidence, first)]
        return min(candidates, key=lambda one: one.score.rank)

    def job(self, finalist: Finalist, rate: float, examples: Examples, seed: int) -> NetworkJob:
        """Fine-tuning that starts at this rate."""
        epochs = self.settings.finetune_epochs
        rates = [falling(rate, epoch / epochs, "cosine") for epoch in range(epochs)]
        return NetworkJob(finalist.plain, finalist.architecture, examples, rates, rng(seed, "finetune"), finalist.part, finalist.pull)
