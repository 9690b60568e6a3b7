"""FedNAS (He, Annavaram and Avestimehr, *FedNAS: Federated Deep Learning via Neural Architecture Search*, 2020, Algorithm 1).

In the search rounds all clients train one supernet in which every edge adds up its operations, each counting softmax(alpha). Every step
moves the weights by the training loss, and alpha by the training and the validation loss (MiLeNAS). The server averages both. Then the
strongest operation of each edge makes an architecture, and the remaining rounds train it as FedAvg does.

Deviations and decisions: alpha moves by plain gradient steps (the authors' code has Adam); ``none`` is not among the operations that are
mixed, so every edge keeps one; the remaining rounds go on with the supernet's weights unless ``scratch`` says otherwise; every client
fine-tunes at the end. Normalisation statistics are measured at each client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import Manifest, Upload
from fedloom.core.client_site import ClientSite, Diary
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import FINISH, Arrays, Instruction, Report, frozen
from fedloom.core.method import Answer
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.maths.averaging import AVERAGING, WHOLE
from fedloom.maths.relaxation import Table, softmax, strongest
from fedloom.methods.base import METHODS, message
from fedloom.methods.subnets import PhaseSettings, SearchThenTrain, SubnetState
from fedloom.supernets.base import Weights
from fedloom.training.milenas import Milenas
from fedloom.training.mixtures import Mixtures


@dataclass(frozen=True)
class FedNASSettings(PhaseSettings):
    rate: float = setting(0.01, "learning rate of the weights of operations; raise it for runs of few rounds", low=0)
    weight: float = setting(1.0, "weight of the validation loss in their gradient; the training loss has weight 1", low=0)
    clip: float = setting(5.0, "largest norm of a gradient of the supernet; 0: no clipping", low=0)
    averaging: str = setting("fedavg", "how updates are combined; all but fedavg resist a few hostile clients", choices=WHOLE)


@dataclass(frozen=True)
class FedNASState(SubnetState):
    alphas: Arrays = field(default_factory=dict)  # (2, edges, operations) under the name alphas


@METHODS.add("fednas", FedNASSettings, "FedNAS: one mixed supernet and the weights of its operations are averaged (space=darts)")
@dataclass(frozen=True)
class FedNAS(SearchThenTrain[FedNASState]):
    settings: FedNASSettings

    spaces: ClassVar[tuple[str, ...]] = ("darts",)  # edges must be able to add up their operations
    tiny_needs: ClassVar[Mapping[str, object]] = {"darts.operations": "s2"}  # it trains all operations at once
    state: ClassVar[type[Any]] = FedNASState

    @property
    def uploads(self) -> Manifest:
        alphas = Upload("what local training changed in the weights of operations; nothing after the search", like="alphas")
        return {**super().uploads, "alphas": alphas}

    @cached_property
    def mixtures(self) -> Mixtures:
        return Mixtures(self.tools)

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> FedNASState:
        if self.tools.limited:
            cure = "Remove budget.*, or choose another method"
            raise InvalidConfig(f"fednas trains all operations at once and cannot keep a budget. {cure}", key="budget")
        return replace(super().start(seed), alphas=frozen({"alphas": np.zeros(self.mixtures.offered.shape)}))

    def subnet(self, state: FedNASState, client: str, final: bool) -> Architecture:
        return self._found(state.alphas["alphas"])

    def _found(self, alphas: Table) -> Architecture:
        """Of every edge the strongest operation."""
        return self.mixtures.architecture(strongest(alphas, self.mixtures.offered))

    def instruct(self, state: FedNASState, client: str, action: str) -> Instruction:
        """The whole supernet and alphas while searching; then a part, as of every subnet."""
        if action == FINISH or state.round >= self.searched:
            usual = super().instruct(state, client, action)
            return replace(usual, arrays={**usual.arrays, "alphas": {}})
        return message(state, client, action, {"weights": state.weights, "alphas": state.alphas})

    def change(self, state: FedNASState, reports: Sequence[Report]) -> Arrays | None:
        return super().change(state, reports) if state.round >= self.searched else self._mean("update", reports)

    def learned(self, state: FedNASState, reports: Sequence[Report]) -> FedNASState:
        if state.round >= self.searched or not reports:
            return state
        return replace(state, alphas=frozen({"alphas": state.alphas["alphas"] + self._mean("alphas", reports)["alphas"]}))

    def _mean(self, name: str, reports: Sequence[Report]) -> Arrays:
        examples = [float(report.facts["examples"]) for report in reports]
        return AVERAGING[self.settings.averaging].make([report.arrays[name] for report in reports], [], examples)

    # -- client ---------------------------------------------------------------
    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        if instruction.arrays["alphas"]:
            return self._search(instruction, site, instruction.arrays["alphas"]["alphas"])
        answer, final = super().answer(instruction, site), instruction.action == FINISH
        report = answer.report if final else replace(answer.report, arrays={**answer.report.arrays, "alphas": {}})
        return replace(answer, report=report)

    def _search(self, instruction: Instruction, site: ClientSite, before: Table) -> Answer:
        tools, own, data = self.tools, self.settings, site.data
        received = tools.tensors(instruction.arrays["weights"])
        rates = tools.rates(instruction.round, tools.training.epochs)
        draws = rng(instruction.seed, "train"), rng(instruction.seed, "validation")
        milenas = Milenas(self.mixtures, own.rate, own.weight)
        with site.clock("train"):
            trained, alphas, macs = milenas.train(received, before, (data.train, data.validation), rates, draws, own.clip)
        arrays = {"update": tools.update(trained, received), "alphas": {"alphas": alphas - before}}
        report = Report(instruction.client, instruction.round, arrays, {"examples": len(data.train)})
        return Answer(report, diary=self._diary(site, trained, alphas, macs))

    def _diary(self, site: ClientSite, weights: Weights, alphas: Table, macs: int) -> Diary:
        """Accuracies are those of the mixture as it is."""
        kept, stored = self.mixtures.offered, sum(tensor.numel() for tensor in weights.values())
        diary = Diary(
            architecture=self._found(alphas).id,
            trained_macs=macs,
            peak_memory_mb=self.mixtures.step_memory_mb(kept, stored, len(site.data.train)),
        )
        return self.mixtures.test(site, weights, kept, softmax(alphas, kept), diary)
