"""What a report page is made from: a run's folder in memory, the ledger as sums and short lists."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.core.boundary import Manifest
from fedloom.core.privacy import PrivacySettings
from fedloom.core.progress import Progress
from fedloom.core.result import ClientResult, Ledger, LedgerEntry, mean_and_std
from fedloom.engine.store import how_to_go_on
from fedloom.spaces.base import SearchSpace

BASELINES = ("local", "fedavg")  # what a method must be better than


@dataclass
class Course:
    """The ledger, added up by round, client, stage and field."""

    totals: Ledger = field(default_factory=Ledger)
    progress: Progress = field(default_factory=Progress)
    accuracies: dict[int, list[float]] = field(default_factory=dict)  # round -> test accuracies of its participants
    notes: dict[str, dict[int, list[float]]] = field(default_factory=dict)  # name -> round -> of its participants
    rounds_of: dict[str, int] = field(default_factory=dict)  # client -> rounds it took part in
    bytes_of: dict[str, int] = field(default_factory=dict)  # client -> bytes both ways
    up_by_field: dict[str, int] = field(default_factory=dict)
    up_by_round: dict[int, dict[str, int]] = field(default_factory=dict)  # round -> bytes by field
    senders: dict[int, int] = field(default_factory=dict)  # round -> clients that sent something
    shapes: dict[str, list[str]] = field(default_factory=dict)  # field -> the different ones, in the order in which they came
    unnamed_up: int = 0  # bytes whose fields an earlier version did not write down
    reports: int = 0  # participations that sent something
    participations: int = 0  # all but the final ones
    late: int = 0
    tiers: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, entries: Iterable[LedgerEntry]) -> Course:
        course = cls()
        for entry in entries:
            course.add(entry)
        return course

    def add(self, entry: LedgerEntry) -> None:
        self.totals.add([entry])
        self.progress.add(entry)
        self.bytes_of[entry.client] = self.bytes_of.get(entry.client, 0) + entry.bytes_up + entry.bytes_down
        for name, size in entry.upload_bytes.items():
            self.up_by_field[name] = self.up_by_field.get(name, 0) + size
            own = self.up_by_round.setdefault(entry.round, {})
            own[name] = own.get(name, 0) + size
        for name, shape in entry.upload_shapes.items():
            if shape not in self.shapes.setdefault(name, []):
                self.shapes[name].append(shape)
        self.unnamed_up += entry.bytes_up - sum(entry.upload_bytes.values())
        self.reports += entry.bytes_up > 0
        if entry.bytes_up:
            self.senders[entry.round] = self.senders.get(entry.round, 0) + 1
        self.tiers.add(entry.tier)
        if entry.final:
            return
        self.participations += 1
        self.late += entry.late
        self.rounds_of[entry.client] = self.rounds_of.get(entry.client, 0) + 1
        if entry.test_accuracy is not None and math.isfinite(entry.test_accuracy):
            self.accuracies.setdefault(entry.round, []).append(entry.test_accuracy)
        for name, value in entry.notes.items():
            if not math.isfinite(value):
                continue
            self.notes.setdefault(name, {}).setdefault(entry.round, []).append(value)


@dataclass(frozen=True)
class Holdings:
    """Who holds images of which classes."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    train: npt.NDArray[np.int64]  # (clients, classes)
    test: npt.NDArray[np.int64]

    @property
    def unseen(self) -> npt.NDArray[np.bool_]:
        """(clients, classes) classes that a client is tested on and has no training image of."""
        return (self.test > 0) & (self.train == 0)


@dataclass(frozen=True)
class Baseline:
    """A run of another method on the same split."""

    method: str
    folder: str
    accuracies: Mapping[str, float]  # by client
    seconds: float
    bytes_up: int
    differs: tuple[str, ...] = ()  # settings in which it differs, but for the methods' own
    others: int = 0  # further runs of that method that would fit as well


@dataclass(frozen=True)
class RunView:
    folder: str
    method: str
    space_name: str
    dataset: str
    protocol: str
    seed: int
    rounds: int  # planned
    rounds_done: int
    finished: bool
    client_count: int
    participants: int
    clients: tuple[ClientResult, ...]  # those that have their personal model
    seconds: float
    course: Course
    settings: Mapping[str, Any]  # key -> value
    environment: Mapping[str, Any]
    defaults: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # key -> default, meaning
    privacy: Mapping[str, Any] = field(default_factory=dict)  # of result.json
    protection: PrivacySettings = field(default_factory=PrivacySettings)
    one_class: tuple[str, ...] = ()  # of result.json
    manifest: Manifest | None = None
    space: SearchSpace | None = None
    holdings: Holdings | None = None
    split: str = ""  # the same for runs whose clients hold the same images
    about: str = ""  # what the method is, in its own words
    federation: bool = False  # the folder of a real federation's server or site
    classes: tuple[str, ...] = ()  # their names, where models were judged by class
    no_data: str = ""  # why there are no holdings
    no_space: str = ""  # why architectures cannot be looked at

    @property
    def goes_on(self) -> str:
        """The command that brings a stopped run to its end."""
        return how_to_go_on(Path(self.folder))

    @property
    def title(self) -> str:
        return f"{self.method} on {self.dataset}"

    @property
    def mean(self) -> float | None:
        return self.mean_and_std[0]

    @property
    def mean_and_std(self) -> tuple[float | None, float | None]:
        return mean_and_std([client.test_accuracy for client in self.clients])

    @property
    def by_accuracy(self) -> list[ClientResult]:
        """Best first."""
        return sorted(self.clients, key=lambda client: (-client.test_accuracy, client.name))

    @property
    def spoken_state(self) -> str:
        if self.finished and not self.rounds_done:
            return "finished; the method has no rounds"
        if self.finished:
            return f"finished after {self.rounds_done} rounds" if self.rounds_done != 1 else "finished after 1 round"
        return f"not finished: {self.rounds_done} of {self.rounds} rounds, {len(self.clients)} of {self.client_count} personal models"
