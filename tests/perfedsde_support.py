"""PerFedSDE-NAS played by hand: every message, and everything that must not be in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fedloom.assemble import make_bench
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientMemory, ClientSite
from fedloom.core.messages import Instruction, Report
from fedloom.core.method import Answer
from fedloom.data.readers import read
from fedloom.data.splits import Federation, make_split
from fedloom.methods.perfedsde import PerFedSDE
from fedloom.training.scoring import Scored, Scorer


class Played:
    """A method and its clients, ready for a round."""

    def __init__(self, settings: Settings) -> None:
        dataset, device = read(settings.data), torch.device("cpu")
        split = make_split(settings.split, dataset.train.labels, dataset.test.labels, settings.clients, settings.seed)
        self.federation = Federation(dataset, split, device)
        self.method = PerFedSDE(settings.components["perfedsde"], make_bench(settings, dataset, device))
        self.state = self.method.start(settings.seed)
        self.memories: dict[str, ClientMemory] = {}
        self.instructions: list[Instruction] = []
        self.answers: list[Answer] = []

    def site(self, client: str) -> ClientSite:
        return ClientSite(client, self.federation.data_of(client), self.memories.get(client, ClientMemory()))

    def answer(self, instruction: Instruction) -> Answer:
        return self.method.answer(instruction, self.site(instruction.client))

    def round(self) -> list[Answer]:
        instructions = self.method.plan(self.state, self.federation.names)
        answers = [self.answer(instruction) for instruction in instructions]
        self.state = self.method.absorb(self.state, [answer.report for answer in answers])
        self._keep(instructions, answers)
        return answers

    def farewell(self, client: str) -> Answer:
        instruction = self.method.farewell(self.state, client)
        answer = self.answer(instruction)
        self._keep([instruction], [answer])
        return answer

    def _keep(self, instructions: list[Instruction], answers: list[Answer]) -> None:
        self.instructions += instructions
        self.answers += answers
        self.memories |= {answer.report.client: answer.memory for answer in answers}

    @property
    def messages(self) -> list[Instruction | Report]:
        return [*self.instructions, *(answer.report for answer in self.answers)]


@dataclass
class Secrets:
    """What clients computed about themselves."""

    scored: list[list[Scored]] = field(default_factory=list)  # by call
    tasks: list[torch.Tensor] = field(default_factory=list)
    drawn: list[Architecture] = field(default_factory=list)


@contextmanager
def overheard(method: PerFedSDE) -> Iterator[Secrets]:
    """Listens inside the clients."""
    secrets, score = Secrets(), Scorer.score_subnets

    def listen(self: Scorer, *given: Any) -> list[Scored]:
        secrets.scored.append(score(self, *given))
        return secrets.scored[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "score_subnets", listen)
        if method.settings.generator == "diffusion":
            kind = type(method._generator)
            task, draw = kind.task, kind.draw

            def listen_to_task(self: Any, *given: Any) -> Any:
                found = task(self, *given)
                secrets.tasks += [] if found is None else [found]
                return found

            def listen_to_draw(self: Any, *given: Any, **named: Any) -> Any:
                found = draw(self, *given, **named)
                secrets.drawn += found
                return found

            patch.setattr(kind, "task", listen_to_task)
            patch.setattr(kind, "draw", listen_to_draw)
        yield secrets
