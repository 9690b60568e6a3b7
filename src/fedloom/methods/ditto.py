"""Ditto (Li, Hu, Beirami and Smith, *Ditto: Fair and Robust Federated Learning Through Personalization*, ICML 2021, Algorithm 1).

The shared network w is trained and averaged as in FedAvg. Beside it every client trains a network of its own, v, on its loss plus
lambda / 2 |v - w_t|^2, which holds it near the shared network w_t that it received. v never leaves the client.

Deviations: SGD has the momentum and the falling rates of ``training``; v makes as many steps as w; at the end v is tuned once more near the
final w, and validation data choose the rate, untuned among the candidates, then the strength if there are ``pulls``. Normalisation
statistics are measured at each client.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedloom.core.client_site import ClientMemory
from fedloom.core.messages import Report
from fedloom.core.method import Answer
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import FixedNetwork, FixedSettings, FixedState, Visit
from fedloom.supernets.base import Weights
from fedloom.training.finetuning import Finalist
from fedloom.training.holds import Pull


@dataclass(frozen=True)
class DittoSettings(FixedSettings):
    pull: float = setting(1.0, "lambda: how strongly a client's own network is held near the shared one; 0: not at all", low=0)
    pulls: tuple[float, ...] = setting((), "further lambdas that each client tries at the end, at the rate chosen for pull", low=0)


@dataclass(frozen=True)
class DittoState(FixedState):
    pass


@METHODS.add("ditto", DittoSettings, "Ditto: every client trains a network of its own near the shared one, which is fedavg's")
@dataclass(frozen=True)
class Ditto(FixedNetwork[DittoState]):
    settings: DittoSettings

    state: ClassVar[type[Any]] = DittoState

    def epochs(self, usual: int) -> int:
        return 2 * usual

    # -- client ---------------------------------------------------------------
    def train(self, visit: Visit) -> Answer:
        tools, shared = self.tools, self.job(visit)
        own = replace(shared, plain=self._own(visit), rng=rng(visit.instruction.seed, "own"), pull=self._pull(visit))
        with visit.site.clock("train"):
            trained, personal = tools.trainer.train_networks([shared, own])
            report = self.report(visit, trained.weights)
        diary, _ = tools.test(visit.site, visit.architecture, personal.weights, trained.macs + personal.macs)
        return Answer(report, ClientMemory(tools.arrays(personal.weights)), diary)

    def finish(self, visit: Visit) -> Answer:
        own, pull, seed = self._own(visit), self._pull(visit), visit.instruction.seed
        others = [Finalist(visit.architecture, own, "whole", pull._replace(strength=strength)) for strength in self.settings.pulls]
        model, diary = self.tools.personalise(visit.site, visit.architecture, own, seed, others, pull=pull)
        return Answer(Report(visit.instruction.client, visit.instruction.round), visit.site.memory, diary, model)

    def _own(self, visit: Visit) -> Weights:
        """The client's own network; at its first participation the one that it received."""
        known = visit.site.memory.arrays
        return self.tools.own(known) if known else visit.received

    def _pull(self, visit: Visit) -> Pull:
        return Pull(visit.received, self.settings.pull)
