"""Progress of work that has stages: one bar each, and plain lines where there is no terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class LiveStages:
    """Called with (stage, done, of how many, remark)."""

    def __init__(self, console: Console, title: str) -> None:
        self.console, self.title = console, title
        columns = (TextColumn("{task.description:10}"), BarColumn(), TextColumn("{task.completed}/{task.total} {task.fields[remark]}"))
        self.bars = Progress(*columns, TimeElapsedColumn(), console=console)
        self.stages: dict[str, TaskID] = {}
        self.percent: dict[str, int] = {}
        self.begun = False

    def __enter__(self) -> LiveStages:
        return self

    def __exit__(self, *error: object) -> None:
        if self.begun and self.console.is_terminal:
            self.bars.stop()

    def __call__(self, stage: str, done: int, total: int, remark: str) -> None:
        if not self.begun:  # only now is it clear that nothing is refused
            self.begun = True
            self._line(self.title)
            if self.console.is_terminal:
                self.bars.start()
        if self.console.is_terminal:
            if stage not in self.stages:
                self.stages[stage] = self.bars.add_task(stage, total=total, remark=remark)
            self.bars.update(self.stages[stage], completed=done, total=total, remark=remark)
        elif (percent := 100 * done // max(total, 1)) // 10 > self.percent.get(stage, -10) // 10:  # a line for every tenth
            self.percent[stage] = percent
            self._line(f"{stage} {done}/{total} {remark}".rstrip())

    def _line(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)
