"""Local training: every client alone, the same fixed network, no federation. The floor that any federation must beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import Manifest
from fedloom.core.client_site import ClientSite, Examples
from fedloom.core.messages import FINISH, Instruction, Report
from fedloom.core.method import Answer, Method
from fedloom.core.seeds import derive_seed, rng
from fedloom.core.settings import setting
from fedloom.methods.base import METHODS, own_half
from fedloom.training.local import Trained
from fedloom.training.recipe import rate_of
from fedloom.training.tools import Tools


@dataclass(frozen=True)
class LocalSettings:
    architecture: str = setting("medium", "the network: smallest, medium, largest, random, or an architecture's id")
    epochs: int = setting(60, "epochs each client trains alone", low=1)

    @classmethod
    def tiny(cls) -> LocalSettings:
        return cls(architecture="smallest", epochs=1)


@dataclass(frozen=True)
class LocalState:
    round: int
    seed: int
    architecture: str


@METHODS.add("local", LocalSettings, "every client trains a fixed network alone; nothing is exchanged")
@dataclass(frozen=True)
class Local(Method[LocalState]):
    settings: LocalSettings
    tools: Tools

    uploads: ClassVar[Manifest] = {}
    one_network: ClassVar[bool] = True

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> LocalState:
        return LocalState(0, seed, self.tools.one_for_all(self.settings.architecture, rng(seed, "architecture")).id)

    def plan(self, state: LocalState, clients: Sequence[str]) -> list[Instruction]:
        return []

    def absorb(self, state: LocalState, reports: Sequence[Report]) -> LocalState:
        return state

    def finished(self, state: LocalState) -> bool:
        return True

    def farewell(self, state: LocalState, client: str) -> Instruction:
        facts: dict[str, int | str] = {"seed": state.seed, "architecture": state.architecture}
        return Instruction(client, state.round, FINISH, derive_seed(state.seed, client), facts=facts)

    # -- client ---------------------------------------------------------------
    def at(self, client: str) -> Local:
        return own_half(self, client)

    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        tools, seed = self.tools, int(instruction.facts["seed"])
        architecture = Architecture.parse(str(instruction.facts["architecture"]))
        plain = tools.tensors(tools.initial_network(seed, architecture))
        rates = [rate_of(tools.training, epoch, self.settings.epochs) for epoch in range(self.settings.epochs)]

        def train(examples: Examples) -> Trained:
            return tools.trainer.train_network(plain, architecture, examples, rates, rng(instruction.seed, "train"))

        with site.clock("train"):
            trained = train(site.data.train)
        model, diary = tools.keep(site, architecture, trained.weights, trained.macs, again=train)
        return Answer(Report(instruction.client, instruction.round), diary=diary, model=model)
