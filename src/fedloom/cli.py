"""The command line."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
import typer.core
from rich.console import Console

import fedloom
from fedloom import compare as comparison
from fedloom import config
from fedloom.analyses.client_commands import gain
from fedloom.analyses.client_commands import join as join_in_simulation
from fedloom.analyses.commands import app as analyse
from fedloom.assemble import free_folder, new_run, resume_run, saved_settings
from fedloom.core.errors import DamagedRun, FedloomError, Interrupted, InvalidConfig
from fedloom.core.registry import did_you_mean
from fedloom.core.result import RunResult
from fedloom.core.seeds import rng
from fedloom.engine.newcomers import ROUNDS
from fedloom.engine.run import Watcher
from fedloom.engine.store import Store, read_result
from fedloom.exchange.models import load_model, supernet_of
from fedloom.federate.commands import certs, join_site, serve, site
from fedloom.network_commands import draw, export, import_weights, predict
from fedloom.report.comparison import comparison_card, comparison_notes, comparison_table
from fedloom.report.live import LiveView
from fedloom.report.live_runs import LiveRuns
from fedloom.report.show import client_view, run_view
from fedloom.report.tables import client_table, summary
from fedloom.report.terminal import console, say
from fedloom.report.track import Several, Tracker
from fedloom.reporting.command import report
from fedloom.space_commands import generate, list_, pretrain, pretrain_help, space

typer.core.HAS_RICH = False  # typer escapes brackets for rich even where, as here, its rich help is off
app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=fedloom.__doc__
)
app.add_typer(analyse, name="analyse")
app.command()(gain)
for command in (report, serve, site, certs, space, generate, export, predict, draw):
    app.command()(command)
app.command("list")(list_)
app.command("import-weights")(import_weights)
app.command(epilog=pretrain_help())(pretrain)


def _settings_help() -> str:
    rows = [f"{key} = {default}\n      {meaning}" for key, default, meaning in config.explain()]
    return "Settings (key = default, then its meaning):\n\n\b\n" + "\n".join(rows)


@app.command(epilog=_settings_help())
def run(
    source: Annotated[str, typer.Argument(metavar="[PRESET or FILE.toml]", help="what to run; quickstart if nothing is said")] = "",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings that win over the file's")] = None,
) -> None:
    """Run a federation on this machine."""
    source, changes = _source(source, overrides)
    settings = config.load(source, changes)
    folder = Path(settings.run.folder) if settings.run.folder else free_folder(Path(source).stem)
    start = f", from the weights in {settings.weights}" if settings.weights else ""
    title = f"{settings.method} on {settings.data.name}, into {folder}{start}"
    _watch(folder, title, settings.run.track, lambda view: new_run(settings, folder, view))


def _source(source: str, overrides: list[str] | None) -> tuple[str, list[str]]:
    """The preset or file, and what is to be changed: `fedloom run method=fedavg` changes the quickstart."""
    if "=" in source and not os.path.isfile(source):
        return "quickstart", [source, *(overrides or [])]
    return source or "quickstart", list(overrides or [])


@app.command()
def join(
    source: Annotated[Path, typer.Argument(metavar="RUN or FILE", help="a finished run; with --site a server's newcomers.safetensors")],
    site: Annotated[Path | None, typer.Option(metavar="SITE.toml", help="the newcomer is this site, with its own images")] = None,
    clients: Annotated[int, typer.Option(min=1, help="how many newcomers, without --site")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="perfedrlnas: rounds in which they only search")] = ROUNDS,
    seed: Annotated[int, typer.Option(min=0, help="which data they have, and their draws, without --site")] = 0,
    out: Annotated[Path | None, typer.Option(help="the folder for join.json, .svg and .png; RUN/analyses if not said")] = None,
) -> None:
    """A personal model for who arrives after training: search alone, in the frozen supernet; nothing is uploaded."""
    if site is not None:
        join_site(source, site, rounds)
    else:
        join_in_simulation(source, clients, rounds, seed, out)


@app.command()
def resume(folder: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a stopped run")]) -> None:
    """Continue a stopped run; finished rounds are not repeated."""
    _watch(folder, f"resuming {folder}", saved_settings(folder).run.track, lambda view: resume_run(folder, view))


def _watch(folder: Path, title: str, track: bool, work: Callable[[Watcher], RunResult]) -> None:
    trackers = [Tracker(folder / "tensorboard")] if track else []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as from the keyboard: workers end, nothing stays behind
    try:
        with LiveView(console, title) as view:
            result = work(Several([view, *trackers]) if trackers else view)
    except KeyboardInterrupt:
        begun = (folder / "config.toml").exists()
        raise Interrupted(f"stopped. Continue with `fedloom resume {folder}`" if begun else "stopped before the run began") from None
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    console.print(client_table(result))
    say(summary(result))
    if "weights" in result.environment:
        say(f"It began with {result.environment['weights']}")
    if "seconds" in result.environment:
        say(f"The seconds are too few: {result.environment['seconds']}")
    if missing := Store(folder).missing_models(client.name for client in result.clients):
        say(f"The result is in {folder}/result.json")
        raise DamagedRun(missing, folder=str(folder))
    say(f"The result is in {folder}/result.json, the personal models in {folder}/clients/")


@app.command()
def compare(
    methods: Annotated[str, typer.Option(help="which methods, such as perfedsde,fedavg,local; each is compared to the first")],
    source: Annotated[str, typer.Argument(metavar="[PRESET or FILE.toml]", help="what to run; quickstart if nothing is said")] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="settings of all methods; seed is the first seed")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="how many seeds, each with a split of its own")] = 1,
    jobs: Annotated[int, typer.Option(min=0, help="how many runs at a time; 0 is one per core, or one where a run itself takes more")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Run several methods on the same splits and compare them client by client.

    Every method and seed is an ordinary run, in runs/compare-NAME/METHOD-SEED or run.folder/METHOD-SEED. Runs that are finished there
    are not repeated, and stopped ones go on.
    """
    source, changes = _source(source, overrides)
    jobs = jobs or comparison.usual_jobs(config.load(source, changes))
    names = [method.strip() for method in methods.split(",")]
    runs = comparison.plan(source, changes, names, seeds)
    own = comparison.own_settings(source, changes, names)
    watching = Console(stderr=True) if as_json else console
    try:
        with LiveRuns(watching, [run.name for run in runs]) as view:
            failures = comparison.execute(runs, jobs, view)
    except KeyboardInterrupt:
        raise Interrupted("stopped. The same command goes on from here") from None
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


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run, finished or not")],
    client: Annotated[str, typer.Option(help="only this client: its participations and its architecture, drawn")] = "",
) -> None:
    """A run in the terminal: accuracies, clients, time; with --client one of them and its architecture."""
    store = Store(folder)
    saved_settings(folder)  # proves that it is a run, and brings its plugins
    entries = list(store.read_ledger())
    if not client:
        result = read_result(folder)
        if not result:
            why = "the run was stopped before its first checkpoint, or the file was lost"
            raise DamagedRun(f"{folder} has no result.json: {why}. `fedloom resume {folder}` goes on", folder=str(folder))
        for part in run_view(result, entries):
            console.print(part, highlight=False)
        if missing := store.missing_models(row["name"] for row in result["clients"]):
            say(missing)
        return
    own = [entry for entry in entries if entry.client == client]
    if not own:
        names = sorted({entry.client for entry in entries})
        raise InvalidConfig(f"{folder} has nothing of a client {client!r}. {did_you_mean(client, names)}", client=client)
    drawing, architecture = None, next((entry.architecture for entry in own if entry.final), "")
    if store.model_path(client).exists():
        _, facts = load_model(store.model_path(client))
        space = supernet_of(facts).space
        drawing, architecture = space.drawing(space.find(facts["architecture"], rng(0))), facts["architecture"]
    for part in client_view(client, own, drawing, architecture):
        console.print(part, highlight=False)
    if architecture and drawing is None:
        say(store.missing_models([client]))


def main() -> None:
    """Every refusal is one sentence and its own exit code; --trace anywhere shows where it came from."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--trace"]
    trace = len(arguments) < len(sys.argv) - 1
    try:
        app(arguments, standalone_mode=True)
    except FedloomError as error:
        if trace:
            traceback.print_exc()
        print(f"fedloom: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
