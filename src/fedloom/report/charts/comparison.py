"""Several runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from operator import attrgetter
from typing import Any

import numpy as np

from fedloom.maths.paired import PairedDifference, paired_difference
from fedloom.report.charts.clients import NAMED, strips
from fedloom.report.charts.rounds import ROUND, binned, thinning
from fedloom.report.figure import FAINT, MARKS, SERIES, Axis, Figure, Missing, Numbers, Shown, draw_dots
from fedloom.report.view import RunView
from fedloom.report.words import byte_count, count, duration, listed, many, percent, plain

SECONDS, BYTES_UP, TRAINED_MACS = map(attrgetter, ("seconds", "course.totals.bytes_up", "course.totals.trained_macs"))  # of a run
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only, or one run."""

    name: str
    runs: tuple[RunView, ...]

    @property
    def finished(self) -> tuple[RunView, ...]:
        return tuple(run for run in self.runs if run.finished and run.clients)

    @property
    def accuracies(self) -> list[float]:
        """Of all clients of all seeds."""
        return [client.test_accuracy for run in self.finished for client in run.clients]

    @property
    def mean(self) -> float:
        """Of the seeds' means."""
        return float(np.mean([run.mean for run in self.finished]))

    def average(self, number: Callable[[RunView], float]) -> float:
        return float(np.mean([number(run) for run in self.finished]))


def groups_of(runs: Sequence[RunView]) -> list[Group]:
    """By method, where each method has each seed once; else every run by its folder's name."""
    if len({(run.method, run.seed) for run in runs}) == len(runs):
        methods = dict.fromkeys(run.method for run in runs)
        return [Group(method, tuple(run for run in runs if run.method == method)) for method in methods]
    names = [run.folder.rstrip("/").split("/")[-1] for run in runs]
    if len(set(names)) < len(names):
        names = [run.folder for run in runs]
    return [Group(plain(name, 40), (run,)) for name, run in zip(names, runs, strict=True)]


def pairs(first: Group, other: Group) -> list[tuple[float, float]]:
    """Accuracies of the same clients with the same images at the same seed, under both."""
    found = []
    for run in other.finished:
        for reference in first.finished:
            if (run.seed, run.split) == (reference.seed, reference.split):
                known = {client.name: client.test_accuracy for client in reference.clients}
                found += [(known[client.name], client.test_accuracy) for client in run.clients if client.name in known]
    return found


def difference(first: Group, other: Group) -> PairedDifference | None:
    found = pairs(first, other)
    return paired_difference([before for before, _ in found], [after for _, after in found]) if found else None


# -- accuracy --------------------------------------------------------------------------
def accuracy_strips(groups: Sequence[Group]) -> Shown:
    title = "Every client's test accuracy"
    whole = [group for group in groups if group.finished]
    if not whole:
        return Missing(title, "None of these runs is finished.")
    best = max(whole, key=lambda group: group.mean)
    lowest = min(whole, key=lambda group: min(group.accuracies))
    said = f"Dots are clients, lines are means. {best.name} has the highest mean, {percent(best.mean)}; "
    said += f"the lowest client is one of {lowest.name}, with {percent(min(lowest.accuracies))}."
    rows = tuple(
        (g.name, *map(percent, (g.mean, min(g.accuracies), float(np.median(g.accuracies)), max(g.accuracies))), str(len(g.accuracies)))
        for g in whole
    )
    numbers = Numbers(("run", "mean", "lowest", "median", "highest", "clients"), rows)
    return strips("all-clients", title, {group.name: group.accuracies for group in whole}, said, numbers)


def courses(groups: Sequence[Group]) -> Shown:
    title = "Test accuracy over rounds"
    found = {}
    for group in groups:
        together: dict[int, list[float]] = {}
        for run in group.runs:
            for number, values in run.course.accuracies.items():
                together.setdefault(number, []).extend(values)
        if together:
            found[group.name] = (together, binned(together))
    if not found:
        return Missing(title, "None of these runs has measured accuracies in rounds.")

    def fill(axes: Any) -> None:
        for (name, (_, bins)), colour, dashes in zip(found.items(), cycle(SERIES), cycle(DASHES)):
            axes.plot([b.place for b in bins], [100 * b.mean for b in bins], color=colour, ls=dashes, label=plain(name, 24))
        axes.legend(loc="lower right")

    ends = {name: bins[-1] for name, (_, bins) in found.items()}
    said = "Means of each round's participants after their local training, before personal models are taken: " + listed(
        [f"{name} ends at {percent(last.mean)}" for name, last in ends.items()], 6
    )
    without = [group.name for group in groups if group.name not in found]
    said += f". Without rounds: {listed(without)}." if without else "."
    places = sorted({b.name for _, bins in found.values() for b in bins}, key=lambda name: int(name.split("–")[0]))
    known = {name: {b.name: percent(b.mean) for b in bins} for name, (_, bins) in found.items()}
    rows = tuple((place, *(known[name].get(place, "–") for name in found)) for place in places)
    thinned = next((text for together, bins in found.values() if (text := thinning(bins, together))), "")
    return Figure("courses", title, ROUND, Axis("test accuracy, mean", "%"), said, fill, Numbers(("round", *found), rows), thinned=thinned)


def sorted_differences(groups: Sequence[Group]) -> Shown:
    first, *others = groups
    title = f"Client by client against {first.name}"
    found = {group.name: sorted(100 * (after - before) for before, after in pairs(first, group)) for group in others}
    found = {name: values for name, values in found.items() if values}
    if not found:
        return Missing(title, f"No other finished run has the same split and seed as {first.name}, so clients cannot be paired.")

    def fill(axes: Any) -> None:
        axes.axhline(0, color=FAINT, lw=0.8)
        # the first colour and mark are the first group's, which is the line at 0
        for (name, values), colour, mark in zip(found.items(), cycle(SERIES[1:]), cycle(MARKS[1:])):
            places = np.linspace(0, 100, len(values)) if len(values) > 1 else [50]
            style = {"color": colour, "lw": 0.8, "marker": mark, "ms": 3.5 if len(values) <= NAMED else 1.5, "mew": 0}
            axes.plot(places, values, label=plain(name, 24), **style)
        axes.legend(loc="upper left")

    said = f"Below 0 a client is better off under {first.name}: " + listed(
        [f"{sum(value < -0.05 for value in values)} of {many(len(values), 'client')} against {name}" for name, values in found.items()], 6
    )
    rows = tuple(
        (name, *(f"{np.quantile(values, share):+.1f}".replace("-", "−") for share in (0, 0.25, 0.5, 0.75, 1)))
        for name, values in found.items()
    )
    numbers = Numbers(("run", "lowest, points", "first quarter", "median", "third quarter", "highest"), rows)
    horizontal = Axis("clients, sorted by difference", "% of them")
    return Figure("differences", title, horizontal, Axis("difference of test accuracy", "points"), said + ".", fill, numbers)


# -- cost --------------------------------------------------------------------------------
def cost_points(groups: Sequence[Group]) -> list[Shown]:
    return [
        _points(groups, "bytes", "bytes sent up", Axis("sent up by all clients", "MB"), 1e6, BYTES_UP, byte_count),
        _points(groups, "macs", "training", Axis("multiply-accumulates trained", "billions"), 1e9, TRAINED_MACS, count),
        _points(groups, "time", "time", Axis("wall time", "seconds"), 1, SECONDS, duration),
    ]


def _points(
    groups: Sequence[Group], key: str, name: str, axis: Axis, unit: float, number: Callable[[RunView], float], shown: Callable[[float], str]
) -> Shown:
    """unit: what stands as 1 on the axis."""
    title = f"Accuracy against {name}"
    whole = [group for group in groups if group.finished]
    if not whole:
        return Missing(title, "None of these runs is finished.")

    def fill(axes: Any) -> None:
        for group, colour, mark in zip(whole, cycle(SERIES), cycle(MARKS)):
            places, accuracies = zip(*((number(run) / unit, 100 * (run.mean or 0)) for run in group.finished), strict=True)
            draw_dots(axes, places, accuracies, colour, 5, 0.85, mark, plain(group.name, 24))
        axes.set_xlim(left=-0.04 * max(number(run) for group in whole for run in group.finished) / unit)
        axes.margins(y=0.15)
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=3, borderaxespad=0.2, handletextpad=0.2, columnspacing=1)

    cheap = min(whole, key=lambda group: group.average(number))
    best = max(whole, key=lambda group: group.mean)
    said = f"{best.name} is the most accurate, with {shown(best.average(number))}"
    said += "; it is also the cheapest here." if cheap is best else f"; {cheap.name} needs the least, {shown(cheap.average(number))}."
    rows = tuple((group.name, shown(group.average(number)), percent(group.mean)) for group in whole)
    numbers = Numbers(("run", name, "test accuracy, mean"), rows)
    return Figure(f"accuracy-against-{key}", title, axis, Axis("test accuracy, mean", "%"), said, fill, numbers, "third", 2.3)


def stages(groups: Sequence[Group]) -> Shown:
    title = "Time by stage"
    spent: dict[str, Mapping[str, float]] = {g.name: _mean_stages(g) for g in groups}
    names = sorted({stage for by_stage in spent.values() for stage in by_stage}, key=lambda s: -sum(b.get(s, 0) for b in spent.values()))
    if not names:
        return Missing(title, "The ledgers of these runs have no participation yet.")

    def fill(axes: Any) -> None:
        left = np.zeros(len(spent))
        for stage, colour, hatch in zip(names, cycle(SERIES), cycle([""] * len(SERIES) + ["///"] * len(SERIES))):
            values = np.array([by_stage.get(stage, 0.0) for by_stage in spent.values()])
            axes.barh(range(len(spent)), values, left=left, color=colour, alpha=0.8, height=0.6, hatch=hatch, label=plain(stage, 20))
            left += values
        axes.set_yticks(range(len(spent)), [plain(name, 24) for name in spent])
        axes.set_ylim(len(spent) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, borderaxespad=0.2)

    longest = max(spent, key=lambda name: sum(spent[name].values()))
    most = plain(max(spent[longest], key=lambda stage: spent[longest][stage]), 40)
    said = f"Clients work longest under {longest}: {duration(sum(spent[longest].values()))} together, the largest part of it in {most}."
    rows = tuple((name, *(duration(by_stage.get(stage, 0.0)) for stage in names)) for name, by_stage in spent.items())
    numbers, height = Numbers(("run", *names), rows), 1.3 + 0.28 * max(len(spent), 3)
    horizontal = Axis("time of all participations", "seconds")
    return Figure("stages", title, horizontal, Axis("run", "as given"), said, fill, numbers, height=height)


def _mean_stages(group: Group) -> dict[str, float]:
    together: dict[str, float] = {}
    for run in group.runs:
        for stage, seconds in run.course.totals.stages.items():
            together[stage] = together.get(stage, 0.0) + seconds / len(group.runs)
    return together
