"""Methods side by side at scale: a folder of `fedloom compare` as one record, and its table with published rows below.

    fedloom compare cifar10-control rounds=100 --methods fedavg,fedrep,…
    python benchmarks/baselines.py runs/compare-cifar10-control baselines-cifar10 --command "fedloom compare …" [--commit HASH] [--note "…"]
    python benchmarks/baselines.py --tables [NAME …]

Runs that have no result are named in the record and on the screen. A record that is there gets the new rows beside its own, so that a
comparison can be made in pieces. --tables prints records without reading runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipe import RESULTS, print_records, reached, results_of, write_record

from fedloom import comparing
from fedloom.comparing import PlannedRun
from fedloom.methods.base import METHODS
from fedloom.report.comparison import comparison_card
from fedloom.report.comparison_files import table_file
from fedloom.report.neighbours import run_folders
from fedloom.report.published import published_beside
from fedloom.report.reading import flat_settings

UNSAID = ("method", "seed", "run.folder", "data.folder")  # said elsewhere, or places on one machine


def runs_in(folder: Path) -> list[PlannedRun]:
    """Of a comparison, the method that the others are compared to first."""
    found = [(flat_settings(place), place) for place in run_folders([folder])]
    return [PlannedRun(str(settings["method"]), int(settings["seed"]), place, ()) for settings, place in found]


def unfinished(runs: Sequence[PlannedRun]) -> list[comparing.Failure]:
    return [comparing.Failure(run, 1, "it has no result") for run in runs if not comparing.finished(run.folder)]


def record_of(folder: Path) -> dict[str, Any]:
    """What the runs of a comparison reached, each client by its name, and the settings: those of all runs, and each method's own."""
    runs = runs_in(folder)
    failures = unfinished(runs)
    results = comparing.collect(runs, failures)  # refuses runs on different splits
    known = [(run, results[run.method][run.seed]) for run in runs if run.seed in results[run.method]]
    if not known:
        sys.exit(f"{folder}: no run has a result")
    environment = known[0][1]["environment"]
    methods: dict[str, dict[str, Any]] = {run.method: {} for run, _ in known}
    for run, result in known:
        other = {key: value for key, value in result["environment"].items() if value != environment[key]}
        facts = {key: result["cost"][key] for key in ("bytes_up", "bytes_down")} | ({"environment": other} if other else {})
        methods[run.method][str(run.seed)] = {**reached(run), "statistics": result["accuracy"], **facts}
    common, own = settings_of(runs)
    return {
        "dataset": known[0][1]["dataset"],
        "space": known[0][1]["space"],
        "environment": environment,
        "unfinished": [failure.run.name for failure in failures],
        "settings": common,
        "own_settings": own,
        "methods": methods,
    }


def settings_of(runs: Sequence[PlannedRun]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Settings that all runs have alike, without those of methods; and of each method what it has besides: its own table, and others."""
    flat = {run.method: {key: value for key, value in flat_settings(run.folder).items() if key not in UNSAID} for run in runs}
    first = next(iter(flat.values()))
    tables = {key for settings in flat.values() for key in settings if key.partition(".")[0] in METHODS}
    common = {key: value for key, value in first.items() if key not in tables and all(other.get(key) == value for other in flat.values())}

    def belongs(method: str, key: str) -> bool:
        return key.partition(".")[0] == method if key in tables else key not in common

    return common, {method: {key: value for key, value in own.items() if belongs(method, key)} for method, own in flat.items()}


def joined(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """A record with rows of an earlier one, which it replaces where both have them; all runs must have the same settings."""
    differ = sorted(key for key in {*before["settings"], *now["settings"]} if before["settings"].get(key) != now["settings"].get(key))
    if differ or any(before[what] != now[what] for what in ("dataset", "space")):
        sys.exit(f"the record there is of other settings ({', '.join(differ) or 'data set or space'}). Choose another name")
    other = {key: value for key, value in before["environment"].items() if value != now["environment"][key]}
    rows = {
        method: {seed: {**row, "environment": {**other, **row.get("environment", {})}} if other else row for seed, row in by_seed.items()}
        for method, by_seed in before["methods"].items()
    }
    methods = {method: {**rows.get(method, {}), **now["methods"].get(method, {})} for method in {**rows, **now["methods"]}}
    missing = {*before["unfinished"], *now["unfinished"]} - {f"{method}-{seed}" for method, by_seed in methods.items() for seed in by_seed}
    own = {**before["own_settings"], **now["own_settings"]}
    return {**now, "methods": methods, "own_settings": own, "unfinished": sorted(missing)}


def card_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison as `fedloom compare --json` has it, with what papers published for its methods on the same data set."""
    results = results_of(record["methods"])
    published = published_beside({record["dataset"]}, (), list(results))
    return {**comparison_card(results), "published": published}


def table(record: Mapping[str, Any]) -> str:
    """In Markdown: ours with paired intervals, then, apart, what papers published."""
    return table_file(Path("table.md"), card_of(record)).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("name", nargs="?", help="of the record in benchmarks/results")
    parser.add_argument("--command", action="append", default=[], help="that made the runs; may be given several times")
    parser.add_argument("--commit", help="where the runs could not know it")
    parser.add_argument("--note", default="", help="what else a reader must know, such as what ran beside")
    parser.add_argument("--tables", nargs="*", metavar="NAME", help="print these records")
    arguments = parser.parse_args()
    if arguments.tables is not None:
        print_records(arguments.tables, "baselines-*", table)
        return
    if not (arguments.folder and arguments.name and arguments.command):
        parser.error("the folder of a comparison, a name for the record and --command are needed")
    record, commands, place = record_of(arguments.folder), arguments.command, RESULTS / f"{arguments.name}.json"
    if arguments.commit:
        record["environment"] = {**record["environment"], "commit": arguments.commit}
    if place.exists():
        before = json.loads(place.read_text())
        record, commands = joined(before, record), list(dict.fromkeys([*before["command"].split("; "), *commands]))
    write_record(arguments.name, {"command": "; ".join(commands), "note": arguments.note, **record})
    print(table(record))
    for name in record["unfinished"]:
        print(f"{name} has no result, so it is not in the table")
    print(place)


if __name__ == "__main__":
    main()
