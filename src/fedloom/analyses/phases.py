"""SPIDER's phases as rounds go by (Mushtaq et al., TMLR 2023, Fig. 6): pre-training, search, training of what was found.

All of it comes from the ledger: means over the participants of a round, of memory the largest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from fedloom.core.errors import InvalidConfig
from fedloom.core.result import LedgerEntry, mean_and_std
from fedloom.engine.store import Store

PHASES = {1: "pre-training", 2: "search", 3: "training"}
NOTED = ("phase", "decided_edges", "absent_edges", "local_step_mb")


@dataclass(frozen=True)
class Stage:
    """What a round's participants came to."""

    round: int  # completed
    phase: int  # of the participant that is least far
    clients: int
    validation_accuracy: float
    test_accuracy: float
    decided_edges: float  # of both kinds of cell together
    absent_edges: float
    peak_memory_mb: float  # the step of the shared supernet, both being stored
    local_step_mb: float  # the step of the local supernet, which falls as operations go


def phases(store: Store, method: str) -> list[Stage]:
    entries = [entry for entry in store.read_ledger() if not entry.final]
    if method != "spider" or not all(name in entry.notes for entry in entries for name in NOTED):
        raise InvalidConfig(f"{store.folder} is a run of {method} whose ledger notes no phases. Give a run with method=spider")
    if not entries:
        raise InvalidConfig(f"{store.folder} has no rounds to look at: its ledger holds no participation but final ones")
    return course(entries)


def course(entries: Iterable[LedgerEntry]) -> list[Stage]:
    return [_stage(number, list(group)) for number, group in groupby(entries, key=lambda entry: entry.round)]


def _stage(number: int, entries: list[LedgerEntry]) -> Stage:
    def mean(values: list[float | None]) -> float:
        found, _ = mean_and_std([value for value in values if value is not None])
        return found or 0.0

    return Stage(
        round=number + 1,
        phase=int(min(entry.notes["phase"] for entry in entries)),
        clients=len(entries),
        validation_accuracy=mean([entry.validation_accuracy for entry in entries]),
        test_accuracy=mean([entry.test_accuracy for entry in entries]),
        decided_edges=mean([entry.notes["decided_edges"] for entry in entries]),
        absent_edges=mean([entry.notes["absent_edges"] for entry in entries]),
        peak_memory_mb=max(entry.peak_memory_mb for entry in entries),
        local_step_mb=max(entry.notes["local_step_mb"] for entry in entries),
    )


def beginnings(stages: Iterable[Stage]) -> dict[str, int]:
    """The first round of each phase that there is, by its name."""
    found: dict[str, int] = {}
    for stage in stages:
        found.setdefault(PHASES[stage.phase], stage.round)
    return found
