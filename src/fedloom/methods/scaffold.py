"""SCAFFOLD (Karimireddy et al., *SCAFFOLD: Stochastic Controlled Averaging for Federated Learning*, ICML 2020, Algorithm 1, option II).

Each client keeps a control variate c_i, the mean gradient of its last local training, and the server the mean c of all of them. Local steps
follow the gradient plus c - c_i, so that clients drift less towards their own data. Both changes leave a client: that of the network, and
that of its control variate.

Deviations: SGD has the momentum and the falling rates of ``training``, so that the way of a client is divided by what a gradient of one
would have moved (``reach``; K times the rate where there is neither). Clients count by their examples. Each client fine-tunes at the end,
without control variates. ``classifier = frozen`` lets the classifier as it was drawn until then, as FedBABU does. Normalisation
statistics are measured at each client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from fedloom.core.boundary import Manifest, Upload
from fedloom.core.client_site import ClientMemory
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import TRAIN, Arrays, Instruction, Report, frozen
from fedloom.core.method import Answer
from fedloom.core.settings import setting
from fedloom.maths.averaging import AVERAGING, moved
from fedloom.maths.drift import control_change, reach
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import FixedNetwork, FixedSettings, FixedState, Visit
from fedloom.training.holds import CLASSIFIER, CLASSIFIERS, Pull
from fedloom.training.local import NetworkJob


@dataclass(frozen=True)
class ScaffoldSettings(FixedSettings):
    classifier: str = setting("trained", CLASSIFIER, choices=CLASSIFIERS)
    server_rate: float = setting(1.0, "how far the server goes along the mean of the updates; 1: all the way", low=0)


@dataclass(frozen=True)
class ScaffoldState(FixedState):
    """control: c, the mean of the clients' control variates."""

    control: Arrays = field(default_factory=dict)


@METHODS.add("scaffold", ScaffoldSettings, "SCAFFOLD: fedavg whose local steps are corrected for the client's own drift")
@dataclass(frozen=True)
class Scaffold(FixedNetwork[ScaffoldState]):
    settings: ScaffoldSettings

    state: ClassVar[type[Any]] = ScaffoldState
    uploads: ClassVar[Manifest] = {
        **FixedNetwork.uploads,
        "control": Upload("how the client's mean gradient, its control variate, changed", like="control"),
    }

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> ScaffoldState:
        if not self.tools.training.rate:
            raise InvalidConfig("scaffold divides by the learning rate, and training.rate is 0. Raise it", key="training.rate")
        if self.tools.training.optimiser != "sgd":
            what = (
                f"scaffold needs to know how far gradients of one move a weight, and training.optimiser is {self.tools.training.optimiser}"
            )
            raise InvalidConfig(f"{what}. Set it to sgd", key="training.optimiser")
        state = super().start(seed)
        if self.settings.classifier == "frozen":
            state = replace(state, weights=frozen(self.tools.with_random_classifier(state.weights, seed)))
        return replace(state, control=frozen({name: np.zeros_like(array) for name, array in state.weights.items()}))

    def instruct(self, state: ScaffoldState, client: str, action: str) -> Instruction:
        usual = super().instruct(state, client, action)
        return replace(usual, arrays={**usual.arrays, "control": state.control}) if action == TRAIN else usual

    def absorb(self, state: ScaffoldState, reports: Sequence[Report]) -> ScaffoldState:
        after = super().absorb(state, reports)
        if not reports:
            return after
        examples = [float(report.facts["examples"]) for report in reports]
        change = AVERAGING[self.settings.averaging].make([report.arrays["control"] for report in reports], [], examples)
        share = len(reports) / max(self.tools.clients, len(reports))  # of all clients: the others' control variates stay
        return replace(after, control=frozen(moved(state.control, _scaled(change, share))))

    def _change(self, reports: Sequence[Report]) -> Arrays:
        change = super()._change(reports)
        return change if self.settings.server_rate == 1 else _scaled(change, self.settings.server_rate)

    # -- client ---------------------------------------------------------------
    def job(self, visit: Visit) -> NetworkJob:
        shared, own = visit.instruction.arrays["control"], self._own(visit)
        slope = self.tools.own({name: array - own[name] for name, array in shared.items()})
        return replace(super().job(visit), pull=Pull(visit.received, 0.0, slope), part=CLASSIFIERS[self.settings.classifier])

    def train(self, visit: Visit) -> Answer:
        tools, job, shared = self.tools, self.job(visit), visit.instruction.arrays["control"]
        with visit.site.clock("train"):
            (trained,) = tools.trainer.train_networks([job])
            report = self.report(visit, trained.weights)
        rates = np.repeat(job.rates, trained.steps.total() // len(job.rates))
        change = control_change(shared, report.arrays["update"], reach(rates, tools.training.momentum))
        diary, _ = tools.test(visit.site, visit.architecture, trained.weights, trained.macs)
        report = replace(report, arrays={**report.arrays, "control": change})
        return Answer(report, ClientMemory(moved(self._own(visit), change)), diary)

    def finish(self, visit: Visit) -> Answer:
        return replace(super().finish(visit), memory=visit.site.memory)

    def _own(self, visit: Visit) -> Arrays:
        """The client's control variate; zero at its first participation."""
        known = visit.site.memory.arrays
        return known or {name: np.zeros_like(array) for name, array in visit.instruction.arrays["control"].items()}


def _scaled(arrays: Arrays, factor: float) -> Arrays:
    return {name: array * array.dtype.type(factor) for name, array in arrays.items()}
