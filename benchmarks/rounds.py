"""The table of twenty rounds of `cifar10-paper` in docs/explain/numbers.md, from the records that `record.py` made of the runs.

    python benchmarks/rounds.py [--results benchmarks/results]

Accuracy is that of a round's participants after their training, on test images, before personal models are taken; seconds by stage are
medians over visits of a client, those of a round what the whole run took, divided by its rounds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).parent / "results"
SPACES = {"mobilenetv3": "MobileNetV3", "darts": "DARTS", "nasvit": "NASViT"}
STAGES = ("generate", "rescore", "surrogate", "train", "score", "test")
QUARTERS = ((1, 5), (6, 10), (11, 15), (16, 20))
MISSING = "not measured yet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    print(table(parser.parse_args().results), end="")


def table(results: Path) -> str:
    head = ["space", *(f"rounds {first}–{last}" for first, last in QUARTERS), "workers", "seconds a round", *STAGES, "record"]
    rows = [row(results / f"cifar10-paper-{name}.json", title) for name, title in SPACES.items()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)) + "\n"


def row(file: Path, title: str) -> list[str]:
    if not file.is_file():
        return [title, MISSING, *[""] * (len(QUARTERS) + len(STAGES) + 2)]
    record: dict[str, Any] = json.loads(file.read_text())
    accuracy = {one["round"]: one["accuracy"] for one in record["course"]}
    means = [f"{100 * fmean(accuracy[number] for number in range(first, last + 1)):.1f} %" for first, last in QUARTERS]
    settings = record["settings"]
    workers = settings["processes"]["workers"] if settings["engine"] == "processes" else 1
    a_round = f"{record['cost']['seconds'] / record['rounds']:.1f}"
    spent = [f"{record['median_seconds']['round'][stage]:.2f}" for stage in STAGES]
    return [title, *means, str(workers), a_round, *spent, f"[json](../../benchmarks/results/{file.name})"]


if __name__ == "__main__":
    main()
