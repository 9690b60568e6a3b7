"""A run as events, one JSON object a line: what ``fedloom run --events`` prints, and what ``fedloom compare`` reads of its runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedloom.core.result import LedgerEntry, RunResult, mean_and_std


@dataclass(frozen=True)
class Event:
    """kind: ``begin`` (also of a run that goes on), ``round`` or ``model``; ``done`` of ``rounds`` rounds, ``models`` of ``clients``
    personal models are finished."""

    kind: str
    done: int
    rounds: int
    models: int
    clients: int
    client: str = ""  # whose personal model
    participants: int = 0  # of the round
    late: int = 0  # of them, too late for the round
    accuracy: float | None = None  # on test data: mean of the round's clients, or of the personal model
    seconds_left: float = 0.0  # of rounds, if they go on as they did

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Event | None:
        """Nothing for a line that is no event."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return None

    @property
    def outcome(self) -> str:
        """Of a round, in words."""
        late = f"{self.late} of them too late" if self.late else ""
        accuracy = "" if self.accuracy is None else f"accuracy {self.accuracy:.1%}"
        return ", ".join(filter(None, [f"{self.participants} clients", late, accuracy]))

    def sentence(self) -> str:
        """The event in words; nothing where there is nothing to say."""
        if self.kind == "model":
            return f"personal model {self.models} ({self.client})" + ("" if self.accuracy is None else f" {self.accuracy:.1%}")
        if self.kind == "round":
            return f"round {self.done}/{self.rounds}: {self.outcome}, about {self.seconds_left:.0f} s of rounds left"
        models = f" and {self.models} personal models" if self.models else ""
        return f"going on after round {self.done} of {self.rounds}{models}" if self.done else ""


class Events:
    """A watcher that tells a run's events to somebody."""

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell
        self._rounds = self._clients = self._models = self._first = self._done = 0
        self._started = time.monotonic()

    def begin(self, rounds: int, clients: int, rounds_done: int, clients_done: int) -> None:
        self._rounds, self._clients, self._models = rounds, clients, clients_done
        self._first = self._done = rounds_done
        self._started = time.monotonic()
        self._event("begin")

    def stage(self, client: str, stage: str) -> None:
        """Too fine for a line."""

    def participation(self, entry: LedgerEntry) -> None:
        if entry.final:
            self._models += 1
            self._event("model", client=entry.client, accuracy=entry.test_accuracy)

    def round_done(self, round: int, entries: Sequence[LedgerEntry]) -> None:
        self._done = round
        mean, _ = mean_and_std([entry.test_accuracy for entry in entries if entry.test_accuracy is not None])
        late = sum(entry.late for entry in entries)
        self._event("round", participants=len(entries), late=late, accuracy=mean, seconds_left=self.seconds_left())

    def end(self, result: RunResult) -> None:
        """The result is in its file."""

    def seconds_left(self) -> float:
        return (time.monotonic() - self._started) / max(self._done - self._first, 1) * (self._rounds - self._done)

    def _event(self, kind: str, **facts: Any) -> None:
        self._tell(Event(kind, self._done, self._rounds, self._models, self._clients, **facts))
