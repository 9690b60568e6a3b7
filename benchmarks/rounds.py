"""Table and figure of twenty rounds of `cifar10-paper` in docs/explain/numbers.md, from the records that `record.py` made of the runs.

    python benchmarks/rounds.py [--results benchmarks/results] [--figure docs/explain/figures/rounds.svg]

Accuracy is that of a round's participants after their training, on test images, before personal models are taken; seconds by stage are
medians over visits of a client, those of a round what the whole run took, divided by its rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedloom.report.figure import MARKS, SERIES, Axis, Figure, Numbers, pictures

RESULTS = Path(__file__).parent / "results"
SPACES = {"mobilenetv3": "MobileNetV3", "darts": "DARTS", "nasvit": "NASViT"}
STAGES = ("generate", "rescore", "surrogate", "train", "score", "test")
QUARTERS = ((1, 5), (6, 10), (11, 15), (16, 20))
MISSING = "not measured yet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    print(table(arguments.results), end="")
    if arguments.figure:
        arguments.figure.write_bytes(pictures(curves(arguments.results))["svg"])


def table(results: Path) -> str:
    head = ["space", *(f"rounds {first}–{last}" for first, last in QUARTERS), "workers", "seconds a round", *STAGES, "record"]
    rows = [row(results / f"cifar10-paper-{name}.json", title) for name, title in SPACES.items()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)) + "\n"


def row(file: Path, title: str) -> list[str]:
    if not file.is_file():
        return [title, MISSING, *[""] * (len(QUARTERS) + len(STAGES) + 2)]
    record: dict[str, Any] = json.loads(file.read_text())
    accuracy = course(record)
    means = [quarter([accuracy.get(number) for number in range(first, last + 1)]) for first, last in QUARTERS]
    settings = record["settings"]
    workers = settings["processes"]["workers"] if settings["engine"] == "processes" else 1
    a_round = f"{record['cost']['seconds'] / record['rounds']:.1f}"
    spent = [f"{record['median_seconds']['round'][stage]:.2f}" for stage in STAGES]
    return [title, *means, str(workers), a_round, *spent, f"[json](../../benchmarks/results/{file.name})"]


def quarter(accuracies: list[float | None]) -> str:
    """Their mean, and how many there are if the run ended before."""
    known = [value for value in accuracies if value is not None]
    if not known:
        return ""
    return f"{100 * fmean(known):.1f} %" + (f" ({len(known)} of {len(accuracies)})" if len(known) < len(accuracies) else "")


def course(record: dict[str, Any]) -> dict[int, float]:
    """Accuracy by round."""
    return {one["round"]: one["accuracy"] for one in record["course"]}


def curves(results: Path) -> Figure:
    """Accuracy round by round, one line per space that has a record."""
    files = {title: results / f"cifar10-paper-{name}.json" for name, title in SPACES.items()}
    lines = {title: course(json.loads(file.read_text())) for title, file in files.items() if file.is_file()}
    see = "The same clients take part in every space, so the lines go up and down together."
    return drawn("rounds", lines, see, bottom=20, marks=MARKS)  # leaves room for the names


def drawn(
    key: str, lines: Mapping[str, Mapping[int, float]], see: str, bottom: float, marks: Sequence[str] = ("",) * len(SERIES)
) -> Figure:
    """Accuracy by round on CIFAR-10; lines: name -> round -> share."""

    def fill(axes: Any) -> None:
        for (title, line), colour, mark in zip(lines.items(), SERIES, marks, strict=False):
            axes.plot(list(line), [100 * value for value in line.values()], color=colour, marker=mark, label=title)
        axes.set_ylim(bottom=bottom)
        axes.legend(loc="lower right")

    return Figure(
        key=key,
        title="CIFAR-10, 100 clients, 5 in a round",
        horizontal=Axis("round", "number"),
        vertical=Axis("test accuracy of the round's clients", "%"),
        see=see,
        fill=fill,
        numbers=Numbers(("run", "last"), tuple((title, f"{100 * list(line.values())[-1]:.1f}") for title, line in lines.items())),
    )


if __name__ == "__main__":
    main()
