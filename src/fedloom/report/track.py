"""A run as scalars for TensorBoard (extra ``track``): nothing but what the ledger has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.core.errors import UnusableFormat
from fedloom.core.result import LedgerEntry, RunResult, mean_and_std


class Tracker:
    """Watches a run and writes scalars by round into a folder; a resumed run goes on in the same one."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            cure = "Install it with: pip install 'fedloom[track]', or set run.track=false"
            raise UnusableFormat(f"run.track needs the package tensorboard, which is not installed here. {cure}") from error
        self._make: Any = lambda first: SummaryWriter(str(folder), purge_step=first)
        self._writer: Any = None
        self._finals: list[LedgerEntry] = []

    def begin(self, rounds: int, clients: int, rounds_done: int, clients_done: int) -> None:
        self._writer = self._make(rounds_done + 1)  # what was written after the last checkpoint does not count

    def stage(self, client: str, stage: str) -> None: ...

    def participation(self, entry: LedgerEntry) -> None:
        if entry.final:
            self._finals.append(entry)

    def round_done(self, round: int, entries: Sequence[LedgerEntry]) -> None:
        for name, value in _scalars(entries):
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def end(self, result: RunResult) -> None:
        for name, value in _scalars(self._finals):
            self._writer.add_scalar(f"personal models/{name}", value, result.rounds)
        self._writer.close()


def _scalars(entries: Sequence[LedgerEntry]) -> list[tuple[str, float]]:
    """Name and value of what several participations have in common."""
    found = []
    for kind in ("test", "validation"):
        known = [value for entry in entries if (value := getattr(entry, f"{kind}_accuracy")) is not None]
        for what, value in zip(("mean", "spread"), mean_and_std(known), strict=True):
            if value is not None:
                found.append((f"accuracy/{kind} {what}", value))
    stages = sorted({stage for entry in entries for stage in entry.seconds})
    found += [(f"seconds/{stage}", sum(entry.seconds.get(stage, 0.0) for entry in entries)) for stage in stages]
    found += [(f"megabytes/{way}", sum(getattr(entry, f"bytes_{way}") for entry in entries) / 1e6) for way in ("up", "down")]
    for note in sorted({name for entry in entries for name in entry.notes}):
        values = [entry.notes[note] for entry in entries if note in entry.notes]
        found.append((f"notes/{note}", sum(values) / len(values)))
    return found


class Several:
    """Several watchers as one."""

    def __init__(self, watchers: Sequence[Any]) -> None:
        self._watchers = watchers

    def begin(self, *facts: Any) -> None:
        self._tell("begin", *facts)

    def stage(self, *facts: Any) -> None:
        self._tell("stage", *facts)

    def participation(self, *facts: Any) -> None:
        self._tell("participation", *facts)

    def round_done(self, *facts: Any) -> None:
        self._tell("round_done", *facts)

    def end(self, *facts: Any) -> None:
        self._tell("end", *facts)

    def _tell(self, what: str, *facts: Any) -> None:
        for watcher in self._watchers:
            getattr(watcher, what)(*facts)
