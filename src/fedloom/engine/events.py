"""A run as events, one JSON object a line: what ``fedloom run --events`` prints, and what ``fedloom compare`` reads of its runs."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedloom.core.result import LedgerEntry, RunResult, mean_and_std

RECENT = 5  # rounds, or personal models, whose pace says how long the rest will take


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
    seconds_left: float = 0.0  # of rounds, or of personal models, if they go on as the last ones did

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
        return ", ".join(filter(None, [f"{self.participants} client{'s' * (self.participants != 1)}", late, accuracy]))

    def sentence(self) -> str:
        """The event in words; nothing where there is nothing to say."""
        if self.kind == "model":
            left = f", about {self.seconds_left:.0f} s left" if self.seconds_left >= 1 else ""
            return f"personal model {self.models} ({self.client})" + ("" if self.accuracy is None else f" {self.accuracy:.1%}") + left
        if self.kind == "round":
            left = f", about {self.seconds_left:.0f} s of rounds left" if self.done < self.rounds else ""
            return f"round {self.done}/{self.rounds}: {self.outcome}{left}"
        models = f" and {self.models} personal models" if self.models else ""
        return f"going on after round {self.done} of {self.rounds}{models}" if self.done else ""


class Events:
    """A watcher that tells a run's events to somebody."""

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell
        self._rounds = self._clients = self._models = self._done = 0
        self._ends: deque[tuple[float, int]] = deque(maxlen=RECENT + 1)  # when how many rounds, or personal models, were finished

    def begin(self, rounds: int, clients: int, rounds_done: int, clients_done: int) -> None:
        self._rounds, self._clients, self._models = rounds, clients, clients_done
        self._done = rounds_done
        self._begin_with(clients_done if rounds_done >= rounds else rounds_done)
        self._event("begin")

    def stage(self, client: str, stage: str) -> None:
        """Too fine for a line."""

    def participation(self, entry: LedgerEntry) -> None:
        if entry.final:
            self._models += 1
            self._ends.append((time.monotonic(), self._models))
            self._event("model", client=entry.client, accuracy=entry.test_accuracy, seconds_left=self.seconds_left())

    def round_done(self, round: int, entries: Sequence[LedgerEntry]) -> None:
        self._done = round
        self._ends.append((time.monotonic(), round))
        mean, _ = mean_and_std([entry.test_accuracy for entry in entries if entry.test_accuracy is not None])
        late = sum(entry.late for entry in entries)
        self._event("round", participants=len(entries), late=late, accuracy=mean, seconds_left=self.seconds_left())
        if round >= self._rounds:
            self._begin_with(self._models)

    def end(self, result: RunResult) -> None:
        """The result is in its file."""

    def seconds_left(self) -> float:
        """Of rounds, or after them of personal models, by the pace of the last few; 0 before the first. Rounds of a search are slower than
        those before it, so that a mean since the beginning would promise too much."""
        (before, some), (now, done) = self._ends[0], self._ends[-1]
        whole = self._rounds if self._done < self._rounds else self._clients
        pace = (now - before) / (done - some) if done > some else 0.0
        return max(0.0, pace * (whole - done) - (time.monotonic() - now))

    def _begin_with(self, done: int) -> None:
        self._ends.clear()
        self._ends.append((time.monotonic(), done))

    def _event(self, kind: str, **facts: Any) -> None:
        self._tell(Event(kind, self._done, self._rounds, self._models, self._clients, **facts))
