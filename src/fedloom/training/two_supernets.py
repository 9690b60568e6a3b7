"""SPIDER's training (Mushtaq et al., TMLR 2023, Algorithm 1): the shared supernet, and a client's own that is held near it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from fedloom.core.client_site import Examples
from fedloom.maths.perturbation import Kept, decided
from fedloom.maths.relaxation import Table, softmax
from fedloom.supernets.base import Weights
from fedloom.training.graphs import WeightsInTraining
from fedloom.training.milenas import Draws, Milenas, clipped
from fedloom.training.mixtures import Mixtures
from fedloom.training.packed import Packed, flattened


@dataclass(frozen=True)
class OwnSupernet:
    """A client's own: weights, what is left of it, and under milenas how strong its operations are."""

    weights: Weights
    kept: Kept
    alphas: Table | None = None

    @property
    def coefficients(self) -> Table | None:
        """While milenas searches."""
        return None if self.alphas is None or decided(self.kept).all() else softmax(self.alphas, self.kept)


@dataclass(frozen=True)
class TwoSupernets:
    """``sharing``: lambda; ``clip``: the largest norm of a gradient of the shared supernet, 0 for any; ``rate`` and ``weight``: of
    milenas, what the alphas learn by and what the validation loss counts in their gradient."""

    mixtures: Mixtures
    sharing: float
    clip: float
    rate: float
    weight: float

    def train(
        self, received: Weights, own: OwnSupernet, train: Examples, validation: Examples, rates: Sequence[float], draws: Draws
    ) -> tuple[Weights, OwnSupernet, int]:
        """In every mini-batch a step of the shared supernet, then one of the own; also the multiply-accumulates spent.

        rates: one per epoch. Only alphas learn from validation images."""
        mixtures, tools = self.mixtures, self.mixtures.tools
        shared, local = (WeightsInTraining(Packed.of(weights), tools.training) for weights in (received, own.weights))
        anchor, moving = flattened(received.values()), mixtures.moving(own.kept, received)
        held_out = tools.trainer.batches(validation, repeat(0.0), draws[1])  # without end
        seen, seen_held_out, milenas = 0, 0, Milenas(mixtures, self.rate, self.weight)
        for images, labels, rate in tools.trainer.batches(train, rates, draws[0]):
            pixels = tools.pixels.normalise(images)
            gradient = mixtures.gradient(shared.weights.views, pixels, labels, mixtures.offered)
            shared.move(clipped(gradient, self.clip), rate, None)
            views = local.weights.views
            if own.alphas is None or own.coefficients is None:
                gradient = mixtures.gradient(views, pixels, labels, own.kept)
            else:
                others, other_labels, _ = next(held_out)
                seen_held_out += len(other_labels)
                held = tools.pixels.normalise(others), other_labels
                gradient, alphas = milenas.step(views, own.kept, own.alphas, (pixels, labels), held)
                own = replace(own, alphas=alphas)
            local.move(gradient + self.sharing * (local.weights.flat - anchor), rate, moving)
            seen += len(labels)
        macs = seen * mixtures.macs(mixtures.offered) + (seen + seen_held_out) * mixtures.macs(own.kept)
        return shared.weights, replace(own, weights=local.weights), macs
