"""The one round loop. It knows methods and links, and nothing of transport."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from fedloom.core.messages import Instruction, Report
from fedloom.core.method import Method, State


class Link(Protocol):
    """A way to reach clients. An engine is a link."""

    def clients(self) -> Sequence[str]: ...

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        """Reports of the clients that answered; fewer than asked for is no error."""


def run_rounds(method: Method[State], link: Link, state: State, after_round: Callable[[State], None]) -> State:
    while not method.finished(state):
        reports = link.exchange(method.plan(state, link.clients()))
        # Clients answer in any order; the average must not depend on it.
        state = method.absorb(state, sorted(reports, key=lambda report: report.client))
        after_round(state)
    return state


def say_farewell(method: Method[State], link: Link, state: State, done: Collection[str], after_client: Callable[[], None]) -> None:
    """The final participation, client by client; nothing comes back."""
    for client in link.clients():
        if client not in done:
            link.exchange([method.farewell(state, client)])
            after_client()
