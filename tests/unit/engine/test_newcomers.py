"""What newcomers may have of a server's state: what is marked as single clients' stays behind, whatever a state begins with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedloom.core.messages import Arrays
from fedloom.core.method import per_client
from fedloom.engine.newcomers import shared_state
from fedloom.engine.store import Store


@dataclass(frozen=True)
class State:
    round: int
    seed: int
    velocity: Arrays  # all clients', and empty before the first round
    scores: Arrays = per_client()


INITIAL = State(0, 5, {}, {"first": np.array(0.5)})  # of the first client something is known from the start
LATER = State(3, 5, {"w": np.ones(2)}, {"second": np.array(0.7)})


def test_newcomers_get_what_is_shared_and_nothing_of_single_clients() -> None:
    assert shared_state(LATER) == replace(LATER, scores={})
    assert shared_state(INITIAL) == replace(INITIAL, scores={})


def test_clients_may_come_and_go_between_start_and_resume(tmp_path: Path) -> None:
    Store(tmp_path).save_state(LATER, LATER.round)
    resumed = Store(tmp_path).load_state(INITIAL)
    assert resumed is not None and list(resumed.velocity) == ["w"] and list(resumed.scores) == ["second"]


def test_newcomers_can_read_it(tmp_path: Path) -> None:
    Store(tmp_path).save_state(shared_state(LATER), LATER.round)
    received = Store(tmp_path).load_state(shared_state(INITIAL))
    assert received is not None and list(received.velocity) == ["w"] and received.scores == {}
