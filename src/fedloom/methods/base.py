"""The registry of methods, and what the server halves of most of them do alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import Manifest
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import EVERYBODY, FINISH, TRAIN, Arrays, Fact, Instruction, Report, frozen
from fedloom.core.method import Method, ServerState, State
from fedloom.core.registry import Registry
from fedloom.core.seeds import derive_seed
from fedloom.maths.averaging import AVERAGING
from fedloom.training.server import Carried
from fedloom.training.tools import Tools

METHODS: Registry[type[Method[Any]]] = Registry("method")


def declared_uploads(name: str) -> Manifest:
    """What a method says may leave a client. Where that depends on settings, with its default ones."""
    entry = METHODS[name]
    found: Any = entry.make.uploads  # a property where it depends on settings
    if isinstance(found, Mapping):
        return found
    make: Any = entry.make
    declared: Manifest = make(entry.settings(), None).uploads
    return declared


class SharedState(ServerState, Protocol):
    @property
    def weights(self) -> Arrays: ...


Shared = TypeVar("Shared", bound=SharedState)
Made = TypeVar("Made", bound=Method[Any])


@dataclass(frozen=True)
class FederatedMethod(Method[State]):
    """Rounds of as many clients as are set, drawn evenly. A method says how it starts, what a client receives, how reports count and
    what a client does."""

    settings: Any
    tools: Tools

    def at(self, client: str) -> Self:
        return own_half(self, client)

    @abstractmethod
    def instruct(self, state: State, client: str, action: str) -> Instruction:
        """What a client receives in a round (action TRAIN) and at the end (FINISH)."""

    def plan(self, state: State, clients: Sequence[str]) -> list[Instruction]:
        drawn = self.tools.draw_participants(state.seed, state.round, list(clients))
        return [self.instruct(state, client, TRAIN) for client in drawn]

    def finished(self, state: State) -> bool:
        return state.round >= self.tools.rounds

    def farewell(self, state: State, client: str) -> Instruction:
        return self.instruct(state, client, FINISH)


@dataclass(frozen=True)
class AveragingMethod(FederatedMethod[Shared]):
    """All clients receive the same weights, and these move by the mean of the updates, by the rule that ``settings.averaging`` names.

    A state with a field ``carried`` (named arrays, empty at first) can have what ``[averaging]`` offers besides. Where the weights are a
    supernet's (``in_parts``), a client whose budget reaches only a part of it receives and returns that part."""

    in_parts: ClassVar[bool] = False

    def instruct(self, state: Shared, client: str, action: str) -> Instruction:
        weights = self.tools.within_reach(state.weights, client) if self.in_parts else state.weights
        return message(state, client, action, {"weights": weights})

    def absorb(self, state: Shared, reports: Sequence[Report]) -> Shared:
        known: Arrays = getattr(state, "carried", {})
        change = self._change(reports) if reports else None
        moved = self.tools.server_steps.after(state.round, Carried(state.weights, known), change)
        after = replace(state, round=state.round + 1, weights=moved.weights)
        kept = frozen({**moved.memory, **self.kept(state, change)})
        if not (known or kept):
            return after
        if "carried" not in {item.name for item in fields(state)}:
            what = (
                f"averaging.momentum and averaging.last need a place in the server's state: {type(state).__name__} has no field `carried`"
            )
            cure = "Leave them out, or add it: `carried: Arrays = field(default_factory=dict)`"
            raise InvalidConfig(f"{what}. {cure}", key="averaging")
        return replace(after, carried=kept)

    def kept(self, state: Shared, change: Arrays | None) -> Arrays:
        """What a method's server carries to the next round besides, from the mean of the updates alone; none: nobody reported."""
        return {}

    def _change(self, reports: Sequence[Report]) -> Arrays:
        """The mean of their updates."""
        coverage = [self._whole(report, "coverage") for report in reports] if "coverage" in self.uploads else []
        examples = [float(report.facts["examples"]) for report in reports]
        return AVERAGING[self.settings.averaging].make([self._whole(report, "update") for report in reports], coverage, examples)

    def _whole(self, report: Report, name: str) -> Arrays:
        arrays = report.arrays[name]
        return self.tools.merged(arrays, report.client) if self.in_parts else arrays


def own_half(method: Made, client: str) -> Made:
    """A method with the tools of one client; the same object for all clients of a tier."""
    known: Any = method
    tools: Tools = known.tools.of(client)
    if tools is known.tools:
        return method
    if "method" not in tools.__dict__ or tools.__dict__["method"][0] is not method:
        tools.__dict__["method"] = (method, replace(known, tools=tools))
    found: Made = tools.__dict__["method"][1]
    return found


def without_sum(reports: Sequence[Report]) -> tuple[list[Report], Arrays | None]:
    """The reports of single clients, and the mean of all their updates if it came as a secure sum: then single reports have none."""
    single = [report for report in reports if report.client != EVERYBODY]
    return single, next((report.arrays["update"] for report in reports if report.client == EVERYBODY), None)


def in_supernet(tools: Tools, instruction: Instruction, report: Report) -> Report | None:
    """A report on a part of the supernet as one on all of it, with coverage; nothing if it has no update."""
    if not report.arrays:
        return None
    architecture = Architecture.parse(str(instruction.facts["architecture"]))
    return replace(report, arrays=tools.spread(architecture, report.arrays["update"]))


def mean_of(method: Method[Any]) -> str:
    """The rule by which updates are averaged, if that mean is all that a method's server makes of them; else nothing."""
    if method.sums_parts:
        return str(method.settings.averaging)  # type: ignore[attr-defined]
    if not isinstance(method, AveragingMethod):
        return ""
    kind = type(method)
    usual = (kind.absorb, kind._change) == (AveragingMethod.absorb, AveragingMethod._change)
    return str(method.settings.averaging) if usual else ""


def trains_parts(method: Method[Any]) -> bool:
    """Whether clients may train parts of what is shared: then more rules make sense than those for whom everybody trains everything."""
    own: Any = getattr(method, "settings", None)
    choices = next((item.metadata.get("choices", ()) for item in fields(own) if item.name == "averaging"), ()) if own else ()
    return method.sums_parts or "coverage" in choices


def message(
    state: ServerState, client: str, action: str, arrays: Mapping[str, Arrays], facts: Mapping[str, Fact] | None = None
) -> Instruction:
    """To one client; its seed is that of the run, the round and the client."""
    return Instruction(client, state.round, action, derive_seed(state.seed, state.round, client), arrays, facts or {})
