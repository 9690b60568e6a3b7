"""Networks whose edges add up several operations: their losses, gradients, scores and costs at a client."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientSite, Diary
from fedloom.maths.perturbation import Kept, Rank
from fedloom.maths.relaxation import Table
from fedloom.spaces.budget import training_memory_mb
from fedloom.supernets.base import Weights
from fedloom.supernets.elastic import in_float64
from fedloom.supernets.normalisation import Statistics
from fedloom.training.local import gradients
from fedloom.training.packed import Packed, flattened
from fedloom.training.recipe import optimiser_of
from fedloom.training.tools import Tools

NONE = "none"  # the operation of an edge that carries nothing


@dataclass(frozen=True)
class Mixtures:
    """``kept`` says which operations the edges have, ``coefficients``, of the same shape, what each counts: 1 without them."""

    tools: Tools

    @property
    def _space(self) -> Any:
        return self.tools.space

    @property
    def has_none(self) -> bool:
        """Whether an architecture can leave an edge out."""
        return NONE in self._space.operations

    @cached_property
    def offered(self) -> Kept:
        """(2, edges, operations) all but ``none``."""
        one = np.array([name != NONE for name in self._space.operations])
        return np.broadcast_to(one, (2, len(self._space.genes) // 2, len(one)))

    def logits(
        self, images: Tensor, weights: Weights, kept: Kept, statistics: Statistics | None = None, coefficients: Tensor | None = None
    ) -> Tensor:
        supernet: Any = self.tools.supernet
        return supernet.mixture(images, weights, coefficients, statistics, present=kept)

    # -- gradients -------------------------------------------------------------
    def gradient(self, weights: Weights, images: Tensor, labels: Tensor, kept: Kept) -> Tensor:
        """Of the training loss by all weights, packed. images: normalised."""
        return flattened(gradients(weights, lambda leaves: self._loss(images, labels, leaves, kept, None)))

    def gradient_of_both(self, weights: Weights, images: Tensor, labels: Tensor, kept: Kept, given: Table) -> tuple[Tensor, Table]:
        """By the weights, packed, and by the coefficients ``given``."""

        def loss(leaves: Weights) -> Tensor:
            return self._loss(images, labels, leaves, kept, leaves[""])  # no weight has an empty name

        *own, last = gradients({**weights, "": self._tensor(given)}, loss)
        return flattened(own), _table(last)

    def gradient_of_coefficients(self, weights: Weights, images: Tensor, labels: Tensor, kept: Kept, given: Table) -> Table:
        (found,) = gradients({"": self._tensor(given)}, lambda leaves: self._loss(images, labels, weights, kept, leaves[""]))
        return _table(found)

    def _loss(self, images: Tensor, labels: Tensor, weights: Weights, kept: Kept, coefficients: Tensor | None) -> Tensor:
        logits = self.logits(images, weights, kept, coefficients=coefficients)
        return F.cross_entropy(logits, labels, label_smoothing=self.tools.training.label_smoothing)

    def _tensor(self, table: Table) -> Tensor:
        return torch.tensor(table, dtype=torch.float32, device=self.tools.device)

    def moving(self, kept: Kept, weights: Weights) -> Tensor:
        """(entries,) bool, packed: the weights of a mixture among those of a supernet."""
        there = {name for part in self._space.mixture_parts(kept) for name in part.shapes}
        marks = Packed.zeros({name: tensor.shape for name, tensor in weights.items()}, torch.bool, self.tools.device)
        for name, view in marks.views.items():
            view.fill_(name in there or name.startswith("classifier."))
        return marks.flat

    # -- scores ----------------------------------------------------------------
    @torch.no_grad()
    def score(self, site: ClientSite, weights: Weights, kept: Kept) -> Rank:
        """(accuracy, -loss) on validation data, whatever the protocol, normalised by their own moments."""
        examples = site.data.validation
        site.work.scored_macs += len(examples) * self.macs(kept)
        logits = self.logits(self.tools.pixels.normalise(examples.images), weights, kept)
        loss = float(F.cross_entropy(logits, examples.labels))
        return float(in_float64(logits.argmax(1) == examples.labels).mean()), -loss

    def test(self, site: ClientSite, weights: Weights, kept: Kept, coefficients: Table | None, diary: Diary) -> Diary:
        """The diary with the accuracies of the mixture as it is, its statistics measured on training images as every network's are."""
        given = None if coefficients is None else self._tensor(coefficients)
        as_network: Any = _AsNetwork(self, given)
        present: Any = kept
        scorer, data = replace(self.tools, supernet=as_network).scorer, site.data
        with site.clock("test"):
            statistics = scorer.calibrate(weights, present, data.train)
            parts = (data.validation, data.test)
            validation, test = (scorer.score_network(weights, present, statistics, part).accuracy for part in parts)
        return replace(diary, validation_accuracy=validation, test_accuracy=test)

    # -- what it is and costs -----------------------------------------------------
    def architecture(self, chosen: Kept) -> Architecture:
        """chosen: at most one operation per edge; an edge without any carries ``none``."""
        nothing = self._space.operations.index(NONE) if self.has_none else 0
        return self._space.canonical(np.where(chosen.any(-1), chosen.argmax(-1), nothing).reshape(-1).tolist())

    def macs(self, kept: Kept) -> int:
        return int(self._space.mixture_cost(kept).macs)

    def step_memory_mb(self, kept: Kept, stored: int, examples: int) -> float:
        """What a training step of the mixture takes beside so many stored weights."""
        training = self.tools.training
        batch, moments = min(training.batch, examples), optimiser_of(training).moments
        return training_memory_mb(self._space.mixture_cost(kept), stored, batch, moments)


@dataclass(frozen=True)
class _AsNetwork:
    """What a scorer asks of a supernet, for which a mixture takes the place of an architecture."""

    mixtures: Mixtures
    coefficients: Tensor | None

    def forward(self, images: Tensor, weights: Weights, kept: Kept, statistics: Statistics | None = None) -> Tensor:
        return self.mixtures.logits(images, weights, kept, statistics, self.coefficients)


def _table(gradient: Tensor) -> Table:
    return gradient.cpu().double().numpy()
