"""A federated method of your own, in one file: FedAvgM, federated averaging with momentum at the server.

    fedloom run quickstart 'plugins=["examples/own_method.py"]' method=fedavgm
    fedloom run quickstart 'plugins=["examples/own_method.py"]' method=fedavgm fedavgm.momentum=0.5
    fedloom list methods --plugin examples/own_method.py

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019. The server keeps a
velocity v = momentum v + mean update, and moves the shared network by it.

A method is two halves that share messages and nothing else. All functions are pure: same inputs, same outputs. That is why it can be
stopped and resumed, run on Ray and over a network, without a line here for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import Manifest, Upload
from fedloom.core.client_site import ClientSite
from fedloom.core.messages import FINISH, TRAIN, Arrays, Instruction, Report, frozen
from fedloom.core.method import Answer, Method
from fedloom.core.seeds import derive_seed, rng
from fedloom.core.settings import setting
from fedloom.methods.base import METHODS
from fedloom.training.tools import Tools


@dataclass(frozen=True)
class FedAvgMSettings:
    """The table [fedavgm]: a default, a meaning and limits for each setting. Help texts and refusals follow from them."""

    architecture: str = setting("medium", "the network: smallest, medium, largest, random, or an architecture's id")
    momentum: float = setting(0.7, "share of the last step that the server repeats; 0 is FedAvg", low=0, high=0.99)

    @classmethod
    def tiny(cls) -> FedAvgMSettings:
        """For tests."""
        return cls(architecture="smallest")


@dataclass(frozen=True)
class FedAvgMState:
    """What the server knows between rounds. It is saved field by field, so nothing is forgotten on a resume."""

    round: int
    seed: int
    architecture: str
    weights: Arrays
    velocity: Arrays  # as the weights


@METHODS.add("fedavgm", FedAvgMSettings, "one fixed network, averaged with momentum at the server, fine-tuned locally at the end")
@dataclass(frozen=True)
class FedAvgM(Method[FedAvgMState]):
    settings: FedAvgMSettings
    tools: Tools  # space, supernet, and the tools to train, score and personalise

    # What may leave a client, and nothing else: a report with another field, a wrong shape or a NaN is refused before it leaves.
    uploads: ClassVar[Manifest] = {
        "update": Upload("what local training changed in the shared network", like="weights"),
        "examples": Upload("number of training examples, the client's weight in the average", low=1),
    }

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> FedAvgMState:
        architecture = self.tools.space.find(self.settings.architecture, rng(seed, "architecture"))
        weights = self.tools.initial_network(seed, architecture)
        resting = {name: np.zeros_like(array) for name, array in weights.items()}
        return FedAvgMState(0, seed, architecture.id, frozen(weights), frozen(resting))

    def plan(self, state: FedAvgMState, clients: Sequence[str]) -> list[Instruction]:
        """Who takes part in this round, and what each of them receives."""
        drawn = self.tools.draw_participants(state.seed, state.round, list(clients))
        return [self._instruct(state, client, TRAIN) for client in drawn]

    def absorb(self, state: FedAvgMState, reports: Sequence[Report]) -> FedAvgMState:
        """The next state; fewer reports may have come than were asked for, or none."""
        weights, velocity = state.weights, state.velocity
        if reports:
            examples = np.array([float(report.facts["examples"]) for report in reports])
            shares = (examples / examples.sum()).astype(np.float32)
            velocity = {
                name: np.float32(self.settings.momentum) * array
                + sum(share * report.arrays["update"][name] for share, report in zip(shares, reports, strict=True))
                for name, array in velocity.items()
            }
            weights = {name: array + velocity[name] for name, array in weights.items()}
        return replace(state, round=state.round + 1, weights=frozen(weights), velocity=frozen(velocity))

    def finished(self, state: FedAvgMState) -> bool:
        return state.round >= self.tools.rounds

    def farewell(self, state: FedAvgMState, client: str) -> Instruction:
        """What every client receives at the end, also one that was never drawn."""
        return self._instruct(state, client, FINISH)

    def _instruct(self, state: FedAvgMState, client: str, action: str) -> Instruction:
        seed = derive_seed(state.seed, state.round, client)  # every random draw has an address; global generators are never used
        return Instruction(client, state.round, action, seed, {"weights": state.weights}, {"architecture": state.architecture})

    # -- client ---------------------------------------------------------------
    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        """Only the report leaves. Diary and model stay at the client; a simulator reads the diary for its tables."""
        tools = self.tools
        architecture = Architecture.parse(str(instruction.facts["architecture"]))
        received = tools.tensors(instruction.arrays["weights"])
        if instruction.action == FINISH:  # fine-tune, choose on validation data, test once
            model, diary = tools.personalise(site, architecture, received, instruction.seed)
            return Answer(Report(instruction.client, instruction.round), diary=diary, model=model)
        with site.clock("train"):
            rates = tools.rates(instruction.round, tools.training.epochs)
            trained = tools.trainer.train_network(received, architecture, site.data.train, rates, rng(instruction.seed, "train"))
            update = tools.update(trained.weights, received)
        diary, _ = tools.test(site, architecture, trained.weights, trained.macs)
        report = Report(instruction.client, instruction.round, {"update": update}, {"examples": len(site.data.train)})
        return Answer(report, diary=diary)
