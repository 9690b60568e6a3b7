"""What went on from round to round: accuracy, and the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.report.figure import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, VERMILION, Axis, Figure, Missing, Numbers, Shown
from fedloom.report.view import Baseline, RunView
from fedloom.report.words import change, correlation, many, percent

SMALL = 2.3  # inches, of figures that stand three in a row
MOST_POINTS = 120  # of a course that are drawn
ROUND = Axis("round", "number")
BASELINE_STYLES = {"local": (VERMILION, (0, (4, 2))), "fedavg": (GREEN, (0, (1, 1.2)))}


@dataclass(frozen=True)
class Bin:
    """One or several rounds that are drawn as one point."""

    first: int  # from 1
    last: int
    values: tuple[float, ...]

    @property
    def place(self) -> float:
        return (self.first + self.last) / 2

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.values, share))

    @property
    def name(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


def binned(by_round: Mapping[int, Sequence[float]], most: int = MOST_POINTS) -> list[Bin]:
    """Rounds in order, so many together that no more than ``most`` points are left."""
    rounds = sorted(number for number, values in by_round.items() if values)
    size = -(-len(rounds) // most)
    groups = [rounds[start : start + size] for start in range(0, len(rounds), size or 1)]
    return [Bin(group[0] + 1, group[-1] + 1, tuple(value for number in group for value in by_round[number])) for group in groups]


def thinning(bins: Sequence[Bin], by_round: Mapping[int, Sequence[float]]) -> str:
    size = -(-len(by_round) // max(len(bins), 1))
    return f"Each point stands for {size} rounds." if size > 1 else ""


def alone(course: Sequence[object]) -> str:
    """The mark of a course's points: a line through one point would not be seen."""
    return "o" if len(course) == 1 else ""


def draw_band(axes: Any, bins: Sequence[Bin], colour: str, name: str, scale: int = 100) -> None:
    places = [one.place for one in bins]
    low, high = ([scale * one.quantile(share) for one in bins] for share in (0.1, 0.9))
    axes.fill_between(places, low, high, color=colour, alpha=0.18, lw=0)
    axes.plot(places, [scale * one.mean for one in bins], color=colour, label=name, marker="o" if len(bins) < 30 else "")


def from_to(bins: Sequence[Bin]) -> str:
    """What a course of shares does, from the mean of its first quarter to that of its last."""
    quarter = max(len(bins) // 4, 1)
    first, last = ([value for one in some for value in one.values] for some in (bins[:quarter], bins[-quarter:]))
    before, after = float(np.mean(first)), float(np.mean(last))
    verb = change(before, after)
    if verb == "stays":
        return f"stays at {percent(after)}"
    if quarter == 1 and bins[0].first == bins[0].last:
        return f"{verb} from {percent(before)} in the first round to {percent(after)} in the last"
    at_first, at_last = bins[quarter - 1].last - bins[0].first + 1, bins[-1].last - bins[-quarter].first + 1
    return f"{verb} from {percent(before)} in the first {at_first} rounds to {percent(after)} in the last {at_last}"


# -- accuracy -------------------------------------------------------------------------
def accuracy_over_rounds(run: RunView, baselines: Sequence[Baseline]) -> Shown:
    title = "Test accuracy over rounds"
    bins = binned(run.course.accuracies)
    if not bins:
        why = "the method has no rounds" if run.finished else "no round has been written to the ledger yet"
        return Missing(title, f"No accuracy was measured in a round: {why}.")

    def fill(axes: Any) -> None:
        draw_band(axes, bins, BLUE, "participants, mean and 10–90 %")
        if run.mean is not None:
            axes.axhline(100 * run.mean, color=INK, lw=1, label="personal models, mean")
        for baseline in baselines:
            colour, dashes = BASELINE_STYLES.get(baseline.method, (PURPLE, "-."))
            mean = float(np.mean(list(baseline.accuracies.values())))
            axes.axhline(100 * mean, color=colour, ls=dashes, lw=1.2, label=f"{baseline.method}, mean")
        axes.legend(loc="lower right")

    return Figure(
        "accuracy-over-rounds",
        title,
        ROUND,
        Axis("test accuracy", "%"),
        _said_of_accuracy(run, bins),
        fill,
        Numbers(
            ("round", "mean", "10 % of participants below", "90 % below", "measurements"),
            tuple((b.name, percent(b.mean), percent(b.quantile(0.1)), percent(b.quantile(0.9)), str(len(b.values))) for b in bins),
        ),
        thinned=thinning(bins, run.course.accuracies),
    )


def _said_of_accuracy(run: RunView, bins: Sequence[Bin]) -> str:
    who = "of a round's participants after their local training"
    if len(bins) == 1:
        said = f"There is one round: the mean {who} is {percent(bins[0].mean)}."
    else:
        said = f"The mean {who} {from_to(bins)}."
        if run.participants < run.client_count:
            said += " Each round has other participants, so it jumps."
    if run.mean is not None:
        said += f" The personal models of {many(len(run.clients), 'client')} end at {percent(run.mean)}."
    return said


# -- search -----------------------------------------------------------------------------
def search_figures(run: RunView) -> list[Shown]:
    return [_population(run), _surrogate(run), _generator(run)]


def _population(run: RunView) -> Shown:
    title = "The population: best and median"
    notes = run.course.notes
    best, median = binned(notes.get("best_score", {})), binned(notes.get("median_score", {}))
    if not best:
        return Missing(title, f"The ledger of this run has no scores of a population; {run.method} may keep none.")

    def fill(axes: Any) -> None:
        draw_band(axes, best, BLUE, "best")
        if median:
            draw_band(axes, median, ORANGE, "median")
        axes.legend(loc="lower right")

    said = f"The score of the best member, mean and 10–90 % of participants, {from_to(best)}"
    if median:
        gap = float(np.mean([b.mean - m.mean for b, m in zip(best, median, strict=False)]))
        said += f"; it is {100 * gap:.1f} points above the median of its population, on average."
    else:
        said += ". The version that made this run did not record medians."
    columns = ("round", "best", *(("median",) if median else ()))
    rows = tuple((b.name, percent(b.mean), *((percent(median[i].mean),) if i < len(median) else ())) for i, b in enumerate(best))
    score = Axis("accuracy on the scoring data", "%")
    thinned = thinning(best, notes["best_score"])
    return Figure("population", title, ROUND, score, said, fill, Numbers(columns, rows), "third", SMALL, thinned)


def _surrogate(run: RunView) -> Shown:
    title = "How well the surrogate ranks"
    found = [name for name in run.course.notes if name.endswith("_rank_correlation")]
    if not found:
        return Missing(
            title, "The ledger has no rank correlations: the method used no surrogate, or it never had two different candidates to rank."
        )
    name = found[0]
    bins = binned(run.course.notes[name])
    values = np.array([value for one in bins for value in one.values])

    def fill(axes: Any) -> None:
        axes.axhline(0, color=FAINT, lw=0.8)
        draw_band(axes, bins, GREEN, "", scale=1)
        axes.set_ylim(-1.05, 1.05)

    said = (
        f"Spearman's correlation between what the {name.removesuffix('_rank_correlation')} surrogate expected and what was measured is "
        f"{correlation(float(values.mean()))} on average (band: 10–90 % of participants), above 0 in "
        f"{percent(float((values > 0).mean()), 0)} of {many(len(values), 'participation')}; "
        "0 is guessing, 1 a perfect order."
    )
    rows = tuple((b.name, *map(correlation, (b.mean, b.quantile(0.1), b.quantile(0.9)))) for b in bins)
    numbers = Numbers(("round", "mean", "10 % below", "90 % below"), rows)
    vertical = Axis("rank correlation", "−1 to 1")
    return Figure("surrogate", title, ROUND, vertical, said, fill, numbers, "third", SMALL, thinning(bins, run.course.notes[name]))


SHARES = {  # name -> in the legend, its colour, in a sentence
    "unique_share": ("different from each other", BLUE, "are different ones"),
    "known_share": ("already in the population", ORANGE, "were in the population already"),
    "over_budget_share": ("over the budget", VERMILION, "were over the budget"),
}


def _generator(run: RunView) -> Shown:
    title = "What was drawn: unique, known, over budget"
    notes = run.course.notes
    courses = {name: binned(notes[name]) for name in SHARES if name in notes}
    if not courses:
        return Missing(title, "The ledger does not say how unique candidates were: the method draws none, or it has no generator.")

    def fill(axes: Any) -> None:
        for name, bins in courses.items():
            label, colour, _ = SHARES[name]
            draw_band(axes, bins, colour, label)
        axes.set_ylim(-4, 104)
        axes.legend(loc="center right")

    shares = {name: float(np.mean([value for one in bins for value in one.values])) for name, bins in courses.items()}
    each = ", ".join(f"{percent(share)} {SHARES[name][2]}" for name, share in shares.items())
    said = f"Of the architectures drawn in a participation {each}, on average. "
    said += "Every draw is valid by construction: it is decoded to the nearest architecture of the space."
    first = next(iter(courses.values()))
    rows = tuple((b.name, *(percent(bins[i].mean) if i < len(bins) else "–" for bins in courses.values())) for i, b in enumerate(first))
    numbers = Numbers(("round", *(SHARES[name][0] for name in courses)), rows)
    vertical = Axis("share of what was drawn", "%")
    thinned = thinning(first, notes[next(iter(courses))])
    return Figure("generator", title, ROUND, vertical, said, fill, numbers, "third", SMALL, thinned)


def other_notes(run: RunView) -> Numbers | None:
    """What the method noted besides, as a table."""
    shown = {"best_score", "median_score", *SHARES}
    rows = []
    for name, by_round in sorted(run.course.notes.items()):
        if name in shown or name.endswith("_rank_correlation"):
            continue
        bins = binned(by_round, len(by_round))
        values = [value for one in bins for value in one.values]
        numbers = (bins[0].mean, bins[-1].mean, min(values), max(values))
        rows.append((name, *(f"{number:.4g}" for number in numbers), str(len(values))))
    return Numbers(("note", "mean of the first round", "mean of the last", "lowest", "highest", "noted"), tuple(rows)) if rows else None
