"""The commands about one run: run, resume, show."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedloom import config
from fedloom.assemble import free_folder, new_run, resume_run, saved_outline, saved_settings
from fedloom.commands.terminal import TrustPlugins, console, new_console, say, source_and_changes
from fedloom.config import RunSettings
from fedloom.core.errors import DamagedRun, Interrupted, InvalidConfig, printable
from fedloom.core.registry import did_you_mean
from fedloom.core.result import RunResult
from fedloom.core.seeds import rng
from fedloom.engine.events import Events
from fedloom.engine.profile import Profile
from fedloom.engine.run import Watcher
from fedloom.engine.store import Store, how_to_go_on, read_result
from fedloom.files import write_file
from fedloom.models.personal import load_model, supernet_of
from fedloom.report.terminal.live import LiveView
from fedloom.report.terminal.profile import profile_lines, profile_table
from fedloom.report.terminal.show import client_view, run_view
from fedloom.report.terminal.tables import client_table, summary
from fedloom.report.track import Several, trackers


def settings_help() -> str:
    rows = [f"{key} = {default}\n      {meaning}" for key, default, meaning in config.explain()]
    return "Settings (key = default, then its meaning):\n\n\b\n" + "\n".join(rows)


EventLines = Annotated[bool, typer.Option("--events", help="print progress for other programs: one JSON object per line")]


ProfileRun = Annotated[bool, typer.Option("--profile", help="say where the time went, and write a trace into the run folder")]


def run(
    source: Annotated[str, typer.Argument(metavar="[PRESET or FILE.toml]", help="what to run; default: quickstart")] = "",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings that override the file")] = None,
    events: EventLines = False,
    profile: ProfileRun = False,
) -> None:
    """Run a federation on this machine."""
    source, changes = source_and_changes(source, overrides)
    settings = config.load(source, changes)
    folder = Path(settings.run.folder) if settings.run.folder else free_folder(Path(source).stem)
    start = f", from the weights in {settings.weights}" if settings.weights else ""
    title = f"{settings.method} on {settings.data.name}, into {folder}{start}"
    with _profiling(folder, profile, events) as more, _watching(folder, title, settings.run, events, more) as watcher:
        result = new_run(settings, folder, watcher)
    _conclude(folder, result, events)


def resume(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="folder of a stopped run, or of a finished one that is to have more rounds")
    ],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[rounds=N]", help="go on until there are N rounds")] = None,
    events: EventLines = False,
    profile: ProfileRun = False,
) -> None:
    """Continue a stopped run, or a finished one with more rounds. Finished rounds are not repeated.

    With other images, sites, classes or settings, begin a new run from what this one has learned: fedloom run … weights=RUN.
    """
    rounds = _rounds(changes or [], folder)
    track = saved_settings(folder, trust_plugins=True).run
    with _profiling(folder, profile, events) as more, _watching(folder, f"resuming {folder}", track, events, more) as watcher:
        result = resume_run(folder, watcher, rounds)
    _conclude(folder, result, events)


def _rounds(changes: list[str], folder: Path) -> int:
    """How many rounds there are to be; 0: as many as were planned."""
    table = config.table_of(changes)
    if odd := sorted(set(table) - {"rounds"}):
        what = f"A run goes on with the settings it began with, but for rounds; {printable(odd[0], 40)} cannot be changed"
        raise InvalidConfig(f"{what}. Begin a new run from its weights: fedloom run PRESET weights={folder} …", key=odd[0])
    return config.from_table(table).rounds if table else 0


@contextmanager
def _profiling(folder: Path, wanted: bool, quiet: bool) -> Iterator[list[Watcher]]:
    """A further watcher, if that is wanted; in the end, also of a run that is stopped, what it found. quiet: standard output is taken."""
    profile = Profile()
    try:
        yield [profile] if wanted else []
    finally:
        if profile.begun:
            write_file(folder / profile.file, profile.trace().encode())
            out = new_console(stderr=True) if quiet else console
            out.print(profile_table(profile))
            for line in profile_lines(profile, str(folder / profile.file)):
                out.print(line, highlight=False, soft_wrap=True)


@contextmanager
def _watching(folder: Path, title: str, track: RunSettings, events: bool, more: list[Watcher]) -> Iterator[Watcher]:
    others = [*more, *trackers(track, folder)]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as from the keyboard: workers end, nothing stays behind
    try:
        if events:
            yield Several([Events(lambda event: print(event.to_json(), flush=True)), *others])
        else:
            with LiveView(console, title) as view:
                yield Several([view, *others])
    except KeyboardInterrupt:
        begun = (folder / "config.toml").exists()
        raise Interrupted(f"stopped. Continue with `fedloom resume {folder}`" if begun else "stopped before the run began") from None
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _conclude(folder: Path, result: RunResult, quiet: bool) -> None:
    missing = Store(folder).missing_models(client.name for client in result.clients)
    if not quiet:
        console.print(client_table(result))
        say(summary(result))
        if "weights" in result.environment:
            say(f"It began with {result.environment['weights']}")
        if "seconds" in result.environment:
            say(f"The seconds are too few: {result.environment['seconds']}")
        models = "" if missing else f", the personal models in {folder}/clients/"
        say(f"The result is in {folder}/result.json{models}")
    if missing:
        raise DamagedRun(missing, folder=str(folder))


def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run, finished or not")],
    client: Annotated[str, typer.Option(help="show only this client: its participations and a drawing of its architecture")] = "",
    trust_plugins: TrustPlugins = False,
) -> None:
    """Show a run in the terminal: accuracies, clients and time; or one client with --client."""
    store = Store(folder)
    _, lacking = saved_outline(folder, trust_plugins)  # also proves that it is a run
    entries = list(store.read_ledger())
    if not client:
        result = read_result(folder)
        if not result:
            why = "the run was stopped before its first checkpoint, or the file was lost"
            raise DamagedRun(f"{folder} has no result.json: {why}. `{how_to_go_on(folder)}` goes on", folder=str(folder))
        for part in run_view(result, entries):
            console.print(part, highlight=False)
        if missing := store.missing_models(row["name"] for row in result["clients"]):
            say(missing)
        if lacking:
            say(lacking)
        return
    own = [entry for entry in entries if entry.client == client]
    if not own:
        names = sorted({entry.client for entry in entries})
        raise InvalidConfig(f"{folder} has nothing of a client {client!r}. {did_you_mean(client, names)}", client=client)
    drawing, architecture = None, next((entry.architecture for entry in own if entry.final), "")
    if store.model_path(client).exists() and not lacking:
        _, facts = load_model(store.model_path(client))
        space = supernet_of(facts).space
        drawing, architecture = space.drawing(space.find(facts["architecture"], rng(0))), facts["architecture"]
    for part in client_view(client, own, drawing, architecture):
        console.print(part, highlight=False)
    if architecture and drawing is None:
        say(lacking or store.missing_models([client]))
