"""FedALA (Zhang et al., *FedALA: Adaptive Local Aggregation for Personalized Federated Learning*, AAAI 2023, Algorithm 1).

A client does not take the shared network as it comes. In the layers near the output it starts from own + mix (shared - own), entry by
entry, where own is what it trained last time. It learns the mix, numbers from 0 to 1, on a part of its training images. The other layers
are the shared ones. Then it trains everything and sends the update, as in FedAvg.

Deviations: the layers near the output are the classifier, or all; the mix is learnt on augmented images; SGD has the momentum and the
falling rates of ``training``; at the end each client mixes once more and fine-tunes. Normalisation statistics are measured at each client.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client_site import ClientMemory, Examples
from fedloom.core.method import Answer
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import FixedNetwork, FixedSettings, FixedState, Visit
from fedloom.supernets.base import Weights
from fedloom.training.local import gradients

OWN, MIX = "own/", "mix/"  # how names begin in a client's memory
LOSSES, STEADY, MOST = 10, 0.1, 50  # the first mix is learnt until the losses of so many epochs deviate less than this, or so many epochs


@dataclass(frozen=True)
class FedALASettings(FixedSettings):
    part: str = setting("head", "the layers that are mixed: the classifier, or the whole network", choices=("head", "whole"))
    share: float = setting(0.8, "share of the training images that the mix is learnt on", low=0.01, high=1)
    rate: float = setting(1.0, "learning rate of the mix", low=0)


@dataclass(frozen=True)
class FedALAState(FixedState):
    pass


class Start(NamedTuple):
    """The network that a client starts from, how it was mixed (empty at its first participation), and what that cost."""

    weights: Weights
    mix: Weights
    macs: int


@METHODS.add("fedala", FedALASettings, "FedALA: each client learns how much of the shared classifier it takes, entry by entry")
@dataclass(frozen=True)
class FedALA(FixedNetwork[FedALAState]):
    settings: FedALASettings

    state: ClassVar[type[Any]] = FedALAState

    def epochs(self, usual: int) -> int:
        return usual + 1

    # -- client ---------------------------------------------------------------
    def train(self, visit: Visit) -> Answer:
        tools, start = self.tools, self.start_of(visit)
        with visit.site.clock("train"):
            (trained,) = tools.trainer.train_networks([replace(self.job(visit), plain=start.weights)])
            report = self.report(visit, trained.weights)
        diary, _ = tools.test(visit.site, visit.architecture, trained.weights, trained.macs + start.macs)
        own = tools.arrays({name: trained.weights[name] for name in self._mixed_names(visit.received)})
        known = {**_begun(OWN, own), **_begun(MIX, tools.arrays(start.mix))}
        return Answer(report, ClientMemory(known), diary)

    def finish(self, visit: Visit) -> Answer:
        start = self.start_of(visit)
        answer = super().finish(visit._replace(received=start.weights))
        return replace(answer, memory=visit.site.memory, diary=replace(answer.diary, trained_macs=answer.diary.trained_macs + start.macs))

    def start_of(self, visit: Visit) -> Start:
        """The shared network, with what is mixed into it by the client's own data."""
        names, known = self._mixed_names(visit.received), visit.site.memory.arrays
        if not known:
            return Start(visit.received, {}, 0)
        shared = {name: visit.received[name] for name in names}
        own = self.tools.own({name: known[OWN + name] for name in names})
        first = MIX + names[0] not in known
        mix: Weights = (
            {name: torch.ones_like(tensor) for name, tensor in own.items()}
            if first
            else self.tools.own({name: known[MIX + name] for name in names})
        )
        with visit.site.clock("mix"):
            return self._learnt(visit, own, shared, mix, MOST if first else 1)

    def _learnt(self, visit: Visit, own: Weights, shared: Weights, mix: Weights, epochs: int) -> Start:
        draw, tools, losses = rng(visit.instruction.seed, "mix"), self.tools, list[float]()
        examples = self._some(visit.site.data.train, draw)
        while len(losses) < epochs and not _steady(losses):
            mix, loss = self._epoch(visit, own, shared, mix, tools.trainer.batches(examples, [self.settings.rate], draw))
            losses.append(loss)
        used = len(examples) - len(examples) % min(tools.training.batch, len(examples))  # those in full batches
        macs = len(losses) * used * tools.space.cost(visit.architecture).macs
        return Start({**visit.received, **mixed(own, shared, mix)}, mix, macs)

    def _epoch(
        self, visit: Visit, own: Weights, shared: Weights, mix: Weights, batches: Iterator[tuple[Tensor, Tensor, float]]
    ) -> tuple[Weights, float]:
        """The mix after some batches, and their mean loss."""
        tools, losses = self.tools, list[Tensor]()
        for images, labels, rate in batches:

            def loss(weights: Weights, images: Tensor = images, labels: Tensor = labels) -> Tensor:
                said = tools.supernet.forward(tools.pixels.normalise(images), weights, visit.architecture)
                losses.append(F.cross_entropy(said, labels))
                return losses[-1]

            network = {**visit.received, **mixed(own, shared, mix)}
            mix = remixed(own, shared, mix, dict(zip(network, gradients(network, loss, own), strict=True)), rate)
        return mix, float(torch.stack(losses).detach().mean())

    def _some(self, examples: Examples, draw: np.random.Generator) -> Examples:
        count = max(1, round(self.settings.share * len(examples)))
        chosen = torch.as_tensor(draw.choice(len(examples), count, replace=False), device=examples.labels.device)
        return Examples(examples.images[chosen], examples.labels[chosen])

    def _mixed_names(self, weights: Weights) -> list[str]:
        return [name for name in weights if self.settings.part == "whole" or self.tools.supernet.in_head(name)]


def mixed(own: Weights, shared: Weights, mix: Weights) -> dict[str, Tensor]:
    """own + mix (shared - own), entry by entry: mix 1 is the shared one."""
    return {name: tensor + mix[name] * (shared[name] - tensor) for name, tensor in own.items()}


def remixed(own: Weights, shared: Weights, mix: Weights, gradient: Weights, rate: float) -> dict[str, Tensor]:
    """A step of gradient descent on the mix, kept between 0 and 1. gradient: of the loss by the mixed weights."""
    return {name: (mix[name] - rate * gradient[name] * (shared[name] - tensor)).clamp(0, 1) for name, tensor in own.items()}


def _steady(means: list[float]) -> bool:
    return len(means) > LOSSES and float(np.std(means[-LOSSES:])) < STEADY


def _begun(beginning: str, arrays: dict[str, Any]) -> dict[str, Any]:
    return {beginning + name: array for name, array in arrays.items()}
