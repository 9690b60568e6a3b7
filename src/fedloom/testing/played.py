"""A method played by hand, round by round, with every message at hand."""

from __future__ import annotations

from typing import Any

import torch

from fedloom.assemble.builder import build
from fedloom.config import Settings
from fedloom.core.client_site import ClientMemory, ClientSite
from fedloom.core.messages import Instruction, Report
from fedloom.core.method import Answer
from fedloom.data.readers import read
from fedloom.data.splits import Federation, make_split


class Played:
    """A method and its clients, ready for a round."""

    def __init__(self, settings: Settings) -> None:
        dataset, device = read(settings.data), torch.device("cpu")
        split = make_split(settings.split, dataset.train.labels, dataset.test.labels, settings.clients, settings.seed)
        built = build(settings, dataset, device)
        self.federation, self.tools = Federation(dataset, split, device), built.tools
        self.method: Any = built.method
        self.state = self.method.start(settings.seed)
        self.memories: dict[str, ClientMemory] = {}
        self.instructions: list[Instruction] = []
        self.answers: list[Answer] = []

    def site(self, client: str, memory: ClientMemory | None = None) -> ClientSite:
        return ClientSite(client, self.federation.data_of(client), memory or self.memories.get(client, ClientMemory()))

    def answer(self, instruction: Instruction, memory: ClientMemory | None = None) -> Answer:
        answer = self.method.at(instruction.client).answer(instruction, self.site(instruction.client, memory))
        assert isinstance(answer, Answer), f"answer must return an Answer, not {type(answer).__name__}"
        return answer

    def round(self) -> list[Answer]:
        instructions = self.method.plan(self.state, self.federation.names)
        answers = [self.answer(instruction) for instruction in instructions]
        self.absorb(instructions, answers)
        return answers

    def absorb(self, instructions: list[Instruction], answers: list[Answer]) -> None:
        """The end of a round."""
        self.state = self.method.absorb(self.state, [answer.report for answer in answers])
        self._keep(instructions, answers)

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
