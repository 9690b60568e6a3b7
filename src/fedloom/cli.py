"""The command line."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
import typer.core
from rich.console import Console
from rich.table import Table

import fedloom
from fedloom import config
from fedloom.assemble import free_folder, load_model, make_supernet, new_run, resume_run
from fedloom.core.errors import DamagedRun, FedloomError, Interrupted, InvalidConfig
from fedloom.core.registry import did_you_mean
from fedloom.core.result import RunResult
from fedloom.data.readers import DATASETS
from fedloom.engine.files import write_file
from fedloom.engine.store import Store
from fedloom.methods.base import METHODS
from fedloom.report.live import LiveView
from fedloom.report.tables import client_table, space_card, space_table, summary
from fedloom.spaces.base import SPACES, ImageShape

typer.core.HAS_RICH = False  # typer escapes brackets for rich even where, as here, its rich help is off
app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help=fedloom.__doc__)
console = Console()


def _settings_help() -> str:
    rows = [f"{key} = {default}\n      {meaning}" for key, default, meaning in config.explain()]
    return "Settings (key = default, then its meaning):\n\n\b\n" + "\n".join(rows)


@app.command(epilog=_settings_help())
def run(
    source: Annotated[str, typer.Argument(metavar="[PRESET or FILE.toml]", help="what to run; quickstart if nothing is said")] = "",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings that win over the file's")] = None,
) -> None:
    """Run a federation on this machine."""
    changes = list(overrides or [])
    if "=" in source and not os.path.isfile(source):  # `fedloom run method=fedavg` changes the quickstart
        changes, source = [source, *changes], ""
    source = source or "quickstart"
    settings = config.load(source, changes)
    folder = Path(settings.run.folder) if settings.run.folder else free_folder(Path(source).stem)
    _watch(folder, f"{settings.method} on {settings.data.name}, into {folder}", lambda view: new_run(settings, folder, view))


@app.command()
def resume(folder: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a stopped run")]) -> None:
    """Continue a stopped run; finished rounds are not repeated."""
    _watch(folder, f"resuming {folder}", lambda view: resume_run(folder, view))


def _watch(folder: Path, title: str, work: Callable[[LiveView], RunResult]) -> None:
    try:
        with LiveView(console, title) as view:
            result = work(view)
    except KeyboardInterrupt:
        begun = (folder / "config.toml").exists()
        raise Interrupted(f"stopped. Continue with `fedloom resume {folder}`" if begun else "stopped before the run began") from None
    console.print(client_table(result))
    _print(summary(result))
    _print(f"The result is in {folder}/result.json, the personal models in {folder}/clients/")


def _print(text: str) -> None:
    """Text as it is: no colours for numbers, no line breaks of the console's own."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, spaces, datasets, presets, engines or settings; all but settings if not said")] = "",
) -> None:
    """What there is, one line each."""
    things = {
        "methods": {entry.name: entry.meaning for entry in METHODS},
        "spaces": {entry.name: entry.meaning for entry in SPACES},
        "datasets": {name: source.meaning for name, source in DATASETS.items()},
        "presets": config.presets(),
        "engines": {name: meaning for name, (_, meaning) in config.ENGINES.items()},
    }
    if what == "settings":
        table = Table("setting", "default", "meaning")
        for row in config.explain():
            table.add_row(*row)
        console.print(table)
        return
    if what and what not in things:
        raise InvalidConfig(f"There is no list of {what!r}. {did_you_mean(what, [*things, 'settings'])}")
    for title in [what] if what else list(things):
        console.print(f"[bold]{title}[/bold]")
        for name, meaning in things[title].items():
            _print(f"  {name:16} {meaning}")


@app.command()
def space(
    name: Annotated[str, typer.Argument(help="a search space; `fedloom list spaces` names them")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings of the space")] = None,
    classes: Annotated[int, typer.Option(min=2, help="classes to tell apart")] = 10,
    size: Annotated[int, typer.Option(min=1, help="side of the images in pixels")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """The card of a search space: genes, architectures, parameters and multiply-accumulates of colour images."""
    settings = config.load(None, [f"space={name}", *(overrides or [])])
    card = space_card(make_supernet(name, settings.components[name], ImageShape(3, size, classes)))
    if as_json:
        print(json.dumps(card, indent=2))
    else:
        console.print(space_table(card))


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")],
    client: Annotated[str, typer.Option(help="whose personal model")],
    format: Annotated[str, typer.Option(help="safetensors")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="where to write it; CLIENT.safetensors here if not said")] = None,
) -> None:
    """Write a client's personal model to a file that describes itself: architecture, classes, normalisation."""
    if format != "safetensors":
        raise InvalidConfig(f"There is no export format {format!r}. Known: safetensors")
    if not (folder / "config.toml").exists():
        raise DamagedRun(f"{folder} is not a run folder: it has no config.toml", folder=str(folder))
    source = Store(folder).model_path(client)
    if not source.exists():
        known = sorted(path.parent.name for path in folder.glob("clients/*/model.safetensors"))
        cure = did_you_mean(client, known) if known else "The run has no personal models yet; finish it with `fedloom resume`"
        raise InvalidConfig(f"{folder} has no personal model of {client!r}. {cure}")
    network, facts = load_model(source)  # proves that the file is whole before it is handed on
    target = out or Path(f"{client}.safetensors")
    write_file(target, source.read_bytes())
    parameters = sum(parameter.numel() for parameter in network.parameters())
    _print(f"{target}: {facts['architecture']}, {parameters:,} parameters, {len(facts['classes'])} classes")


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
