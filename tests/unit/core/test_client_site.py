"""What never leaves a client: private things cannot be pickled; the stopwatch adds up."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from fedloom.core.client_site import ClientData, ClientSite, Examples, Private, Stopwatch
from fedloom.core.messages import Report


def some() -> Examples:
    return Examples(np.zeros((3, 1, 2, 2), np.uint8), np.zeros(3, np.int64))


def data() -> ClientData:
    return ClientData(some(), some(), some())


PRIVATE: dict[str, Callable[[], Private]] = {"Examples": some, "ClientData": data, "ClientSite": lambda: ClientSite("a", data())}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", PRIVATE)
def test_private_things_cannot_be_pickled(kind: str, protocol: int) -> None:
    with pytest.raises(TypeError, match=f"{kind} stays at its client"):
        pickle.dumps(PRIVATE[kind](), protocol)


@pytest.mark.parametrize("kind", PRIVATE)
def test_nor_inside_something_else(kind: str) -> None:
    thing = PRIVATE[kind]()
    for wrapped in ([thing], {"x": thing}, Report("a", 0, facts={"examples": thing})):  # type: ignore[dict-item]
        with pytest.raises(TypeError, match="stays at its client"):
            pickle.dumps(wrapped)
    with pytest.raises(TypeError, match="stays at its client"):
        copy.deepcopy(thing)


def test_examples_count_labels() -> None:
    assert len(some()) == 3


def test_every_site_has_a_memory_and_a_clock_of_its_own() -> None:
    one, other = ClientSite("a", data()), ClientSite("b", data())
    assert one.clock is not other.clock
    assert one.memory.arrays is not other.memory.arrays


@pytest.fixture
def ticks() -> list[float]:
    """Times that the stopwatch will read, first to last."""
    return []


def test_the_stopwatch_adds_up_by_stage(ticks: list[float]) -> None:
    ticks += [10.0, 12.0, 20.0, 20.5, 30.0, 34.0]
    clock = Stopwatch(now=lambda: ticks.pop(0))
    for stage in ("train", "score", "train"):
        with clock(stage):
            pass
    assert clock.seconds == {"train": 6.0, "score": 0.5}


def test_nested_stages_are_measured_each(ticks: list[float]) -> None:
    ticks += [0.0, 1.0, 3.0, 10.0]
    clock = Stopwatch(now=lambda: ticks.pop(0))
    with clock("outer"), clock("inner"):
        pass
    assert clock.seconds == {"inner": 2.0, "outer": 10.0}


def test_a_stage_that_fails_still_counts(ticks: list[float]) -> None:
    ticks += [0.0, 2.0]
    clock = Stopwatch(now=lambda: ticks.pop(0))
    with pytest.raises(RuntimeError), clock("train"):
        raise RuntimeError
    assert clock.seconds == {"train": 2.0}


def test_who_listens_hears_when_a_stage_begins_and_ends() -> None:
    heard: list[str] = []
    clock = Stopwatch(heard.append)
    with clock("train"), clock("inner"):
        pass
    with pytest.raises(RuntimeError), clock("test"):
        raise RuntimeError
    assert heard == ["train", "inner", "train", "", "test", ""]
