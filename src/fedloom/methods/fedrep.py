"""FedRep (Collins et al., *Exploiting Shared Representations for Personalized Federated Learning*, ICML 2021, Algorithm 1).

The body of one fixed network is shared; every client has a classifier (head) of its own. In a round a client first trains its head on the
body that it received, then the body under that head. Only the update of the body leaves; the head stays in the client's memory.

Deviations: heads start alike; SGD has the momentum and the falling rates of ``training``; at the end each client tunes its head, and
validation data choose the rate. Normalisation layers belong to the body; their statistics are measured at each client.
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
from fedloom.methods.fixed import BodyState, FixedSettings, SharedBody, Visit
from fedloom.supernets.base import Weights


@dataclass(frozen=True)
class FedRepSettings(FixedSettings):
    head_epochs: int = setting(10, "epochs in which a client trains its head, before training.epochs of the body", low=1)

    @classmethod
    def tiny(cls) -> FedRepSettings:
        return cls(architecture="smallest", head_epochs=1)


@dataclass(frozen=True)
class FedRepState(BodyState):
    pass


@METHODS.add("fedrep", FedRepSettings, "FedRep: the body of one fixed network is shared, every client has its own classifier")
@dataclass(frozen=True)
class FedRep(SharedBody[FedRepState]):
    settings: FedRepSettings

    state: ClassVar[type[Any]] = FedRepState

    def epochs(self, usual: int) -> int:
        return self.settings.head_epochs + usual

    # -- client ---------------------------------------------------------------
    def head(self, visit: Visit) -> Weights:
        """The client's own; at its first participation the one that all start with."""
        known = visit.site.memory.arrays
        return self.tools.own(known) if known else super().head(visit)

    def train(self, visit: Visit) -> Answer:
        tools, body = self.tools, self.job(visit)
        rates = tools.rates(visit.instruction.round, self.settings.head_epochs)
        with visit.site.clock("train"):
            (first,) = tools.trainer.train_networks([replace(body, rates=rates, rng=rng(visit.instruction.seed, "head"), part="head")])
            (trained,) = tools.trainer.train_networks([replace(body, plain=first.weights)])
            report = self.report(visit, trained.weights)
        diary, _ = tools.test(visit.site, visit.architecture, trained.weights, first.macs + trained.macs)
        own = {name: tensor for name, tensor in trained.weights.items() if tools.supernet.in_head(name)}
        return Answer(report, ClientMemory(tools.arrays(own)), diary)

    def finish(self, visit: Visit) -> Answer:
        model, diary = self.tools.personalise(visit.site, visit.architecture, self.network(visit), visit.instruction.seed, part="head")
        return Answer(Report(visit.instruction.client, visit.instruction.round), visit.site.memory, diary, model)
