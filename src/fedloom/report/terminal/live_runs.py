"""Several runs at once as they go by: a line for each on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Column


class LiveRuns:
    """What each run said last."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        news = TextColumn("{task.fields[news]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        columns = (TextColumn("{task.description}", markup=False), TimeElapsedColumn(), news)
        self._progress = Progress(*columns, console=console, expand=True, disable=not console.is_terminal)
        self._news = dict.fromkeys(names, "")
        self._tasks = {name: self._progress.add_task(name, start=False, total=None, news="waiting") for name in names}

    def __enter__(self) -> LiveRuns:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, name: str) -> None:
        self._progress.start_task(self._tasks[name])
        self.news(name, "starting")

    def news(self, name: str, text: str) -> None:
        if not text or text == self._news[name]:
            return
        self._news[name] = text
        self._progress.update(self._tasks[name], news=text)
        if not self._console.is_terminal:
            self._console.print(f"{name}: {text}", highlight=False, soft_wrap=True, markup=False)

    def end(self, name: str, text: str) -> None:
        self.news(name, text)
        self._progress.stop_task(self._tasks[name])
