"""The commands about what there is: list, space."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text

from fedloom import config
from fedloom.commands.terminal import Plugins, PrintJson, console, say
from fedloom.config import space_settings
from fedloom.core.errors import InvalidConfig
from fedloom.core.registry import Registry, did_you_mean
from fedloom.data.readers import DATASETS
from fedloom.engine.base import ENGINES
from fedloom.maths.averaging import AVERAGING
from fedloom.maths.samplers import SAMPLERS
from fedloom.methods.base import METHODS, declared_uploads
from fedloom.report.terminal.tables import space_card, space_table
from fedloom.search.base import SURROGATES
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import SUPERNETS, make_supernet
from fedloom.supernets.foreign import PUBLIC
from fedloom.training.latency import measure_latency

REGISTRIES: dict[str, Registry[Any]] = {
    "methods": METHODS,
    "spaces": SPACES,
    "supernets": SUPERNETS,
    "datasets": DATASETS,
    "surrogates": SURROGATES,
    "averaging": AVERAGING,
    "samplers": SAMPLERS,
    "engines": ENGINES,
    "public": PUBLIC,  # networks whose weights import-weights reads
}


def list_(
    what: Annotated[str, typer.Argument(help=f"{', '.join(REGISTRIES)}, presets or settings; default: all but settings")] = "",
    plugin: Plugins = None,
) -> None:
    """List what there is, one line each. Methods also with where they search and what clients upload."""
    config.plug_in(plugin or [])
    things = {title: {name: entry.meaning for name, entry in registry.items()} for title, registry in REGISTRIES.items()}
    things["presets"] = config.presets()
    if what == "settings":
        table = Table("setting", "default", "meaning")
        for row in config.explain():
            table.add_row(*row)
        console.print(table)
        return
    if what and what not in things:
        raise InvalidConfig(f"There is no list of {what!r}. {did_you_mean(what, [*things, 'settings'])}")
    things["methods"] = {name: f"{_facts(name)}  {meaning}" for name, meaning in things["methods"].items()}
    for title in [what] if what else list(things):
        console.print(Text(title, style="bold"))
        widest = max(map(len, things[title]))
        for name, meaning in things[title].items():
            say(f"  {name:{widest}} {meaning}")


def _facts(method: str) -> str:
    """Where a method searches and what its clients send, in columns."""
    uploads = {name: ", ".join(declared_uploads(name)) or "nothing" for name in METHODS}
    widest = max(map(len, uploads.values()))
    return f"search: {METHODS[method].make.search:6}  uploads: {uploads[method]:{widest}}"


def space(
    name: Annotated[str, typer.Argument(help="a search space; `fedloom list spaces` names them")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings of the space")] = None,
    classes: Annotated[int, typer.Option(min=2, help="number of classes")] = 10,
    size: Annotated[int, typer.Option(min=1, help="side of the images in pixels")] = 32,
    channels: Annotated[int, typer.Option(min=1, max=64, help="channels of the images: 1 for grey ones, 3 for colour")] = 3,
    latency: Annotated[bool, typer.Option("--latency", help="also measure the time for one image on this machine's CPU")] = False,
    plugin: Plugins = None,
    as_json: PrintJson = False,
) -> None:
    """Show the numbers of a search space: genes, architectures, parameters and multiply-accumulates."""
    config.plug_in(plugin or [])
    supernet = make_supernet(name, space_settings(name, overrides or []), ImageShape(channels, size, classes))
    card = space_card(supernet, partial(measure_latency, supernet, device=torch.device("cpu")) if latency else None)
    if as_json:
        print(json.dumps(card, indent=2))
    else:
        console.print(space_table(card))
