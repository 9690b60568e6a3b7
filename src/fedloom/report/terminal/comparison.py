"""Several methods side by side: their numbers, and the paired difference of each to the first."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from fedloom.maths.paired import CONFIDENCE, paired_difference

SCHEMA = "fedloom.comparison/1"
Result = Mapping[str, Any]  # a result.json


def comparison_card(results: Mapping[str, Mapping[int, Result]]) -> dict[str, Any]:
    """method -> seed -> result becomes the comparison as JSON has it. Accuracies are shares; the first method is the one compared to."""
    first, *_ = results
    seeds = sorted({seed for runs in results.values() for seed in runs})
    methods = [_card(method, runs, results[first] if method != first else {}) for method, runs in results.items()]
    return {"schema": SCHEMA, "compared_to": first, "seeds": seeds, "methods": methods}


def _card(method: str, runs: Mapping[int, Result], reference: Mapping[int, Result]) -> dict[str, Any]:
    rows = [
        {
            "seed": seed,
            "mean": result["accuracy"]["mean"],
            "std": result["accuracy"]["std"],
            "clients": len(result["clients"]),
            "seconds": result["cost"]["seconds"],
            "bytes_up": result["cost"]["bytes_up"],
        }
        for seed, result in sorted(runs.items())
    ]
    means = [row["mean"] for row in rows]
    return {
        "method": method,
        "accuracy": {
            "mean": _mean(means),
            "std_over_clients": _mean([row["std"] for row in rows]),
            "std_over_seeds": statistics.stdev(means) if len(means) > 1 else None,
        },
        "seconds": _mean([row["seconds"] for row in rows]),
        "bytes_up": _mean([row["bytes_up"] for row in rows]),
        "difference": _difference(reference, runs),
        "runs": rows,
    }


def _difference(first: Mapping[int, Result], second: Mapping[int, Result]) -> dict[str, Any] | None:
    """Of the same clients at the same seeds; nothing where there are none."""
    before: list[float] = []
    after: list[float] = []
    by_seed = {}
    for seed in sorted(first.keys() & second.keys()):
        mine, theirs = ({client["name"]: client["test_accuracy"] for client in run[seed]["clients"]} for run in (first, second))
        same = [name for name in mine if name in theirs]
        before += [mine[name] for name in same]
        after += [theirs[name] for name in same]
        by_seed[seed] = _mean([theirs[name] - mine[name] for name in same])
    return {**asdict(paired_difference(before, after)), "by_seed": by_seed} if before else None


def _mean(values: list[Any]) -> float | None:
    return statistics.fmean(values) if values else None


def comparison_table(card: Mapping[str, Any]) -> Table:
    """Accuracies in %, differences in points; the mean over seeds of everything."""
    several = len(card["seeds"]) > 1
    titles = ("method", "test\naccuracy", *["±\nseeds"] * several, "seconds", "MB up", f"against\n{card['compared_to']}", "p")
    table = Table(
        *(Column(title, justify="right" if number else "left", no_wrap=True) for number, title in enumerate(titles)),
        box=None,
        padding=(0, 2, 0, 0),
    )
    for method in card["methods"]:
        accuracy, difference = method["accuracy"], method["difference"]
        if accuracy["mean"] is None:
            table.add_row(method["method"], "failed")
            continue
        row = [method["method"], f"{_points(accuracy['mean'])} ± {_points(accuracy['std_over_clients'])}"]
        row += [_points(accuracy["std_over_seeds"])] * several
        row += [f"{method['seconds']:.0f}", f"{method['bytes_up'] / 1e6:.1f}"]
        if difference:
            interval = "" if difference["low"] is None else f" [{_points(difference['low'], '+')}, {_points(difference['high'], '+')}]"
            row += [_points(difference["mean"], "+") + interval, f"{difference['p']:.2g}"]
        table.add_row(*map(Text, row))
    return table


def comparison_notes(card: Mapping[str, Any]) -> str:
    """What the table's columns mean."""
    seeds = card["seeds"]
    over = f"seed {seeds[0]}" if len(seeds) == 1 else f"the mean of {len(seeds)} seeds"
    lines = [f"Test accuracy in %, ± the spread over clients{' and over seeds' * (len(seeds) > 1)}; {over}."]
    pairs = [method["difference"]["pairs"] for method in card["methods"] if method["difference"]]
    if pairs:
        counts = "–".join(str(count) for count in sorted({min(pairs), max(pairs)}))
        tests = f"{CONFIDENCE:.0%} Student t interval, p of Wilcoxon's signed-rank test"
        lines.append(f"Differences in points, paired by client and seed ({counts} pairs): {tests}.")
    return "\n".join(lines)


def _points(share: float | None, sign: str = "") -> str:
    return "–" if share is None else f"{100 * share:{sign}.1f}"
