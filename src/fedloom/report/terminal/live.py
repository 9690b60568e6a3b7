"""A run as it goes by: a small dashboard on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedloom.core.result import LedgerEntry, RunResult
from fedloom.engine.events import Event, Events
from fedloom.report.terminal.sparks import bar, spark_line
from fedloom.report.words import many

QUIET_SECONDS = 2.0  # between two plain lines
LONGEST_SILENCE = 8.0  # seconds, after which a plain line says what is going on
REFRESH = 4  # times a second
SHOWN = 8  # clients at work that are named


class LiveView:
    """Shows rounds, then the final participation: who does what, the accuracy so far, where the time goes, when it ends."""

    def __init__(self, console: Console, title: str = "") -> None:
        self._console, self._title = console, title
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[news]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, auto_refresh=False)
        self._tasks: dict[str, TaskID] = {}
        self._events = Events(self._tell)
        self._rounds = self._clients = self._first = self._done = 0
        self._last_line = time.monotonic()
        self._working: dict[str, tuple[str, float]] = {}  # client -> its stage, and since when
        self._accuracies: list[float] = []  # mean of each round
        self._stages: dict[str, float] = {}  # seconds so far
        self._live = Live(console=console, get_renderable=self._dashboard, refresh_per_second=REFRESH) if console.is_terminal else None
        self._answered = 0  # clients in this round
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
        else:
            self._heart.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._working.clear()
        self._over.set()
        if self._live:
            self._live.stop()
        else:
            self._heart.join()

    def _beat(self) -> None:
        while not self._over.wait(1.0):
            self.break_silence()

    def break_silence(self) -> None:
        """A plain line from within a round, or a personal model, that takes long."""
        now = time.monotonic()
        if now - self._last_line < LONGEST_SILENCE:
            return
        self._last_line = now
        working = [f"{client}: {stage} for {now - since:.0f} s" for client, (stage, since) in list(self._working.items())[:SHOWN]]
        if not self._tasks:
            what = ["reading images, preparing the run"]
        elif self._done < self._rounds:
            what = [f"in round {self._done + 1}/{self._rounds}", f"{many(self._answered, 'client has', 'clients have')} answered", *working]
        else:
            what = [f"personal models: {self._answered} of {self._clients}", *working]
        left = self._events.seconds_left() if self._tasks else 0.0
        what += [f"about {left:.0f} s{' of rounds' * (self._done < self._rounds)} left"] if left >= 1 else []
        self._console.print(", ".join(what), highlight=False, soft_wrap=True, markup=False)

    def begin(self, rounds: int, clients: int, rounds_done: int, clients_done: int = 0) -> None:
        self._rounds, self._clients, self._first, self._done = rounds, clients, rounds_done, rounds_done
        self._answered = clients_done
        if self._title:
            self._console.print(self._title, highlight=False, soft_wrap=True, markup=False)
        self._tasks = {
            "rounds": self._progress.add_task("rounds", total=rounds, completed=rounds_done, news=""),
            "final": self._progress.add_task("personal models", total=clients, completed=clients_done, news=""),
        }
        self._events.begin(rounds, clients, rounds_done, clients_done)

    def stage(self, client: str, stage: str) -> None:
        if stage:
            self._working[client] = (stage, time.monotonic())

    def participation(self, entry: LedgerEntry) -> None:
        self._working.pop(entry.client, None)
        self._answered += 1
        for stage, seconds in entry.seconds.items():
            self._stages[stage] = self._stages.get(stage, 0.0) + seconds
        accuracy = "" if entry.test_accuracy is None else f" {entry.test_accuracy:.1%}"
        if not entry.final:
            self._progress.update(self._tasks["rounds"], news=f"{entry.client}{accuracy}")
            return
        self._progress.update(self._tasks["rounds"], completed=self._rounds)
        self._progress.update(self._tasks["final"], advance=1, news=f"{entry.client}{accuracy}")
        self._events.participation(entry)

    def round_done(self, round: int, entries: Sequence[LedgerEntry]) -> None:
        self._done, self._answered = round, 0
        self._events.round_done(round, entries)

    def end(self, result: RunResult) -> None:
        self._progress.update(self._tasks["final"], completed=self._clients)

    def _tell(self, event: Event) -> None:
        """On a terminal the dashboard is enough; elsewhere a line, for quick rounds not for each of them."""
        if event.kind == "round":
            self._accuracies += [event.accuracy] if event.accuracy is not None else []
            self._progress.update(self._tasks["rounds"], completed=event.done, news=event.outcome)
        now, seldom = time.monotonic(), event.kind != "round" or event.done == event.rounds
        if (text := event.sentence()) and not self._console.is_terminal and (seldom or now - self._last_line > QUIET_SECONDS):
            self._last_line = now
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    # -- on a terminal ------------------------------------------------------------
    def _dashboard(self) -> RenderableType:
        return Group(self._progress.get_renderable(), *self._rows())

    def _rows(self) -> Iterator[RenderableType]:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="ellipsis", no_wrap=True)
        if self._accuracies:
            first, last = self._accuracies[0], self._accuracies[-1]
            line = spark_line(self._accuracies, max(10, min(60, self._console.width - 50)))
            grid.add_row("accuracy", Text(f"{line}  {first:.1%} -> {last:.1%} (mean of the round's clients)"))
        working, stages = list(self._working.items()), dict(self._stages)  # the run goes on while this is drawn
        for number, (client, (stage, since)) in enumerate(working):
            if number == SHOWN:
                grid.add_row("", Text(f"and {len(working) - SHOWN} more"))
                break
            grid.add_row("at work" if not number else "", Text(f"{client}: {stage}, {time.monotonic() - since:.0f} s"))
        whole = sum(stages.values()) or 1.0
        for number, (stage, seconds) in enumerate(sorted(stages.items(), key=lambda pair: -pair[1])[:6]):
            grid.add_row("seconds by stage" if not number else "", Text(f"{bar(seconds / whole, 20)} {stage} {seconds:.1f} s"))
        if self._done - self._first > 0 and self._done < self._rounds:
            ends = datetime.now() + timedelta(seconds=self._events.seconds_left())
            grid.add_row("rounds end", Text(f"about {ends:%H:%M:%S}"))
        if grid.row_count:
            yield grid
