"""FedAvg (McMahan et al., AISTATS 2017, Algorithm 1) on one fixed network of the space, fine-tuned by each client at the end.

Deviation: normalisation statistics are not averaged; every client measures its own on its training images.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import LARGEST_COUNT, Manifest, Upload
from fedloom.core.client_site import ClientSite
from fedloom.core.messages import FINISH, Arrays, Instruction, Report, frozen
from fedloom.core.method import Answer
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.maths.averaging import WHOLE
from fedloom.methods.base import METHODS, AveragingMethod, message


@dataclass(frozen=True)
class FedAvgSettings:
    architecture: str = setting("medium", "the network: smallest, medium, largest, random, or an architecture's id")
    averaging: str = setting("fedavg", "how updates are combined; all but fedavg resist a few hostile clients", choices=WHOLE)

    @classmethod
    def tiny(cls) -> FedAvgSettings:
        return cls(architecture="smallest")


@dataclass(frozen=True)
class FedAvgState:
    round: int
    seed: int
    architecture: str
    weights: Arrays
    carried: Arrays = field(default_factory=dict)  # from round to round, by [averaging]


@METHODS.add("fedavg", FedAvgSettings, "one fixed network averaged over clients, fine-tuned locally at the end")
@dataclass(frozen=True)
class FedAvg(AveragingMethod[FedAvgState]):
    settings: FedAvgSettings

    uploads: ClassVar[Manifest] = {
        "update": Upload("what local training changed in the shared network", like="weights"),
        "examples": Upload("number of training examples, the client's weight in the average", low=1, high=LARGEST_COUNT),
    }

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> FedAvgState:
        architecture = self.tools.space.find(self.settings.architecture, rng(seed, "architecture"))
        return FedAvgState(0, seed, architecture.id, frozen(self.tools.initial_network(seed, architecture)))

    def instruct(self, state: FedAvgState, client: str, action: str) -> Instruction:
        return message(state, client, action, {"weights": state.weights}, {"architecture": state.architecture})

    # -- client ---------------------------------------------------------------
    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        tools = self.tools
        architecture = Architecture.parse(str(instruction.facts["architecture"]))
        received = tools.tensors(instruction.arrays["weights"])
        if instruction.action == FINISH:
            model, diary = tools.personalise(site, architecture, received, instruction.seed)
            return Answer(Report(instruction.client, instruction.round), diary=diary, model=model)
        with site.clock("train"):
            rates = tools.rates(instruction.round, tools.training.epochs)
            trained = tools.trainer.train_network(received, architecture, site.data.train, rates, rng(instruction.seed, "train"))
            update = tools.update(trained.weights, received)
        diary, _ = tools.test(site, architecture, trained.weights, trained.macs)
        report = Report(instruction.client, instruction.round, {"update": update}, {"examples": len(site.data.train)})
        return Answer(report, diary=diary)
