"""A federated method: two halves that share messages, never memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from fedloom.core.boundary import Manifest
from fedloom.core.client_site import ClientMemory, ClientSite, Diary, PersonalModel
from fedloom.core.messages import Instruction, Report


class ServerState(Protocol):
    """A frozen dataclass of arrays, named arrays, numbers and text that counts its rounds; it is saved field by field."""

    @property
    def round(self) -> int:
        """Rounds completed."""


State = TypeVar("State", bound=ServerState)


@dataclass(frozen=True)
class Answer:
    """What a client makes of an instruction. Only the report may leave; the rest stays at the client."""

    report: Report
    memory: ClientMemory = field(default_factory=ClientMemory)
    diary: Diary = field(default_factory=Diary)
    model: PersonalModel | None = None  # set by the final participation


class Method(Protocol[State]):
    """Every function is pure: same inputs, same outputs.

    A round is ``plan -> answer (at each client) -> absorb``; ``finished`` ends the rounds. Then every client, drawn before or
    not, takes part once more: ``farewell`` says what it receives (action FINISH), ``answer`` returns a personal model and an empty report.
    """

    @property
    def uploads(self) -> Manifest:
        """Every field a Report may carry: the privacy manifest."""

    # -- server ---------------------------------------------------------
    def start(self, seed: int) -> State: ...
    def plan(self, state: State, clients: Sequence[str]) -> list[Instruction]: ...
    def absorb(self, state: State, reports: Sequence[Report]) -> State: ...
    def finished(self, state: State) -> bool: ...
    def farewell(self, state: State, client: str) -> Instruction: ...

    # -- client ---------------------------------------------------------
    # A method whose server does the searching may also have ``welcome(state, client, site, rounds) -> Answer``: how a newcomer searches
    # alone, in a supernet that stays as it is. Others welcome one with ``farewell`` and ``answer``.
    def answer(self, instruction: Instruction, site: ClientSite) -> Answer: ...
