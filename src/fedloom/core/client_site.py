"""Everything that never leaves a client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fedloom.core.hardware import Hardware
from fedloom.core.messages import Array, Arrays, Fact


class Private:
    """Refuses to be pickled: what is private cannot slip into a message, a queue or a file by accident."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} stays at its client and cannot be pickled")


@dataclass(frozen=True)
class Examples(Private):
    """Labelled images, kept where the training runs."""

    images: Any  # (n, channels, height, width) uint8, a tensor on the training device
    labels: Any  # (n,) int64

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ClientData(Private):
    """A client's own examples. Validation selects; test reports and does nothing else."""

    train: Examples
    validation: Examples
    test: Examples


@dataclass(frozen=True)
class ClientMemory:
    """What a client wants to find again at its next participation: its population, scores, personal state."""

    arrays: Mapping[str, Array] = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)


class Stopwatch:
    """Seconds by stage. Measures; never decides. entered: told of every stage that begins, and of its end by an empty name (or that of
    the stage around it); now: the clock."""

    def __init__(self, entered: Callable[[str], None] | None = None, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._entered, self._now, self._stage = entered, now, ""

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        around = self._stage
        self._enter(stage)
        start = self._now()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + self._now() - start
            self._enter(around)

    def _enter(self, stage: str) -> None:
        self._stage = stage
        if self._entered:
            self._entered(stage)


@dataclass
class Work:
    """What a participation has computed besides training. Counts; never decides."""

    scored_macs: int = 0  # forward multiply-accumulates of every image that scored an architecture or measured its statistics


@dataclass(frozen=True)
class ClientSite(Private):
    """Where a method's client half works: the client's name, data, memory, a clock, what it computes with, and what it has computed."""

    name: str
    data: ClientData
    memory: ClientMemory = field(default_factory=ClientMemory)
    clock: Stopwatch = field(default_factory=Stopwatch)
    hardware: Hardware = field(default_factory=Hardware)
    work: Work = field(default_factory=Work)


@dataclass(frozen=True)
class PersonalModel:
    """A client's own network: the architecture and plain weights of its own."""

    architecture: str
    arrays: Arrays  # weights and normalisation statistics of the plain network


@dataclass(frozen=True)
class Diary:
    """What a participation achieved and cost. It stays at the client; only a simulator reads it for its tables."""

    architecture: str = ""
    validation_accuracy: float | None = None
    test_accuracy: float | None = None
    trained_macs: int = 0  # forward multiply-accumulates of every training example seen
    evaluated_architectures: int = 0
    scored_macs: int = 0  # of their scoring, as if each ran alone; whoever calls the method writes it down
    peak_memory_mb: float = 0.0  # analytic training memory: weights, gradients, momentum, activations
    notes: Mapping[str, float] = field(default_factory=dict)  # further numbers a method wants in the ledger
