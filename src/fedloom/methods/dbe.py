"""FedDBE (Zhang et al., *Eliminating Domain Bias for Federated Learning in Representation Space*, NeurIPS 2023, Algorithm 1).

FedAvg with a domain bias eliminator. Each client adds a vector of its own to the features that the classifier sees; it learns the vector
and keeps it, so that the shared layers need not learn what only this client's images have in common. A second term holds the mean features
of every client near one consensus, the mean over the clients of the first round.

Deviations: the consensus is that of the first round's participants, after their local training; the mean features of a step are those of
its batch alone (momentum 1, the authors' value); SGD has the momentum and the falling rates of ``training``; each client fine-tunes at the
end. Normalisation statistics are measured at each client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fedloom.core.boundary import Manifest, Upload
from fedloom.core.client_site import ClientMemory
from fedloom.core.messages import TRAIN, Arrays, Instruction, Report, frozen
from fedloom.core.method import Answer
from fedloom.core.settings import setting
from fedloom.maths.averaging import AVERAGING
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import FixedNetwork, FixedSettings, FixedState, Visit
from fedloom.supernets.base import Weights
from fedloom.training.local import NetworkJob
from fedloom.training.objectives import NearMean

SHIFT, MEAN = NearMean.SHIFT, NearMean.MEAN


@dataclass(frozen=True)
class DBESettings(FixedSettings):
    pull: float = setting(50.0, "kappa: how strongly a client's mean features are held near the consensus; 0: not at all", low=0)


@dataclass(frozen=True)
class DBEState(FixedState):
    """consensus: the mean features, zero until there is one. agreed: whether there is."""

    consensus: Arrays = field(default_factory=dict)
    agreed: int = 0


@METHODS.add("dbe", DBESettings, "FedDBE: fedavg whose clients keep the bias of their own features to themselves")
@dataclass(frozen=True)
class DBE(FixedNetwork[DBEState]):
    settings: DBESettings

    state: ClassVar[type[Any]] = DBEState
    uploads: ClassVar[Manifest] = {
        **FixedNetwork.uploads,
        "consensus": Upload("in its first round the client's mean features; afterwards the consensus that it received", like="consensus"),
    }

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> DBEState:
        state = super().start(seed)
        weight, _ = self.tools.supernet.classifier(self.tools.tensors(state.weights))
        zero = np.zeros(state.weights[weight].shape[1], state.weights[weight].dtype)
        return replace(state, consensus=frozen({MEAN: zero}))

    def instruct(self, state: DBEState, client: str, action: str) -> Instruction:
        usual = super().instruct(state, client, action)
        if action != TRAIN:
            return usual
        return replace(usual, arrays={**usual.arrays, "consensus": state.consensus}, facts={**usual.facts, "agreed": state.agreed})

    def absorb(self, state: DBEState, reports: Sequence[Report]) -> DBEState:
        after = super().absorb(state, reports)
        if state.agreed or not reports:
            return after
        means, examples = [report.arrays["consensus"] for report in reports], [float(report.facts["examples"]) for report in reports]
        return replace(after, consensus=frozen(AVERAGING[self.settings.averaging].make(means, [], examples)), agreed=1)

    # -- client ---------------------------------------------------------------
    def job(self, visit: Visit) -> NetworkJob:
        usual = super().job(visit)
        if not visit.instruction.facts["agreed"]:
            return usual
        beside = self.tools.own({SHIFT: self._shift(visit), MEAN: visit.instruction.arrays["consensus"][MEAN]})
        return replace(usual, plain={**visit.received, **beside}, objective=NearMean(self.settings.pull))

    def train(self, visit: Visit) -> Answer:
        tools, agreed = self.tools, bool(visit.instruction.facts["agreed"])
        with visit.site.clock("train"):
            (trained,) = tools.trainer.train_networks([self.job(visit)])
            network = {name: trained.weights[name] for name in visit.received}
            report = self.report(visit, network)
            consensus = visit.instruction.arrays["consensus"] if agreed else {MEAN: self._mean(visit, network)}
        shift = tools.arrays({SHIFT: trained.weights[SHIFT]}) if agreed else {}
        own = shifted(network, tools.supernet.classifier(network), trained.weights[SHIFT]) if agreed else network
        diary, _ = tools.test(visit.site, visit.architecture, own, trained.macs)
        return Answer(replace(report, arrays={**report.arrays, "consensus": consensus}), ClientMemory(shift), diary)

    def finish(self, visit: Visit) -> Answer:
        known = visit.site.memory.arrays
        names = self.tools.supernet.classifier(visit.received)
        own = shifted(visit.received, names, self.tools.own(known)[SHIFT]) if known else visit.received
        return replace(super().finish(visit._replace(received=own)), memory=visit.site.memory)

    def _shift(self, visit: Visit) -> Any:
        """(features,) the client's own; zero at first."""
        consensus = visit.instruction.arrays["consensus"][MEAN]
        return visit.site.memory.arrays.get(SHIFT, np.zeros_like(consensus))

    def _mean(self, visit: Visit, network: Weights) -> Any:
        """(features,) over the client's training images."""
        tools, train = self.tools, visit.site.data.train
        statistics = tools.scorer.calibrate(network, visit.architecture, train)
        features = tools.scorer.features(network, visit.architecture, statistics, train)
        return tools.arrays({MEAN: features.mean(0)})[MEAN]


def shifted(network: Weights, classifier: tuple[str, str], shift: Tensor) -> Weights:
    """The network whose classifier sees shifted features: W (f + shift) + b is W f + (b + W shift)."""
    weight, bias = classifier
    return {**network, bias: network[bias] + network[weight] @ shift}
