"""A run as it goes by: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedloom.core.result import LedgerEntry, RunResult, mean_and_std

QUIET_SECONDS = 2.0  # between two plain lines


class LiveView:
    """Shows rounds, then the final participation: who is done, the accuracy so far, the time left."""

    def __init__(self, console: Console, title: str = "") -> None:
        self._console, self._title = console, title
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[news]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._rounds = self._clients = self._finals = self._first = 0
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> LiveView:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, rounds: int, clients: int, rounds_done: int, clients_done: int = 0) -> None:
        self._rounds, self._clients, self._first, self._finals = rounds, clients, rounds_done, clients_done
        self._started = time.monotonic()
        if self._title:
            self._console.print(self._title, highlight=False, soft_wrap=True, markup=False)
        self._tasks = {
            "rounds": self._progress.add_task("rounds", total=rounds, completed=rounds_done, news=""),
            "final": self._progress.add_task("personal models", total=clients, completed=clients_done, news=""),
        }
        if rounds_done:
            models = f" and {clients_done} personal models" if clients_done else ""
            self._line(f"going on after round {rounds_done} of {rounds}{models}", force=True)

    def participation(self, entry: LedgerEntry) -> None:
        accuracy = "" if entry.test_accuracy is None else f" {entry.test_accuracy:.1%}"
        if not entry.final:
            self._progress.update(self._tasks["rounds"], news=f"{entry.client}{accuracy}")
            return
        self._finals += 1
        self._progress.update(self._tasks["rounds"], completed=self._rounds)
        self._progress.update(self._tasks["final"], advance=1, news=f"{entry.client}{accuracy}")
        self._line(f"personal model {self._finals} ({entry.client}){accuracy}")

    def round_done(self, round: int, entries: Sequence[LedgerEntry]) -> None:
        mean, _ = mean_and_std([entry.test_accuracy for entry in entries if entry.test_accuracy is not None])
        news = f"{len(entries)} clients" + ("" if mean is None else f", accuracy {mean:.1%}")
        self._progress.update(self._tasks["rounds"], completed=round, news=news)
        left = (time.monotonic() - self._started) / max(round - self._first, 1) * (self._rounds - round)
        self._line(f"round {round}/{self._rounds}: {news}, about {left:.0f} s of rounds left", force=round == self._rounds)

    def end(self, result: RunResult) -> None:
        self._progress.update(self._tasks["final"], completed=self._clients)

    def _line(self, text: str, force: bool = False) -> None:
        now = time.monotonic()
        if not self._console.is_terminal and (force or now - self._last_line > QUIET_SECONDS):
            self._last_line = now
            self._console.print(text, highlight=False, soft_wrap=True)
