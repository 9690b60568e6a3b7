"""Where the time of a run goes: seconds by stage and round, and a trace that Chrome (chrome://tracing) and Perfetto open."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fedloom.core.result import LedgerEntry, RunResult

ROUNDS = "rounds"  # the line of the trace above those of clients


@dataclass(frozen=True)
class Stretch:
    """A round, or all personal models."""

    name: str
    seconds: float  # by the clock
    stages: Mapping[str, float] = field(default_factory=dict)  # seconds, summed over clients

    @property
    def other(self) -> float | None:
        """Seconds in no client's stage. None: clients worked side by side, so stages add up to more than the clock shows."""
        left = self.seconds - sum(self.stages.values())
        return left if left >= -0.01 * self.seconds else None


class Profile:
    """A watcher that measures. ``begun``: whether there was anything to measure."""

    def __init__(self) -> None:
        self.begun = False
        self.rounds: list[Stretch] = []
        self._models: Counter[str] = Counter()
        self._first = 0
        self._start = self._since = self._end = 0.0
        self._events: list[tuple[str, str, float, float]] = []  # line, what, from, to
        self._open: dict[str, tuple[str, float]] = {}  # client -> its stage, since when

    def begin(self, rounds: int, clients: int, rounds_done: int, clients_done: int) -> None:
        self.begun, self._first = True, rounds_done
        self._start = self._since = self._end = time.perf_counter()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def stage(self, client: str, stage: str) -> None:
        now = self._now()
        if client in self._open:
            what, since = self._open.pop(client)
            self._events.append((client, what, since, now))
        if stage:
            self._open[client] = (stage, now)

    def participation(self, entry: LedgerEntry) -> None:
        self._now()
        if entry.final:
            self._models.update(entry.seconds)

    def round_done(self, round: int, entries: Sequence[LedgerEntry]) -> None:
        now, stages = self._now(), Counter[str]()
        for entry in entries:
            stages.update(entry.seconds)
        self.rounds.append(Stretch(f"round {round}", now - self._since, stages))
        self._events.append((ROUNDS, f"round {round}", self._since, now))
        self._since = now

    def end(self, result: RunResult) -> None:
        self._events.append((ROUNDS, "personal models", self._since, self._now()))

    def _now(self) -> float:
        self._end = time.perf_counter()
        return self._end

    # -- what came out ------------------------------------------------------------
    @property
    def models(self) -> Stretch | None:
        """All after the last round; nothing where a run stopped before."""
        return Stretch("personal models", self._end - self._since, self._models) if self._models else None

    @property
    def peak_gpu_gb(self) -> float:
        """Of this process; 0 without a GPU."""
        return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_initialized() else 0.0

    @property
    def file(self) -> str:
        """In the run folder; each part of a run that was stopped and resumed has its own."""
        return f"trace-{self._first}.json" if self._first else "trace.json"

    def trace(self) -> str:
        """Trace events, microseconds since the begin: a line for the rounds, and one per client."""
        lines = [ROUNDS, *sorted({line for line, *_ in self._events} - {ROUNDS})]
        number = {line: place for place, line in enumerate(lines)}
        names = [{"name": "thread_name", "ph": "M", "pid": 0, "tid": number[line], "args": {"name": line}} for line in lines]
        events = [
            {"name": what, "ph": "X", "pid": 0, "tid": number[line], "ts": self._micro(since), "dur": round(1e6 * (to - since))}
            for line, what, since, to in self._events
        ]
        return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}) + "\n"

    def _micro(self, moment: float) -> int:
        return round(1e6 * (moment - self._start))
