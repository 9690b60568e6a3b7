"""What methods on one fixed network of a space do alike: how they start, what a client receives, its local training and its end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import LARGEST_COUNT, Manifest, Upload
from fedloom.core.client_site import ClientSite
from fedloom.core.messages import FINISH, Arrays, Instruction, Report, frozen
from fedloom.core.method import Answer
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.maths.averaging import WHOLE
from fedloom.methods.base import AveragingMethod, message
from fedloom.supernets.base import Weights
from fedloom.training.local import NetworkJob

EXAMPLES = Upload("number of training examples, the client's weight in the average", low=1, high=LARGEST_COUNT)


@dataclass(frozen=True)
class FixedSettings:
    architecture: str = setting("medium", "the network: smallest, medium, largest, random, or an architecture's id")
    averaging: str = setting("fedavg", "how updates are combined; all but fedavg resist a few hostile clients", choices=WHOLE)

    @classmethod
    def tiny(cls) -> Self:
        return cls(architecture="smallest")


@dataclass(frozen=True)
class FixedState:
    """weights: what is shared, of the network or of a part of it."""

    round: int
    seed: int
    architecture: str
    weights: Arrays
    carried: Arrays = field(default_factory=dict)  # from round to round, by [averaging]


Fixed = TypeVar("Fixed", bound=FixedState)


class Visit(NamedTuple):
    """One participation of a client, and the shared weights that it received, on the device."""

    instruction: Instruction
    site: ClientSite
    architecture: Architecture
    received: Weights


@dataclass(frozen=True)
class FixedNetwork(AveragingMethod[Fixed]):
    """What differs from FedAvg a method says itself: the ``job`` of local training, or what a client does in ``train`` and ``finish``."""

    settings: Any

    one_network: ClassVar[bool] = True
    state: ClassVar[type[Any]]  # a method's own: a run's file says whose state it holds
    uploads: ClassVar[Manifest] = {
        "update": Upload("what local training changed in the shared network", like="weights"),
        "examples": EXAMPLES,
    }

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> Fixed:
        architecture = self.tools.one_for_all(self.settings.architecture, rng(seed, "architecture"))
        state: Fixed = self.state(0, seed, architecture.id, frozen(self.tools.first_network(seed, architecture)))
        return state

    def instruct(self, state: Fixed, client: str, action: str) -> Instruction:
        return message(state, client, action, {"weights": state.weights}, {"architecture": state.architecture})

    # -- client ---------------------------------------------------------------
    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        architecture = Architecture.parse(str(instruction.facts["architecture"]))
        visit = Visit(instruction, site, architecture, self.tools.tensors(instruction.arrays["weights"]))
        return self.finish(visit) if instruction.action == FINISH else self.train(visit)

    def job(self, visit: Visit) -> NetworkJob:
        """Local training of what was received."""
        rates, draw = self.rates(visit), rng(visit.instruction.seed, "train")
        return NetworkJob(visit.received, visit.architecture, visit.site.data.train, rates, draw)

    def rates(self, visit: Visit) -> list[float]:
        return self.tools.rates(visit.instruction.round, self.tools.training.epochs)

    def report(self, visit: Visit, trained: Weights) -> Report:
        """What training changed in the weights that were received; others do not leave."""
        shared = trained if trained.keys() == visit.received.keys() else {name: trained[name] for name in visit.received}
        update = self.tools.update(shared, visit.received)
        return Report(visit.instruction.client, visit.instruction.round, {"update": update}, {"examples": len(visit.site.data.train)})

    def train(self, visit: Visit) -> Answer:
        with visit.site.clock("train"):
            (trained,) = self.tools.trainer.train_networks([self.job(visit)])
            report = self.report(visit, trained.weights)
        diary, _ = self.tools.test(visit.site, visit.architecture, trained.weights, trained.macs)
        return Answer(report, diary=diary)

    def finish(self, visit: Visit) -> Answer:
        model, diary = self.tools.personalise(visit.site, visit.architecture, visit.received, visit.instruction.seed)
        return Answer(Report(visit.instruction.client, visit.instruction.round), diary=diary, model=model)


@dataclass(frozen=True)
class BodyState(FixedState):
    """weights: the body's. head: the classifier as it was at first."""

    head: Arrays = field(default_factory=dict)


Body = TypeVar("Body", bound=BodyState)


@dataclass(frozen=True)
class SharedBody(FixedNetwork[Body]):
    """Only the body is averaged: no classifier leaves a client. Clients receive the classifier that all of them start with."""

    uploads: ClassVar[Manifest] = {
        "update": Upload("what local training changed in the shared body of the network; the classifier stays", like="weights"),
        "examples": EXAMPLES,
    }

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> Body:
        whole, in_head = super().start(seed), self.tools.supernet.in_head
        head, body = ({name: array for name, array in whole.weights.items() if in_head(name) == wanted} for wanted in (True, False))
        return replace(whole, weights=frozen(body), head=frozen(head))

    def instruct(self, state: Body, client: str, action: str) -> Instruction:
        return message(state, client, action, {"weights": state.weights, "head": state.head}, {"architecture": state.architecture})

    # -- client ---------------------------------------------------------------
    def head(self, visit: Visit) -> Weights:
        """The classifier that a client starts from."""
        return self.tools.own(visit.instruction.arrays["head"])

    def network(self, visit: Visit) -> Weights:
        return {**visit.received, **self.head(visit)}

    def job(self, visit: Visit) -> NetworkJob:
        return replace(super().job(visit), plain=self.network(visit), part="body")
