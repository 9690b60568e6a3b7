"""Several runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from operator import attrgetter
from typing import Any

import numpy as np

from fedloom.core.progress import Moment
from fedloom.maths.paired import PairedDifference, holm, paired_difference
from fedloom.report.charts.clients import NAMED, strips
from fedloom.report.charts.rounds import ROUND, alone, binned, thinning
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
    block: str = ""  # KEY=VALUE of a sweep: methods are compared with the first one that has the same

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
    """By method, where each method has each seed once; by value and method, where one setting was swept over; else every run by its
    folder's name."""
    if len({(run.method, run.seed) for run in runs}) == len(runs):
        return _by_method(runs)
    key = _swept(runs)
    if key:
        values = dict.fromkeys(plain(run.settings.get(key), 40) for run in runs)
        blocks = {value: [run for run in runs if plain(run.settings.get(key), 40) == value] for value in values}
        if all(len({(run.method, run.seed) for run in block}) == len(block) for block in blocks.values()):
            return [group for value, block in blocks.items() for group in _by_method(block, f"{key}={value}")]
    names = [run.folder.rstrip("/").split("/")[-1] for run in runs]
    if len(set(names)) < len(names):
        names = [run.folder for run in runs]
    return [Group(plain(name, 40), (run,)) for name, run in zip(names, runs, strict=True)]


def _by_method(runs: Sequence[RunView], block: str = "") -> list[Group]:
    methods = dict.fromkeys(run.method for run in runs)
    key, _, value = block.partition("=")
    label = f", {key.rpartition('.')[2]}={value}" if block else ""
    return [Group(f"{method}{label}", tuple(run for run in runs if run.method == method), block) for method in methods]


def _swept(runs: Sequence[RunView]) -> str:
    """The only setting, besides the seed, in which runs of one method differ; empty where there are none or several."""
    found = set()
    for method in {run.method for run in runs}:
        own = [run.settings for run in runs if run.method == method]
        found |= {key for settings in own for key in settings if any(settings[key] != other.get(key) for other in own)}
    found -= {"seed", "run.folder"}
    return found.pop() if len(found) == 1 else ""


def reference(groups: Sequence[Group], group: Group) -> Group:
    """What a group is compared with: the first, in a sweep the first that has the same value."""
    return next(other for other in groups if other.block == group.block)


def compared(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    """(reference, group) of all that are compared with another."""
    both = [(reference(groups, group), group) for group in groups]
    return [(first, group) for first, group in both if first is not group]


def compared_to(groups: Sequence[Group]) -> str:
    """The name of what they are compared with."""
    first = groups[0]
    return f"{first.runs[0].method} with the same {first.block.partition('=')[0]}" if first.block else first.name


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


def differences(groups: Sequence[Group]) -> dict[str, PairedDifference]:
    """group -> its difference to what it is compared with, where clients can be paired; p is corrected for their number (Holm)."""
    every = {other.name: difference(first, other) for first, other in compared(groups) if first.finished and other.finished}
    found = {name: one for name, one in every.items() if one is not None}
    corrected = holm([one.p for one in found.values()])
    return {name: replace(one, p=p) for (name, one), p in zip(found.items(), corrected, strict=True)}


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
            style = {"color": colour, "ls": dashes, "marker": alone(bins), "label": plain(name, 24)}
            axes.plot([b.place for b in bins], [100 * b.mean for b in bins], **style)
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


def course_against(groups: Sequence[Group], key: str, axis: Axis, unit: float, number: Callable[[Moment], float]) -> Shown:
    """Accuracy against what had been spent after each round. unit: what stands as 1 on the axis."""
    title = f"Test accuracy over {axis.name}"
    found = {group.name: [moments for run in group.runs if (moments := run.course.progress.moments)] for group in groups}
    found = {name: runs for name, runs in found.items() if runs}
    if not found:
        return Missing(title, "None of these runs has measured accuracies in rounds.")

    def fill(axes: Any) -> None:
        for (name, runs), colour, dashes in zip(found.items(), cycle(SERIES), cycle(DASHES)):
            for place, moments in enumerate(runs):
                label = None if place else plain(name, 24)
                places, heights = [number(one) / unit for one in moments], [100 * one.accuracy for one in moments]
                axes.plot(places, heights, color=colour, ls=dashes, lw=1, marker=alone(moments), label=label)
        axes.legend(loc="lower right")

    ends = [f"{name} {percent(runs[0][-1].accuracy)} after {number(runs[0][-1]) / unit:.3g}" for name, runs in found.items()]
    said = "A line for each seed: the mean over the clients seen so far of what each had at its latest participation. "
    said += f"At the end, in {axis.unit}, first seed: {listed(ends, 6)}."
    rows = tuple(
        (name, str(one.round), f"{number(one) / unit:.4g}", percent(one.accuracy)) for name, runs in found.items() for one in _few(runs[0])
    )
    numbers = Numbers(("run, first seed", "round", str(axis), "test accuracy, mean"), rows)
    return Figure(f"course-against-{key}", title, axis, Axis("test accuracy, mean", "%"), said, fill, numbers)


def _few(moments: Sequence[Moment], most: int = 8) -> list[Moment]:
    """Evenly spaced, the last among them."""
    places = dict.fromkeys(np.linspace(0, len(moments) - 1, min(most, len(moments))).round().astype(int).tolist())
    return [moments[place] for place in places]


def sorted_differences(groups: Sequence[Group]) -> Shown:
    against = compared_to(groups)
    title = f"Client by client against {against}"
    found = {group.name: sorted(100 * (after - before) for before, after in pairs(first, group)) for first, group in compared(groups)}
    found = {name: values for name, values in found.items() if values}
    if not found:
        return Missing(title, f"No other finished run has the same split and seed as {against}, so clients cannot be paired.")

    def fill(axes: Any) -> None:
        axes.axhline(0, color=FAINT, lw=0.8)
        # the first colour and mark are the first group's, which is the line at 0
        for (name, values), colour, mark in zip(found.items(), cycle(SERIES[1:]), cycle(MARKS[1:])):
            places = np.linspace(0, 100, len(values)) if len(values) > 1 else [50]
            style = {"color": colour, "lw": 0.8, "marker": mark, "ms": 3.5 if len(values) <= NAMED else 1.5, "mew": 0}
            axes.plot(places, values, label=plain(name, 24), **style)
        axes.legend(loc="upper left")

    said = f"Below 0 a client is better off under {against}: " + listed(
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
