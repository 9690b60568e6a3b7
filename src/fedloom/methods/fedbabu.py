"""FedBABU (Oh, Kim and Yun, *FedBABU: Towards Enhanced Representation for Federated Image Classification*, ICLR 2022).

Body aggregation and body update: the classifier (head) of one fixed network keeps its random initial weights throughout the rounds, at
every client the same. Clients train and average the body alone. At the end each client fine-tunes the network to its own.

These random weights are drawn as the framework draws a linear layer's. A space may start its classifier much smaller, which a body that
has to learn under it would pay for: no step of the rounds ever enlarges it.

Deviations: the rate of fine-tuning is chosen on validation data, untuned among the candidates; normalisation layers belong to the body,
and their statistics are measured at each client.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedloom.core.messages import Report, frozen
from fedloom.core.method import Answer
from fedloom.core.settings import setting
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import BodyState, FixedSettings, SharedBody, Visit


@dataclass(frozen=True)
class FedBABUSettings(FixedSettings):
    tune: str = setting("whole", "what each client fine-tunes at the end", choices=("whole", "head", "body"))


@dataclass(frozen=True)
class FedBABUState(BodyState):
    pass


@METHODS.add("fedbabu", FedBABUSettings, "FedBABU: the classifier stays random while the body is shared, then each client fine-tunes")
@dataclass(frozen=True)
class FedBABU(SharedBody[FedBABUState]):
    settings: FedBABUSettings

    state: ClassVar[type[Any]] = FedBABUState

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> FedBABUState:
        state = super().start(seed)
        return replace(state, head=frozen(self.tools.with_random_classifier(state.head, seed)))

    # -- client ---------------------------------------------------------------
    def finish(self, visit: Visit) -> Answer:
        tune: Any = self.settings.tune
        model, diary = self.tools.personalise(visit.site, visit.architecture, self.network(visit), visit.instruction.seed, part=tune)
        return Answer(Report(visit.instruction.client, visit.instruction.round), diary=diary, model=model)
