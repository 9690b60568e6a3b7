"""The one round loop. It knows methods and links, and nothing of transport."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from fedloom.core.messages import Report
from fedloom.core.method import Method, State
from fedloom.engine.base import Link

Absorb = Callable[[State, Sequence[Report]], State]


def run_rounds(
    method: Method[State], link: Link, state: State, after_round: Callable[[State], None], absorb: Absorb[State] | None = None
) -> State:
    """absorb: in place of the method's."""
    absorb = absorb or method.absorb
    while not method.finished(state):
        reports = link.exchange(method.plan(state, link.clients()))
        # Clients answer in any order; the average must not depend on it.
        state = absorb(state, sorted(reports, key=lambda report: report.client))
        after_round(state)
    return state


def say_farewell(method: Method[State], link: Link, state: State, done: Collection[str], after_some: Callable[[], None]) -> None:
    """The final participation, as many clients at a time as the link keeps busy; nothing comes back."""
    waiting = [client for client in link.clients() if client not in done]
    for start in range(0, len(waiting), link.at_once):
        link.exchange([method.farewell(state, client) for client in waiting[start : start + link.at_once]])
        after_some()
