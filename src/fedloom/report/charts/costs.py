"""Where the time went, and what left the clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedloom.report.figure import BLUE, ORANGE, Axis, Figure, Missing, Numbers, Shown
from fedloom.report.view import RunView
from fedloom.report.words import byte_count, duration, many, percent, plain

MEANINGS = {
    "generate": "drawing candidates",
    "rescore": "scoring the population afresh",
    "score": "scoring new architectures",
    "surrogate": "fitting and asking the surrogate",
    "train": "training",
    "finetune": "fine-tuning the personal model",
    "mix": "learning how much to take of the shared network",
    "neighbours": "storing examples and choosing how much they count",
    "rejoin": "training it once more, on validation images too",
    "test": "measuring for this report",
}


def time_by_stage(run: RunView) -> Shown:
    title = "Time by stage"
    stages = sorted(run.course.totals.stages.items(), key=lambda item: -item[1])
    if not stages:
        return Missing(title, "The ledger has no participation yet, so no time was measured.")
    total = sum(seconds for _, seconds in stages)
    minutes = total >= 600
    unit = 60 if minutes else 1

    def fill(axes: Any) -> None:
        _draw_bars(axes, stages, unit, duration, color=BLUE, alpha=0.75, height=0.7)
        axes.set_xlim(0, 1.18 * stages[0][1] / unit or 1)

    first, seconds = stages[0]
    share = percent(seconds / total if total else 0, 0)
    what = plain(MEANINGS.get(first, first)).capitalize()
    said = f"{what} takes {share} of the {duration(total)} that clients worked, all participations together."
    rows = tuple(
        (plain(stage), MEANINGS.get(stage, "–"), duration(spent), percent(spent / total if total else 0)) for stage, spent in stages
    )
    numbers = Numbers(("stage", "what it does", "time, all clients", "share"), rows)
    height = 1.0 + 0.22 * max(len(stages), 4)
    axis = Axis("time of all participations", "minutes" if minutes else "seconds")
    return Figure("time-by-stage", title, axis, Axis("stage", "longest first"), said, fill, numbers, height=height)


def bytes_by_field(run: RunView) -> Shown:
    title = "Bytes that left, by field"
    course = run.course
    fields = {name: course.up_by_field.get(name, 0) for name in sorted(course.totals.uploads)} if not course.unnamed_up else {}
    if not course.totals.bytes_up:
        return Missing(title, "Nothing left the clients, so there is nothing to draw.")
    if not fields:
        why = f"The version that made this run recorded only the sum of all fields, {byte_count(course.totals.bytes_up)}."
        return Missing(title, why)
    ranked = sorted(fields.items(), key=lambda item: -item[1])

    def fill(axes: Any) -> None:
        _draw_bars(axes, ranked, 1e6, byte_count, color=ORANGE, alpha=0.85, height=0.6)
        axes.set_xlim(0, 1.2 * ranked[0][1] / 1e6)

    name, size = ranked[0]
    said = (
        f"{plain(name)} makes up {percent(size / course.totals.bytes_up)} of the {byte_count(course.totals.bytes_up)} that "
        f"{many(course.reports, 'report')} carried."
    )
    rows = tuple((plain(name), byte_count(size), byte_count(size / max(course.reports, 1))) for name, size in ranked)
    numbers = Numbers(("field", "in the whole run", "per report, mean"), rows)
    height = 1.0 + 0.24 * max(len(ranked), 3)
    return Figure("bytes-by-field", title, Axis("bytes up", "MB"), Axis("field", "largest first"), said, fill, numbers, height=height)


def _draw_bars(axes: Any, sizes: Sequence[tuple[str, float]], unit: float, shown: Callable[[float], str], **style: Any) -> None:
    """One below the other, each with its name and its size in words."""
    axes.barh(range(len(sizes)), [size / unit for _, size in sizes], **style)
    for place, (_, size) in enumerate(sizes):
        axes.annotate(shown(size), (size / unit, place), xytext=(3, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(sizes)), [plain(name, 24) for name, _ in sizes])
    axes.set_ylim(len(sizes) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
