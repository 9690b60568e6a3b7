"""A comparison as a table for a paper or a spreadsheet: CSV, Markdown or LaTeX; and what was reached after each round, as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from fedloom.core.errors import InvalidConfig
from fedloom.core.progress import Moment
from fedloom.report.comparison import STATISTICS, blocks_of, missing_in_words, tests_in_words
from fedloom.report.published import TITLE, Published

COURSE = ("method", "seed", "round", "accuracy_percent", "clients", "seconds", "simulated_seconds", "bytes_up", "bytes_down")
LATEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--", "−": "$-$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}
Card = Mapping[str, Any]


def check_table(path: Path) -> None:
    """Refuses an ending that names no kind of table."""
    if path.suffix not in WRITERS:
        raise InvalidConfig(f"--table {path} names no kind of table by its ending. Use one of {', '.join(WRITERS)}")


def check_courses(path: Path) -> None:
    if path.suffix != ".csv":
        raise InvalidConfig(f"--courses {path} must end in .csv, which is what it will be")


def table_file(path: Path, card: Card) -> str:
    return WRITERS[path.suffix](card)


# -- numbers, for programs ------------------------------------------------------------
def _csv(card: Card) -> str:
    """Accuracies in %, differences in points, all of them means over seeds."""
    rows = []
    for value, block in blocks_of(card):
        for method in block["methods"]:
            accuracy, difference = method["accuracy"], method["difference"] or {}
            rows.append(
                {
                    **({str(card["over"]): value} if "over" in card else {}),
                    "method": method["method"],
                    "seeds": len(method["runs"]),
                    "accuracy_percent": _percent(accuracy["mean"]),
                    "std_over_clients": _percent(accuracy["std_over_clients"]),
                    "std_over_seeds": _percent(accuracy["std_over_seeds"]),
                    **{f"{what}_{name}": _percent(accuracy[f"{what}_{name}"]) for what in STATISTICS for name in ("mean", "std")},
                    "seconds": _number(method["seconds"], 1),
                    "bytes_up": _number(method["bytes_up"], 0),
                    "compared_to": block["compared_to"] if difference else "",
                    "difference_points": _percent(difference.get("mean")),
                    "low": _percent(difference.get("low")),
                    "high": _percent(difference.get("high")),
                    "pairs": difference.get("pairs", ""),
                    "p": _number(difference.get("p"), 6),
                    "p_holm": _number(difference.get("p_holm"), 6),
                }
            )
    for one in _published(card):
        own = {"method": one.method, "accuracy_percent": _percent(one.accuracy), "std_over_clients": _percent(one.spread)}
        rows.append({**own, "origin": "published", "variant": one.what, "source": one.source, "protocol": one.protocol})
    return _lines([*rows[0], "origin", "variant", "source", "protocol"], [{"origin": "run", **row} for row in rows])


def courses_file(courses: Mapping[tuple[str, str, int], Sequence[Moment]], over: str = "") -> str:
    """(value, method, seed) -> its moments. seconds: measured at all clients together; over: the setting that has the values."""
    columns = [*([over] if over else []), *COURSE]
    rows = [
        {
            over: value,
            "method": method,
            "seed": seed,
            "round": moment.round,
            "accuracy_percent": _percent(moment.accuracy),
            "clients": moment.clients,
            "seconds": moment.worked,
            "simulated_seconds": moment.seconds,
            "bytes_up": moment.bytes_up,
            "bytes_down": moment.bytes_down,
        }
        for (value, method, seed), moments in courses.items()
        for moment in moments
    ]
    return _lines(columns, rows)


def _lines(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    file = StringIO()
    writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _percent(share: float | None) -> str:
    return _number(None if share is None else 100 * share, 3)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


# -- text, for readers ------------------------------------------------------------------
def _table(card: Card) -> tuple[list[str], list[list[str]]]:
    """Titles and rows; columns that no row fills are left out."""
    over = str(card.get("over", ""))
    first = {block["compared_to"] for _, block in blocks_of(card)}
    titles = [over, "method", "test accuracy, %", "± seeds", "last participation, %", "best ever, %", "seconds", "MB up"]
    titles += [f"against {', '.join(sorted(first))}, points", "95 % interval", "p, Holm"]
    rows = []
    for value, block in blocks_of(card):
        for method in block["methods"]:
            accuracy, difference = method["accuracy"], method["difference"] or {}
            if accuracy["mean"] is None:
                rows.append([value, method["method"], "failed", *[""] * 8])
                continue
            spreads = [spread(accuracy[f"{what}_mean"], accuracy[f"{what}_std"]) for what in STATISTICS]
            mean = spread(accuracy["mean"], accuracy["std_over_clients"])
            cost = [f"{method['seconds']:.0f}", f"{method['bytes_up'] / 1e6:.1f}"]
            found = [points(difference.get("mean"), "+"), interval(difference), f"{difference['p_holm']:.2g}" if difference else ""]
            rows.append([value, method["method"], mean, points(accuracy["std_over_seeds"]), *spreads, *cost, *found])
    return filled(titles, rows)


def filled(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Without the columns that no row fills."""
    kept = [number for number in range(len(titles)) if any(row[number] for row in rows)]
    return [titles[number] for number in kept], [[row[number] for number in kept] for row in rows]


def notes_of(card: Card) -> list[str]:
    lines = ["Test accuracy of the personal models: mean ± standard deviation over clients; means over seeds."]
    if any(method["accuracy"]["best_ever_mean"] is not None for _, block in blocks_of(card) for method in block["methods"]):
        told = "Last participation (of the clients that took part in a round) and best ever are on test data"
        lines.append(f"{told}, for comparison with papers that report them; they select nothing here.")
    return [*lines, *filter(None, [tests_in_words(card), missing_in_words(card)])]


def _published(card: Card) -> Sequence[Published]:
    found: Sequence[Published] = card.get("published", ())
    return found


def _published_table(card: Card) -> tuple[list[str], list[list[str]]]:
    titles = ["published for", "network or variant", "test accuracy, %", "data set", "source", "protocol"]
    return titles, [[one.method, one.what, one.shown, one.dataset, one.source, one.protocol] for one in _published(card)]


def _markdown(card: Card) -> str:
    parts = [markdown_table(*_table(card), words=("method", str(card.get("over")))), "\n".join(notes_of(card))]
    if _published(card):
        titles, rows = _published_table(card)
        parts += [f"{TITLE}.", markdown_table(titles, rows, words=titles)]
    return "\n\n".join(parts) + "\n"


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str]) -> str:
    """words: the columns that are set to the left."""
    lines = [titles, [":--" if title in words else "--:" for title in titles], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _latex(card: Card) -> str:
    """Tabulars that need no package; notes are comments."""
    lines = [*(f"% {note}" for note in notes_of(card)), *_tabular(*_table(card), words=("method", str(card.get("over"))))]
    if _published(card):
        titles, rows = _published_table(card)
        lines += [f"% {TITLE}.", *_tabular(titles, rows, words=titles)]
    return "\n".join([*lines, ""])


def _tabular(titles: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str]) -> list[str]:
    kinds = "".join("l" if title in words else "r" for title in titles)
    head, *body = [" & ".join(map(_escaped, line)) + r" \\" for line in (titles, *rows)]
    return [rf"\begin{{tabular}}{{{kinds}}}", r"\hline", head, r"\hline", *body, r"\hline", r"\end{tabular}"]


def _escaped(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


def interval(difference: Mapping[str, Any]) -> str:
    """Of a paired difference, in points; nothing of one pair."""
    return "" if difference.get("low") is None else f"{points(difference['low'], '+')} to {points(difference['high'], '+')}"


def spread(mean: float | None, std: float | None) -> str:
    return "" if mean is None else f"{points(mean)} ± {points(std)}"


def points(share: float | None, sign: str = "") -> str:
    return "" if share is None else f"{100 * share:{sign}.2f}"


WRITERS: dict[str, Callable[[Card], str]] = {".csv": _csv, ".md": _markdown, ".tex": _latex}
