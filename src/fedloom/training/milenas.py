"""A supernet whose operations count by learned weights, in training (MiLeNAS, He et al., CVPR 2020, first order)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from torch import Tensor

from fedloom.core.client_site import Examples
from fedloom.maths.perturbation import Kept
from fedloom.maths.relaxation import Table, mixed_level_step, softmax
from fedloom.supernets.base import Weights
from fedloom.training.graphs import WeightsInTraining
from fedloom.training.mixtures import Mixtures
from fedloom.training.packed import Packed

Draws = tuple[np.random.Generator, np.random.Generator]  # for the order of training and of validation images
Batch = tuple[Tensor, Tensor]  # normalised images, labels


@dataclass(frozen=True)
class Milenas:
    """rate: what the weights of operations learn by; weight: what the validation loss counts in their gradient."""

    mixtures: Mixtures
    rate: float
    weight: float

    def step(self, views: Weights, kept: Kept, alphas: Table, train: Batch, validation: Batch) -> tuple[Tensor, Table]:
        """The gradient of the training loss by the weights, packed; and the alphas after their step, which both losses make."""
        mixtures, coefficients = self.mixtures, softmax(alphas, kept)
        gradient, on_train = mixtures.gradient_of_both(views, *train, kept, coefficients)
        on_validation = mixtures.gradient_of_coefficients(views, *validation, kept, coefficients)
        return gradient, mixed_level_step(alphas, kept, on_train, on_validation, self.rate, self.weight)

    def train(
        self, received: Weights, alphas: Table, data: tuple[Examples, Examples], rates: Sequence[float], draws: Draws, clip: float
    ) -> tuple[Weights, Table, int]:
        """A whole supernet and its alphas, one rate per epoch; also the multiply-accumulates spent. data: training and validation images;
        clip: the largest norm of a gradient of the weights, 0 for any."""
        tools, kept = self.mixtures.tools, self.mixtures.offered
        place, seen = WeightsInTraining(Packed.of(received), tools.training), 0
        held_out = tools.trainer.batches(data[1], repeat(0.0), draws[1])  # without end
        for images, labels, rate in tools.trainer.batches(data[0], rates, draws[0]):
            others, other_labels, _ = next(held_out)
            both = ((tools.pixels.normalise(images), labels), (tools.pixels.normalise(others), other_labels))
            gradient, alphas = self.step(place.weights.views, kept, alphas, *both)
            place.move(clipped(gradient, clip), rate, None)
            seen += len(labels) + len(other_labels)
        return place.weights, alphas, seen * self.mixtures.macs(kept)


def clipped(gradient: Tensor, most: float) -> Tensor:
    """No longer than this; 0: as it is."""
    return gradient * (most / gradient.norm().clamp_min(most)) if most else gradient
