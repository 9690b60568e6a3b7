"""Where the time of a run went, in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from rich.table import Table

from fedloom.engine.profile import Profile, Stretch

LAST = 2  # rounds that are shown beside the first


def profile_table(profile: Profile) -> Table:
    """Seconds by stage: of the first round, which warms up, of the last ones, the median without the first, and of all."""
    rounds, models = profile.rounds, profile.models
    columns, after = [*rounds[:1], *rounds[1:][-LAST:]], rounds[1:]
    stages = list(dict.fromkeys(stage for one in [*rounds, *([models] if models else [])] for stage in one.stages))
    if len(after) > 1:
        columns.append(_median("median of the others", after, stages))
    if len(rounds) > 1:
        columns.append(_sum("all rounds", rounds))
    columns += [models] if models else []
    table = Table("seconds", *(one.name for one in columns))
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for stage in stages:
        table.add_row(stage, *(_seconds(one.stages.get(stage, 0.0)) for one in columns))
    table.add_row("other", *("–" if one.other is None else _seconds(max(0.0, one.other)) for one in columns), end_section=True)
    table.add_row("by the clock", *(_seconds(one.seconds) for one in columns))
    return table


def profile_lines(profile: Profile, file: str) -> list[str]:
    lines = [f"The first round also warms up. A trace to open in https://ui.perfetto.dev or chrome://tracing is in {file}"]
    if any(one.other is None for one in profile.rounds):
        lines.append("Clients worked side by side: their seconds add up to more than the clock shows")
    if profile.peak_gpu_gb:
        lines.append(f"At most {profile.peak_gpu_gb:.2f} GB of GPU memory were in use")
    return lines


def _median(name: str, some: Sequence[Stretch], stages: Sequence[str]) -> Stretch:
    middle = {stage: median(one.stages.get(stage, 0.0) for one in some) for stage in stages}
    return Stretch(name, median(one.seconds for one in some), middle)


def _sum(name: str, some: Sequence[Stretch]) -> Stretch:
    total: Counter[str] = Counter()
    for one in some:
        total.update(one.stages)
    return Stretch(name, sum(one.seconds for one in some), total)


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"
