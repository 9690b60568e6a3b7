"""Turn a run folder into a record for benchmarks/results: settings, accuracy, cost, and the course of the rounds.

    python benchmarks/record.py RUN NAME --command "fedloom run …" [--commit HASH] [--note "…"]

Works on an unfinished run too; the record says how far it came.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

from fedloom.config import read_toml
from fedloom.core.result import LedgerEntry, mean_and_std
from fedloom.engine.store import Store

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--command", action="append", required=True)
    parser.add_argument("--commit", help="where the run could not know it")
    parser.add_argument("--note", default="")
    arguments = parser.parse_args()
    result = json.loads((arguments.run / "result.json").read_text())
    entries = list(Store(arguments.run).read_ledger())
    final = [entry for entry in entries if entry.final]
    mean, std = mean_and_std([entry.test_accuracy for entry in final if entry.test_accuracy is not None])
    settings = read_toml(arguments.run / "config.toml")
    settings["run"].pop("folder")  # places on one machine say nothing to others
    settings["data"].pop("folder")
    environment = result["environment"] | ({"commit": arguments.commit} if arguments.commit else {})
    record = {
        "commands": arguments.command,
        "note": arguments.note,
        "finished": result["finished"],
        "rounds": result["rounds"],
        "personal_models": len(final),
        "accuracy": {"mean": mean, "std": std},
        "cost": result["cost"],
        "median_seconds": {"round": medians([e for e in entries if not e.final]), "final": medians(final)},
        "course": course(entries),
        "environment": environment,
        "settings": settings,
    }
    path = RESULTS / f"{arguments.name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{path}: {len(final)} personal models, accuracy {mean or 0:.2%} ± {std or 0:.2%}")


def medians(entries: list[LedgerEntry]) -> dict[str, float]:
    """Median seconds of each stage over participations."""
    stages = sorted({stage for entry in entries for stage in entry.seconds})
    return {stage: round(statistics.median(entry.seconds.get(stage, 0.0) for entry in entries), 3) for stage in stages}


def course(entries: list[LedgerEntry]) -> list[dict[str, float]]:
    """Round by round: mean test accuracy of the participants after their training, and their seconds together."""
    rounds: dict[int, list[LedgerEntry]] = defaultdict(list)
    for entry in entries:
        if not entry.final:
            rounds[entry.round].append(entry)
    return [
        {
            "round": number + 1,
            "accuracy": round(statistics.fmean(e.test_accuracy or 0.0 for e in group), 4),
            "seconds": round(sum(sum(e.seconds.values()) for e in group), 2),
        }
        for number, group in sorted(rounds.items())
    ]


if __name__ == "__main__":
    main()
