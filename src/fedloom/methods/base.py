"""The registry of methods, and what the server halves of most of them do alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from fedloom.core.messages import FINISH, TRAIN, Arrays, Fact, Instruction, Report, frozen
from fedloom.core.method import Method, ServerState, State
from fedloom.core.registry import Registry
from fedloom.core.seeds import derive_seed
from fedloom.maths.averaging import AVERAGING, moved
from fedloom.training.tools import Tools

METHODS: Registry[type[Method[Any]]] = Registry("method")


class SharedState(ServerState, Protocol):
    @property
    def weights(self) -> Arrays: ...


Shared = TypeVar("Shared", bound=SharedState)


@dataclass(frozen=True)
class FederatedMethod(Method[State]):
    """Rounds of as many clients as are set, drawn evenly. A method says how it starts, what a client receives, how reports count and
    what a client does."""

    settings: Any
    tools: Tools

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
    """All clients receive the same weights, and these move by the mean of the updates, by the rule that ``settings.averaging`` names."""

    def instruct(self, state: Shared, client: str, action: str) -> Instruction:
        return message(state, client, action, {"weights": state.weights})

    def absorb(self, state: Shared, reports: Sequence[Report]) -> Shared:
        after = replace(state, round=state.round + 1)
        if not reports:
            return after
        coverage = [report.arrays["coverage"] for report in reports] if "coverage" in self.uploads else []
        examples = [float(report.facts["examples"]) for report in reports]
        mean = AVERAGING[self.settings.averaging].make([report.arrays["update"] for report in reports], coverage, examples)
        return replace(after, weights=frozen(moved(state.weights, mean)))


def message(
    state: ServerState, client: str, action: str, arrays: Mapping[str, Arrays], facts: Mapping[str, Fact] | None = None
) -> Instruction:
    """To one client; its seed is that of the run, the round and the client."""
    return Instruction(client, state.round, action, derive_seed(state.seed, state.round, client), arrays, facts or {})
