"""What each part of the search around an anchor is worth: every arm on the same splits and seeds, paired client by client.

    python benchmarks/recipe.py quickstart [--first-seed 0] [--seeds 10] [--arms all,control,…] [--set key=value] [--name recipe-digits]
    python benchmarks/recipe.py cifar10 --seeds 2 --set data.folder=data
    python benchmarks/recipe.py --tables [NAME …]

An arm is the preset with a few settings changed; ``control`` is one fixed network, the anchor, with the same training, fine-tuning and
rejoining. Runs lie in runs/NAME/ARM-SEED. The same command goes on where it was stopped; --minutes stops it in time. A record that is
there gets the new arms and seeds beside its own, so that a comparison can be made in pieces. --tables prints records without running.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from fedloom import comparing, config
from fedloom.core.result import mean_and_std
from fedloom.engine.store import Store
from fedloom.maths.paired import paired_difference
from fedloom.report.terminal.live_runs import LiveRuns

RESULTS = Path(__file__).parent / "results"
CONTROL, ALL = "control", "all"
PLACE = "data.folder="  # on one machine
FEDAVG = ("method=fedavg",)
PUBLISHED = (  # Algorithm 1
    *("perfedsde.anchor=", "perfedsde.warmup=0", "perfedsde.distance=1", "perfedsde.sampling=archive", "perfedsde.same_weights=false"),
    *("perfedsde.criterion=accuracy", "perfedsde.renewal=1", "perfedsde.restarts=true", "perfedsde.finalists=0", "perfedsde.drift=false"),
)
ARMS: dict[str, tuple[str, ...]] = {
    CONTROL: FEDAVG,
    "control-twice": FEDAVG,  # as many epochs again: about the arithmetic of the search
    "control-drift": ("method=scaffold",),  # on the anchor too
    "control-frozen": ("method=scaffold", "scaffold.classifier=frozen"),
    "alone": ("method=local",),
    ALL: ("perfedsde.drift=false",),  # as the presets were at first; those below leave one thing out of what they are now
    "published": PUBLISHED,
    "no-warm-start": ("perfedsde.warmup=0",),
    "any-distance": ("perfedsde.distance=1", "perfedsde.sampling=archive"),
    "archive": ("perfedsde.sampling=archive",),
    "own-weights": ("perfedsde.same_weights=false", "perfedsde.renewal=1"),
    "by-accuracy": ("perfedsde.criterion=accuracy",),
    "newest-score": ("perfedsde.renewal=1",),
    "restarts": ("perfedsde.restarts=true",),
    "anchor-only": ("training.evidence=1000",),  # nobody leaves the anchor, nor the first rate
    "no-rejoin": ("training.rejoin=false",),
    "drift": ("perfedsde.drift=true",),  # as the presets are
    "frozen": ("perfedsde.classifier=frozen",),
}


def changes_of(arm: str, source: str, common: Sequence[str]) -> list[str]:
    own = [*common, *ARMS[arm]]
    if arm == "control-twice":
        own.append(f"training.epochs={2 * config.load(source, own).training.epochs}")
    return own


def planned(source: str, arms: Sequence[str], seeds: Sequence[int], common: Sequence[str], folder: Path) -> list[comparing.PlannedRun]:
    runs = []
    for seed in seeds:
        for arm in arms:
            place = folder / f"{arm}-{seed}"
            own = [*changes_of(arm, source, common), f"seed={seed}", f"run.folder={json.dumps(str(place))}"]
            runs.append(comparing.PlannedRun(arm, seed, place, comparing.command_for(source, own, place)))
    return runs


def reached(run: comparing.PlannedRun) -> dict[str, Any]:
    """What each client reached, and the cost."""
    result = comparing.result_of(run)
    return {
        "accuracy": {client["name"]: client["test_accuracy"] for client in result["clients"]},
        "gmacs": result["cost"]["trained_macs"] / 1e9,
        "seconds": result["cost"]["seconds"],
    }


def run_record(run: comparing.PlannedRun) -> dict[str, Any]:
    """The same, how many left the anchor, and what made it."""
    final = [entry for entry in Store(run.folder).read_ledger() if entry.final]
    made = {what: comparing.result_of(run)["environment"][what] for what in ("commit", "device")}
    return {**reached(run), **made, "left": sum(entry.notes.get("left_prior", 0.0) for entry in final) / len(final)}


def results_of(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """The arms or methods of a record as `fedloom compare` has results: arm -> seed -> result. What a record does not say is None."""
    return {
        arm: {
            int(seed): {
                "accuracy": one.get("statistics") or dict(zip(("mean", "std"), mean_and_std([*one["accuracy"].values()]), strict=True)),
                "clients": [{"name": name, "test_accuracy": accuracy} for name, accuracy in one["accuracy"].items()],
                "cost": {"seconds": one.get("seconds"), "bytes_up": one.get("bytes_up")},
            }
            for seed, one in by_seed.items()
        }
        for arm, by_seed in rows.items()
    }


def write_record(name: str, record: Mapping[str, Any]) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def preset_of(source: str) -> dict[str, Any]:
    """What a preset sets, flat: a record says it, because presets change."""
    tables = config.read_tables(source, {})
    flat = {f"{name}.{key}": value for name, table in tables.items() if isinstance(table, dict) for key, value in table.items()}
    return {name: value for name, value in tables.items() if not isinstance(value, dict)} | flat


def joined(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """A record with arms and seeds of an earlier one, which it replaces where both have them; preset and arms must be the same."""
    known, preset = before.get("preset"), now["preset"]
    if known != preset:
        other = sorted(name for name in {*known, *preset} if known.get(name) != preset.get(name)) if known else []
        why = f"another {', '.join(other)}" if other else "no word about its preset"
        sys.exit(f"the record there has {why}, so its runs cannot stand beside these. Choose another --name")
    differ = [arm for arm, own in now["settings"].items() if before["settings"].get(arm, own) != own]
    if differ:
        sys.exit(f"the record there has other settings for {', '.join(differ)}. Choose another --name")
    arms = {arm: {**before["arms"].get(arm, {}), **now["arms"].get(arm, {})} for arm in {**before["arms"], **now["arms"]}}
    ordered = {arm: dict(sorted(by_seed.items(), key=lambda row: int(row[0]))) for arm, by_seed in arms.items()}
    command = "; ".join(dict.fromkeys([*before["command"].split("; "), now["command"]]))
    return {**now, "command": command, "settings": {**before["settings"], **now["settings"]}, "arms": ordered}


def print_records(names: Sequence[str], pattern: str, table: Callable[[Mapping[str, Any]], str]) -> None:
    """Records by their names; without names all that fit the pattern."""
    for name in names or sorted(path.stem for path in RESULTS.glob(f"{pattern}.json")):
        record = json.loads((RESULTS / f"{name}.json").read_text())
        print(f"{name}: {record['command']}\n\n{table(record)}\n")


def table(record: Mapping[str, Any]) -> str:
    """Of a record, in Markdown: every arm against the control, over all clients of the seeds that both have."""
    lines = ["| arm | seeds | test % | against control | 95 % | p | seeds won | left the anchor | GMAC |", "|" + 9 * "---|"]
    control = record["arms"].get(CONTROL, {})
    for arm, by_seed in record["arms"].items():
        if not by_seed:
            continue
        test = mean(mean(one["accuracy"].values()) for one in by_seed.values())
        macs, left = (mean(one[what] for one in by_seed.values()) for what in ("gmacs", "left"))
        both = [seed for seed in by_seed if seed in control]
        cells = ["", "", "", ""]
        if arm != CONTROL and both:
            pairs = [(control[seed]["accuracy"], by_seed[seed]["accuracy"]) for seed in both]
            rows = [(first[client], second[client]) for first, second in pairs for client in first]
            found = paired_difference(*zip(*rows, strict=True))
            won = sum(mean(second.values()) > mean(first.values()) for first, second in pairs)
            interval = "" if found.low is None or found.high is None else f"{100 * found.low:+.2f} to {100 * found.high:+.2f}"
            cells = [f"{100 * found.mean:+.2f}", interval, f"{found.p:.2g}", f"{won} of {len(both)}"]
        lines.append(f"| {arm} | {len(by_seed)} | {100 * test:.2f} | {' | '.join(cells)} | {left:.0%} | {macs:,.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default="quickstart")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--arms", default=f"{CONTROL},{ALL}", help=f"of {', '.join(ARMS)}; or every")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="for all arms")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time; default: one per core, on a GPU one")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then, and record what is finished")
    parser.add_argument("--name", help="of the record and of the folder in runs/")
    parser.add_argument("--tables", nargs="*", metavar="NAME", help="print these records")
    arguments = parser.parse_args()
    if arguments.tables is not None:
        print_records(arguments.tables, "recipe-*", table)
        return
    arms = list(ARMS) if arguments.arms == "every" else arguments.arms.split(",")
    name, seeds = arguments.name or f"recipe-{arguments.source}", range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    settings = config.load(arguments.source, arguments.set)
    runs = planned(arguments.source, arms, seeds, arguments.set, Path("runs") / name)
    with LiveRuns(Console(), [run.name for run in runs]) as view:
        failures = comparing.execute(runs, arguments.jobs or comparing.usual_jobs(settings), view, arguments.minutes)
    results = comparing.collect(runs, failures)
    if not any(results.values()):
        sys.exit("\n".join(["No run has a result.", *(f"{failure.run.name}: {failure.reason}" for failure in failures)]))
    environment = next(result["environment"] for by_seed in results.values() for result in by_seed.values())
    record = {
        "command": " ".join(["python", *sys.argv]),
        "preset": preset_of(arguments.source),
        "settings": {arm: [one for one in changes_of(arm, arguments.source, arguments.set) if not one.startswith(PLACE)] for arm in arms},
        "environment": environment,
        "arms": {arm: {str(run.seed): run_record(run) for run in runs if run.method == arm and run.seed in results[arm]} for arm in arms},
    }
    place = RESULTS / f"{name}.json"
    record = joined(json.loads(place.read_text()), record) if place.exists() else record
    write_record(name, record)
    print(table(record))
    for failure in failures:
        print(f"{failure.run.name}: {failure.reason}")


if __name__ == "__main__":
    main()
