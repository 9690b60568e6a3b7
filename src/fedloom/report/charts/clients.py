"""What each client got: its accuracy, what it gained over training alone, and what its network costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from operator import attrgetter
from typing import Any

import numpy as np

from fedloom.core.result import ClientResult
from fedloom.maths.ranking import spearman
from fedloom.report.figure import BLUE, FAINT, GREEN, INK, SERIES, VERMILION, Axis, Figure, Missing, Numbers, Shown, draw_dots
from fedloom.report.view import Baseline, RunView
from fedloom.report.words import AT_SITES, byte_count, correlation, count, listed, many, one_class_words, percent, plain, points

NAMED = 40  # clients whose names fit beside their bars


def no_clients(run: RunView) -> str:
    if run.finished:
        return AT_SITES
    return f"No client has its personal model yet. Go on with `{run.goes_on}`."


def gains(run: RunView, baseline: Baseline) -> dict[str, float]:
    """client -> accuracy above the baseline's, of the clients that both have."""
    others = baseline.accuracies
    return {client.name: client.test_accuracy - others[client.name] for client in run.clients if client.name in others}


def client_bars(run: RunView, baselines: Sequence[Baseline]) -> Shown:
    title = "Every client's test accuracy"
    if not run.clients:
        return Missing(title, no_clients(run))
    ranked, accuracy = run.by_accuracy, Axis("test accuracy", "%")
    by_method = {baseline.method: baseline for baseline in baselines}
    named = len(ranked) <= NAMED

    def marks(method: str) -> tuple[list[int], list[float]]:
        """Places among the ranked of the clients that a baseline has too, and their accuracies there."""
        known = by_method[method].accuracies
        shared = [place for place, client in enumerate(ranked) if client.name in known]
        return shared, [100 * known[ranked[place].name] for place in shared]

    def fill_named(axes: Any) -> None:
        places = range(len(ranked))
        axes.barh(places, [100 * client.test_accuracy for client in ranked], color=BLUE, alpha=0.75, height=0.72, label=run.method)
        for method, mark, colour in (("local", "|", VERMILION), ("fedavg", "d", GREEN)):
            if method in by_method:
                shared, accuracies = marks(method)
                style = {"mew": 2, "ms": 9} if mark == "|" else {"ms": 4}
                axes.plot(accuracies, shared, ls="", marker=mark, color=colour, label=method, **style)
        if "local" in by_method:
            own = gains(run, by_method["local"])
            for i, client in enumerate(ranked):
                if client.name in own:
                    axes.text(101.5, i, points(own[client.name]), va="center", color=VERMILION if own[client.name] < -5e-4 else INK)
            axes.text(101.5, -1.1, "gain", va="center", weight="bold")
        axes.set_yticks(places, [plain(client.name, 20) for client in ranked])
        axes.set_ylim(len(ranked) - 0.4, -1.6 if "local" in by_method else -0.6)
        axes.set_xlim(0, 113 if "local" in by_method else 102)
        axes.set_xticks(range(0, 101, 20))
        axes.grid(axis="y", visible=False)
        _legend(axes)

    def fill_many(axes: Any) -> None:
        places = range(1, len(ranked) + 1)
        axes.bar(places, [100 * client.test_accuracy for client in ranked], color=BLUE, alpha=0.6, width=1.0, label=run.method)
        for method, mark, colour in (("local", "_", VERMILION), ("fedavg", ".", GREEN)):
            if method in by_method:
                shared, accuracies = marks(method)
                axes.plot([place + 1 for place in shared], accuracies, ls="", marker=mark, ms=3, color=colour, label=method)
        axes.set_ylim(0, 102)
        axes.grid(axis="x", visible=False)
        _legend(axes)

    return Figure(
        "clients",
        title,
        accuracy if named else Axis("client", "place, best first"),
        Axis("client", "best first") if named else accuracy,
        _said_of_clients(run, ranked, by_method.get("local")),
        fill_named if named else fill_many,
        client_numbers(run, baselines),
        height=1.1 + 0.155 * max(len(ranked), 6) if named else 3.0,
    )


def distribution(run: RunView, baselines: Sequence[Baseline]) -> Shown:
    """Every client a dot, this run and its baselines side by side."""
    title = "All clients, by method"
    if not run.clients:
        return Missing(title, no_clients(run))
    groups = {run.method: [client.test_accuracy for client in run.clients]}
    groups |= {baseline.method: list(baseline.accuracies.values()) for baseline in baselines}
    numbers = Numbers(
        ("method", "mean", "spread", "lowest", "median", "highest"),
        tuple((name, *(percent(float(n)) for n in (np.mean(v), np.std(v), min(v), np.median(v), max(v)))) for name, v in groups.items()),
    )
    lowest = min(groups, key=lambda name: min(groups[name]))
    narrow = min(groups, key=lambda name: float(np.std(groups[name])))
    if len(groups) == 1:
        median = percent(float(np.median(groups[run.method])))
        said = f"The median client has {median}. There is no other run on the same split to compare with."
    else:
        said = f"Dots are clients, lines are means. The lowest client of all is one of {lowest}, with {percent(min(groups[lowest]))}; "
        said += f"clients differ least under {narrow}, by ± {percent(float(np.std(groups[narrow])))}."
    return strips("distribution", title, groups, said, numbers)


def strips(key: str, title: str, groups: Mapping[str, Sequence[float]], said: str, numbers: Numbers) -> Figure:
    def fill(axes: Any) -> None:
        for place, (values, colour) in enumerate(zip(groups.values(), cycle(SERIES))):
            ranked = np.sort(np.asarray(values))
            aside = 0.24 * np.sin(2.4 * np.arange(len(ranked)))  # so that dots do not hide each other; the same every time
            draw_dots(axes, place + aside, 100 * ranked, colour, 4 if len(ranked) <= NAMED else 2.5, 0.6)
            axes.plot([place - 0.36, place + 0.36], [100 * ranked.mean()] * 2, color=INK, lw=1.6)
        axes.set_xticks(range(len(groups)), [plain(name, 18) for name in groups], rotation=30 if len(groups) > 5 else 0)
        axes.set_xlim(-0.6, len(groups) - 0.4)
        axes.grid(axis="x", visible=False)

    return Figure(key, title, Axis("method", "by name"), Axis("test accuracy", "%"), said, fill, numbers)


def against_alone(run: RunView, baselines: Sequence[Baseline]) -> Shown:
    title = "Who gains: with the federation, and alone"
    local = next((baseline for baseline in baselines if baseline.method == "local"), None)
    if not run.clients:
        return Missing(title, no_clients(run))
    if local is None or not gains(run, local):
        why = "local is the method of this run" if run.method == "local" else "there is no run of local on the same split"
        return Missing(title, f"What clients reach alone is not known: {why}.")
    own = gains(run, local)
    pairs = [(100 * local.accuracies[client.name], 100 * client.test_accuracy) for client in run.clients if client.name in own]

    def fill(axes: Any) -> None:
        low = min(min(pair) for pair in pairs) - 3
        axes.plot([low, 101], [low, 101], color=FAINT, lw=0.8)
        for better, colour, mark in ((True, BLUE, "o"), (False, VERMILION, "s")):
            some = [(x, y) for x, y in pairs if (y >= x) == better]
            name = "better with it, or equal" if better else "better alone"
            draw_dots(axes, [x for x, _ in some], [y for _, y in some], colour, 4, 0.75, mark, name)
        axes.legend(loc="lower right")

    related = spearman([x for x, _ in pairs], [y - x for x, y in pairs])
    said = "Above the line a client is better off with the federation."
    if related is not None:
        tends = (
            "Those who do badly alone gain most"
            if related < -0.2
            else "Those who do well alone gain most"
            if related > 0.2
            else "Gains hardly depend on how well a client does alone"
        )
        said += f" {tends} (rank correlation of gain and accuracy alone {correlation(related)})."
    rows = tuple(
        (plain(name), percent(local.accuracies[name]), percent(local.accuracies[name] + gain), points(gain))
        for name, gain in sorted(own.items(), key=lambda item: item[1])
    )
    numbers = Numbers(("client", "alone", "with the federation", "gain, points"), rows)
    return Figure("gain", title, Axis("test accuracy alone (local)", "%"), Axis(f"test accuracy by {run.method}", "%"), said, fill, numbers)


def against_images(run: RunView) -> Shown:
    """Whether those with little data are left behind."""
    axis = Axis("training images of a client", "number")
    return _against(run, "images", "training images", axis, 1, attrgetter("train_examples"), "{:,.0f} images".format, "half", 2.9)


def _legend(axes: Any) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, borderaxespad=0.2)


def client_numbers(run: RunView, baselines: Sequence[Baseline]) -> Numbers:
    columns = ["client", "test accuracy", "validation"]
    columns += [text for baseline in baselines for text in (baseline.method, f"gain over {baseline.method}, points")]
    columns += ["training images", "test images", "rounds", "parameters", "MACs"]
    rows = []
    for client in run.by_accuracy:
        row = [plain(client.name), percent(client.test_accuracy), percent(client.validation_accuracy)]
        for baseline in baselines:
            other = baseline.accuracies.get(client.name)
            row += [percent(other), points(None if other is None else client.test_accuracy - other)]
        row += [str(client.train_examples), str(client.test_examples), str(run.course.rounds_of.get(client.name, 0))]
        rows.append((*row, f"{client.parameters:,}", f"{client.macs:,}"))
    return Numbers(tuple(columns), tuple(rows))


def _said_of_clients(run: RunView, ranked: Sequence[ClientResult], local: Baseline | None) -> str:
    best, worst = ranked[0], ranked[-1]
    if len(ranked) == 1:
        said = f"The only client, {plain(best.name)}, has {percent(best.test_accuracy)}."
    else:
        said = f"From {percent(best.test_accuracy)} ({plain(best.name)}) down to {percent(worst.test_accuracy)} ({plain(worst.name)})."
    if remark := one_class_words(run.one_class):
        said += f" {remark}"
    if local is None:
        return said
    own = gains(run, local)
    lost = [name for name, gain in sorted(own.items(), key=lambda item: item[1]) if gain < -5e-4]
    better = sum(gain > 5e-4 for gain in own.values())
    said += f" {better} of {many(len(own), 'client')} {'is' if better == 1 else 'are'} better off than by training alone"
    return said + (f"; worse off: {listed([plain(name) for name in lost])}." if lost else "; none is worse off.")


# -- accuracy against cost ---------------------------------------------------------------
def cost_figures(run: RunView) -> list[Shown]:
    """Against parameters, multiply-accumulates and bytes."""

    def sent(client: ClientResult) -> int:
        return run.course.bytes_of.get(client.name, 0)

    return [
        _against(run, "parameters", "parameters", Axis("parameters of its network", "thousands"), 1e3, attrgetter("parameters"), count),
        _against(run, "macs", "multiply-accumulates", Axis("multiply-accumulates per image", "millions"), 1e6, attrgetter("macs"), count),
        _against(run, "bytes", "bytes sent both ways", Axis("sent and received in the whole run", "MB"), 1e6, sent, byte_count),
    ]


def _against(
    run: RunView,
    key: str,
    name: str,
    axis: Axis,
    unit: float,
    size: Callable[[ClientResult], float],
    shown: Callable[[float], str],
    width: str = "third",
    height: float = 2.3,
) -> Shown:
    """unit: what stands as 1 on the axis."""
    title = f"Accuracy against {name}"
    if not run.clients:
        return Missing(title, no_clients(run))
    sizes = [size(client) for client in run.clients]
    accuracies = [100 * client.test_accuracy for client in run.clients]

    def fill(axes: Any) -> None:
        draw_dots(axes, [number / unit for number in sizes], accuracies, BLUE, 4 if len(sizes) <= NAMED else 2.8, 0.7)
        axes.set_xlim(left=0)

    low, high = shown(min(sizes)), shown(max(sizes))
    related = spearman(sizes, accuracies)
    if low == high:
        said = f"All clients are alike: {low}." if len(sizes) > 1 else f"There is one client, with {low}."
    elif related is None:
        said = f"From {low} to {high}; all clients have the same accuracy."
    else:
        strength = "hardly related to it" if abs(related) < 0.2 else "higher with more of it" if related > 0 else "lower with more of it"
        said = f"From {low} to {high}; accuracy is {strength} (rank correlation {correlation(related)})."
    rows = tuple((plain(client.name), shown(size(client)), percent(client.test_accuracy)) for client in run.by_accuracy)
    numbers = Numbers(("client", name, "test accuracy"), rows)
    return Figure(f"accuracy-against-{key}", title, axis, Axis("test accuracy", "%"), said, fill, numbers, width, height)
