"""`fedloom compare`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from fedloom import compare as comparison
from fedloom import config
from fedloom.commands.terminal import PrintJson, console, new_console, say, source_and_changes, stoppable
from fedloom.core.errors import FedloomError, InvalidConfig
from fedloom.report.terminal.comparison import comparison_card, comparison_notes, comparison_table
from fedloom.report.terminal.live_runs import LiveRuns


def compare(
    methods: Annotated[str, typer.Option(help="methods to compare with the first, such as perfedsde,fedavg,local")],
    source: Annotated[str, typer.Argument(metavar="[PRESET or FILE.toml]", help="what to run; default: quickstart")] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="settings for all methods; seed is the first seed")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="number of seeds; each seed has its own split")] = 1,
    jobs: Annotated[
        int, typer.Option(min=0, help="runs at a time, a process each; 0: one per core, or one if a run uses a GPU or several processes")
    ] = 0,
    side_by_side: Annotated[
        int,
        typer.Option(min=1, help="runs at a time in one process, whose clients train and score together; for a GPU"),
    ] = 1,
    as_json: PrintJson = False,
) -> None:
    """Run several methods on the same splits and compare them client by client.

    Every method and seed is an ordinary run in runs/compare-NAME/METHOD-SEED, or in run.folder/METHOD-SEED. Finished runs are not
    repeated. Stopped runs continue.
    """
    source, changes = source_and_changes(source, overrides)
    settings = config.load(source, changes)
    if side_by_side > 1 and (jobs > 1 or settings.engine != "inline"):
        other = f"--jobs {jobs}" if jobs > 1 else f"engine={settings.engine}"
        raise InvalidConfig(f"--side-by-side {side_by_side} puts several runs into one process, {other} into several. Choose one of them")
    jobs = jobs or comparison.usual_jobs(settings)
    names = [method.strip() for method in methods.split(",")]
    runs = comparison.plan(source, changes, names, seeds)
    own = comparison.own_settings(source, changes, names)
    watching = new_console(stderr=True) if as_json else console
    with stoppable("The same command goes on from here"), LiveRuns(watching, [run.name for run in runs]) as view:
        if side_by_side > 1:
            failures = comparison.execute_side_by_side(runs, side_by_side, view)
        else:
            failures = comparison.execute(runs, jobs, view)
    results = comparison.collect(runs, failures)
    card = comparison_card(results)
    card["folder"] = str(runs[0].folder.parent)
    card["own_settings"] = [asdict(one) for one in own]
    card["failed"] = [{"run": failure.run.name, "exit_code": failure.exit_code, "reason": failure.reason} for failure in failures]
    if as_json:
        print(json.dumps(card, indent=2))
    elif len(failures) < len(runs):
        console.print(comparison_table(card))
        say(comparison_notes(card))
        for warning in [*map(str, own), *comparison.stale(results)]:
            say(warning)
        say(f"The runs are in {card['folder']}, in a folder for each method and seed")
    if failures:
        first = failures[0]
        error = FedloomError(f"{len(failures)} of {len(runs)} runs failed, first {first.run.name}: {first.reason}")
        error.exit_code = first.exit_code
        raise error
