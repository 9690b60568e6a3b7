"""Several methods side by side, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from fedloom.report.comparison import blocks_of, missing_in_words, tests_in_words
from fedloom.report.published import Published, protocols_of


def comparison_table(card: Mapping[str, Any]) -> Table:
    """Of a comparison, or of one block of a sweep. Accuracies in %, differences in points; the mean over seeds of everything."""
    several = len(card["seeds"]) > 1
    titles = ("method", "test\naccuracy", *["±\nseeds"] * several, "seconds", "MB up", f"against\n{card['compared_to']}", "p\nHolm")
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
            row += [_points(difference["mean"], "+") + interval, f"{difference['p_holm']:.2g}"]
        table.add_row(*map(Text, row))
    return table


def comparison_notes(card: Mapping[str, Any]) -> str:
    """What the table's columns mean."""
    seeds = max((block["seeds"] for _, block in blocks_of(card)), key=len)
    over = f"seed {seeds[0]}" if len(seeds) == 1 else f"the mean of {len(seeds)} seeds"
    lines = [f"Test accuracy in %, ± the spread over clients{' and over seeds' * (len(seeds) > 1)}; {over}."]
    return "\n".join([*lines, *filter(None, [tests_in_words(card), missing_in_words(card)])])


def published_table(rows: Sequence[Published]) -> Table:
    """Protocols by letters, which ``published_notes`` explains."""
    letters = protocols_of(rows)
    table = Table("method", "network or variant", Column("accuracy", justify="right"), "data set", "source", box=None, padding=(0, 2, 0, 0))
    for one in rows:
        table.add_row(*map(Text, (one.method, one.what, f"{one.shown} ({letters[one.protocol]})", one.dataset, one.source)))
    return table


def published_notes(rows: Sequence[Published]) -> str:
    return "\n".join(f"({letter}) {protocol}." for protocol, letter in protocols_of(rows).items())


def _points(share: float | None, sign: str = "") -> str:
    return "–" if share is None else f"{100 * share:{sign}.1f}"
