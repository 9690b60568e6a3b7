"""Could a choice of one's own pay? `fedloom analyse choice` over several runs, as means over runs.

    python benchmarks/choice.py NAME RUN [RUN …]     measures finished runs, and writes benchmarks/results/NAME.json
    python benchmarks/choice.py --tables [NAME …]    prints records

A run that has RUN/analyses/choice.json is not measured again. The runs need the same numbers of architectures and repetitions. A
variance may come out below 0 for one run, so the ceiling is taken of the mean variance over runs, and so are the ends of its interval. Of
a single run intervals are over its clients.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipe import print_records, write_record
from scipy.special import stdtrit

from fedloom.analyses.choice import OTHERS, REPEATS, choice_of, findings
from fedloom.assemble import reopen_run
from fedloom.assemble.environment import environment
from fedloom.commands.choice import SHOWN
from fedloom.engine.store import read_result
from fedloom.maths import choosing

FACTS = ("method", "dataset", "rounds", "epochs", "rate", "repeats", "seed", "found", "commit")
ROWS = tuple(SHOWN)


def measured(folder: Path, others: int, clients: int) -> dict[str, Any]:
    """The table of one run, and the commit that made the run."""
    file = folder / "analyses" / "choice.json"
    work = choice_of(reopen_run(folder), others, REPEATS, clients)

    def show(done: int, of: int, *news: object) -> None:
        if not done % len(work.architectures):
            print(f"{folder}: {done} of {of}", flush=True)

    return {**work.measure(file, show), "commit": read_result(folder)["environment"]["commit"]}


def row_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """What a record keeps of a run: figures, their intervals over its clients, and variances as they are."""
    accuracies, losses = np.array(table["accuracies"], float), np.array(table["losses"], float)
    found, spread = findings(accuracies, losses), choosing.spread(accuracies)
    points, intervals = ({name: found[name][what] for name in ROWS} for what in ("points", "interval"))
    variances = {name: 1e4 * getattr(spread, name) for name in ("architectures", "own", "error")}  # points squared
    sizes = {"clients": len(accuracies), "architectures": accuracies.shape[1], "tested": 100 * float(accuracies[:, 0].mean())}
    return {**{fact: table[fact] for fact in FACTS}, **sizes, "points": points, "intervals": intervals, "variances": variances}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean over runs and its 95 % Student t interval."""
    mean, count = float(np.mean(values)), len(values)
    reach = float(stdtrit(count - 1, 0.975)) * float(np.std(values, ddof=1)) / count**0.5 if count > 1 else float("nan")
    return mean, mean - reach, mean + reach


def table(record: Mapping[str, Any]) -> str:
    """Of a record, in Markdown."""
    rows = record["rows"]
    count, alone = rows[0]["architectures"], rows[0] if len(rows) == 1 else None
    among = f"{alone['clients']} clients" if alone else f"{len(rows)} runs"
    lines = [f"| gain over the first of {count} architectures | points | 95 % over {among} |", "|---|---|---|"]
    own = interval([row["variances"]["own"] for row in rows])
    for name, words in SHOWN.items():
        if alone:
            found = (alone["points"][name], *alone["intervals"][name])
        elif name == "ceiling":
            found = tuple(choosing.ceiling(1e-4 * value, count) * 100 for value in own)
        else:
            found = interval([row["points"][name] for row in rows])
        lines.append(f"| {words} | {found[0]:+.2f} | {found[1]:+.2f} to {found[2]:+.2f} |")
    variances = {name: float(np.mean([row["variances"][name] for row in rows])) for name in rows[0]["variances"]}
    said = ", ".join(f"{name} {max(value, 0.0) ** 0.5:.2f}" for name, value in variances.items())
    first = float(np.mean([row["tested"] for row in rows]))
    return "\n".join([*lines, "", f"The first: {first:.2f} % before rejoining. Standard deviations in points: {said}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--others", type=int, default=OTHERS, help="architectures beside the first")
    parser.add_argument("--clients", type=int, default=0, help="use only this many clients of each run; 0: all")
    parser.add_argument("--command", action="append", default=[], help="what made the runs")
    parser.add_argument("--tables", nargs="*", metavar="NAME", help="print these records")
    arguments = parser.parse_args()
    if arguments.tables is not None:
        print_records(arguments.tables, "choice-*", table)
        return
    if not arguments.runs:
        parser.error("name the record and at least one run")
    tables = [measured(folder, arguments.others, arguments.clients) for folder in arguments.runs]
    if len({np.shape(one["accuracies"])[1:] for one in tables}) > 1:
        parser.error("the runs were not measured with the same numbers of architectures and repetitions")
    sizes = [
        f"--{name} {value}"
        for name, value, usual in (("others", arguments.others, OTHERS), ("clients", arguments.clients, 0))
        if value != usual
    ]
    own = " ".join(["python benchmarks/choice.py", arguments.name, "RUN …", *sizes])
    record = {"command": "; ".join([*arguments.command, own])}
    record |= {"environment": environment(torch.device("cpu")), "rows": [row_of(one) for one in tables]}
    write_record(arguments.name, record)
    print(table(record))


if __name__ == "__main__":
    main()
