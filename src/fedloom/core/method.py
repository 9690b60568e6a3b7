"""A federated method: two halves that share messages, never memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from fedloom.core.boundary import Manifest
from fedloom.core.client_site import ClientMemory, ClientSite, Diary, PersonalModel
from fedloom.core.messages import Arrays, Instruction, Report


class ServerState(Protocol):
    """A frozen dataclass of arrays, named arrays, numbers and text that counts its rounds; it is saved field by field."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # which every dataclass has

    @property
    def round(self) -> int:
        """Rounds completed."""

    @property
    def seed(self) -> int:
        """Of the run: every random draw follows from it."""


State = TypeVar("State", bound=ServerState)


def per_client() -> Any:
    """A field of a server state that holds an array of each client, by name; empty unless ``start`` says otherwise.

    Newcomers never receive such a field, and its names may change from round to round.
    """
    return field(default_factory=dict, metadata={"per_client": True})


def is_per_client(item: Field[Any]) -> bool:
    return bool(item.metadata.get("per_client"))


@dataclass(frozen=True)
class Answer:
    """What a client makes of an instruction. Only the report may leave; the rest stays at the client."""

    report: Report
    memory: ClientMemory = field(default_factory=ClientMemory)
    diary: Diary = field(default_factory=Diary)
    model: PersonalModel | None = None  # set by the final participation


class Method(ABC, Generic[State]):
    """Made from its settings and a ``training.tools.Tools``. Every function is pure: same inputs, same outputs.

    A round is ``plan -> answer (at each client) -> absorb``; ``finished`` ends the rounds. Then every client, drawn before or
    not, takes part once more: ``farewell`` says what it receives (action FINISH), ``answer`` returns a personal model and an empty report.

    The rest has defaults: ``search``, where personal architectures are searched (client, server, or none where all clients have the
    same), ``spaces``, names of the search spaces the method is defined on (empty: any), ``tiny_needs``, settings that its tests need
    besides its own (``{"split.server": 0.02}``), ``sums_parts``, ``summand``, ``initial``, ``at``, ``welcome``, ``supernet_of``,
    ``epochs`` and ``check_tiers``.
    """

    search: ClassVar[str] = "none"
    spaces: ClassVar[tuple[str, ...]] = ()
    one_network: ClassVar[bool] = False  # ``start`` says which network all clients get
    tiny_needs: ClassVar[Mapping[str, object]] = {}
    sums_parts: ClassVar[bool] = False  # updates of parts can be summed secretly; ``absorb`` takes the sum beside reports without updates

    @property
    @abstractmethod
    def uploads(self) -> Manifest:
        """Every field a Report may carry: the privacy manifest."""

    # -- server ---------------------------------------------------------
    @abstractmethod
    def start(self, seed: int) -> State:
        """Before the first round; refuses settings that cannot work."""

    @abstractmethod
    def plan(self, state: State, clients: Sequence[str]) -> list[Instruction]:
        """Who takes part in this round, and what each of them receives."""

    @abstractmethod
    def absorb(self, state: State, reports: Sequence[Report]) -> State:
        """The next state. Fewer reports may have come than were asked for, or none."""

    @abstractmethod
    def finished(self, state: State) -> bool:
        """Whether the rounds are over."""

    @abstractmethod
    def farewell(self, state: State, client: str) -> Instruction:
        """What a client receives at the end, also one that was never drawn."""

    # -- client ---------------------------------------------------------
    @abstractmethod
    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        """What a client does. Only the report leaves it."""

    # -- what a method may say besides ------------------------------------
    def initial(self, seed: int) -> State:
        """What ``start`` returns, also where something is missing that only a server has. A newcomer reads the server's file by it."""
        return self.start(seed)

    def at(self, client: str) -> Self:
        """The method as one client has it, within its own budget. Whoever asks a client asks this."""
        return self

    def welcome(self, state: State, client: str, site: ClientSite, rounds: int) -> Answer:
        """How a newcomer searches alone, in a supernet that stays as it is. rounds: of its search, where a method searches by rounds."""
        return self.answer(self.farewell(state, client), site)

    def summand(self, instruction: Instruction, report: Report) -> Report | None:
        """What a client adds to secure sums: its update, and its coverage where clients train parts, in the shapes that all clients share.
        Nothing if it has no update."""
        return report if report.arrays else None

    def supernet_of(self, state: State) -> Arrays:
        """The supernet that all clients share; empty where there is none."""
        return {}

    def epochs(self, usual: int) -> int:
        """Passes over its training images that a client makes in a round. usual: ``training.epochs``."""
        return usual

    @staticmethod
    def check_tiers(settings: Any, tiers: int) -> None:
        """Refuses settings of the method that do not fit so many tiers of hardware. Asked when settings are read."""
