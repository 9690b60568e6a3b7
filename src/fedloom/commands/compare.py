"""`fedloom compare`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom import comparing, config
from fedloom.api import compared, failed
from fedloom.commands.terminal import PrintJson, console, new_console, say, source_and_changes, stoppable
from fedloom.core.errors import InvalidConfig
from fedloom.core.progress import Progress
from fedloom.engine.store import Store
from fedloom.files import check_writable, write_file
from fedloom.report.comparison import blocks_of
from fedloom.report.comparison_files import check_courses, check_table, courses_file, table_file
from fedloom.report.published import TITLE
from fedloom.report.terminal.comparison import comparison_notes, comparison_table, published_notes, published_table
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
    minutes: Annotated[
        float, typer.Option(help="stop after so many minutes and show what is finished; the same command goes on; 0: no limit")
    ] = 0.0,
    over: Annotated[
        str, typer.Option(metavar="KEY=V1,V2,…", help="also for each of these values of a setting: split.alpha=0.1,0.3,1")
    ] = "",
    table: Annotated[
        list[Path] | None, typer.Option(help="also write the table to this file: .csv, .md or .tex; may be given several times")
    ] = None,
    courses: Annotated[
        Path | None, typer.Option(help="also write accuracy, seconds and bytes after each round of each run to this .csv file")
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Run several methods on the same splits and compare them client by client.

    Every method and seed is an ordinary run in runs/compare-NAME/METHOD-SEED, or in run.folder/METHOD-SEED; with --over in a folder
    KEY=VALUE there. Finished runs are not repeated. Stopped runs continue.
    """
    source, changes = source_and_changes(source, overrides)
    settings = config.load(source, changes)
    if side_by_side > 1 and (jobs > 1 or settings.engine != "inline"):
        other = f"--jobs {jobs}" if jobs > 1 else f"engine={settings.engine}"
        raise InvalidConfig(f"--side-by-side {side_by_side} puts several runs into one process, {other} into several. Choose one of them")
    if minutes < 0 or not math.isfinite(minutes) or (minutes and side_by_side > 1):
        cure = "Use --jobs" if minutes > 0 and side_by_side > 1 else "Give a number of minutes, or 0 for no limit"
        raise InvalidConfig(f"--minutes {minutes:g} cannot end {'runs in one process' if side_by_side > 1 else 'a comparison'}. {cure}")
    for path in table or []:
        check_table(path)
    if courses:
        check_courses(courses)
    for path in [*(table or []), *([courses] if courses else [])]:
        check_writable(path)  # now, and not after hours
    names = [method.strip() for method in methods.split(",")]
    sweep = comparing.Sweep.read(over) if over else None
    watching = new_console(stderr=True) if as_json else console
    planned = comparing.plan(source, changes, names, seeds, sweep)  # refuses before anything is shown
    with stoppable("The same command goes on from here"), LiveRuns(watching, [run.name for run in planned]) as view:
        found = compared(source, changes, names, seeds, sweep, view, jobs, side_by_side, minutes or math.inf)
    card, runs, failures = found.card, list(found.runs), list(found.failures)
    if as_json:
        print(json.dumps({**card, "published": [asdict(one) for one in card["published"]]}, indent=2))
    elif len(failures) < len(runs):
        _show(card)
        for warning in dict.fromkeys([*map(str, found.own_settings), *found.stale]):
            say(warning)
        say(f"The runs are in {card['folder']}, in a folder for each method and seed")
    if len(failures) < len(runs):
        _write(card, runs, failures, table or [], courses, sweep, quiet=as_json)
    if failures:
        raise failed(found)


def _show(card: Mapping[str, Any]) -> None:
    for value, block in blocks_of(card):
        if "over" in card:
            say(f"{card['over']} = {value}")
        console.print(comparison_table(block))
    say(comparison_notes(card))
    if card["published"]:
        say(f"{TITLE}:")
        console.print(published_table(card["published"]))
        say(published_notes(card["published"]))


def _write(
    card: Mapping[str, Any],
    runs: list[comparing.PlannedRun],
    failures: list[comparing.Failure],
    tables: list[Path],
    courses: Path | None,
    sweep: comparing.Sweep | None,
    quiet: bool,
) -> None:
    texts = {path: table_file(path, card) for path in tables}
    if courses:
        failed = [failure.run for failure in failures]
        found = {
            (run.value, run.method, run.seed): Progress.of(Store(run.folder).read_ledger()).moments for run in runs if run not in failed
        }
        texts[courses] = courses_file(found, sweep.key if sweep else "")
    for path, text in texts.items():
        write_file(path, text.encode())
        if not quiet:
            say(f"{path}")
