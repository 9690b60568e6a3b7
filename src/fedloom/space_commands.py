"""The commands about what there is to search in: list, space, pretrain, generate."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from fedloom import config, workshop
from fedloom.core.errors import Interrupted, InvalidConfig
from fedloom.core.registry import did_you_mean
from fedloom.data.readers import DATASETS
from fedloom.exchange.models import make_supernet, space_settings
from fedloom.generator.pretrain import PretrainSettings, result_file
from fedloom.maths.samplers import SAMPLERS
from fedloom.methods.base import METHODS
from fedloom.report.live_stages import LiveStages
from fedloom.report.tables import space_card, space_table
from fedloom.report.terminal import Plugins, console, say
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.training.latency import measure_latency


def list_(
    what: Annotated[str, typer.Argument(help="methods, spaces, datasets, presets, engines or settings; all but settings if not said")] = "",
    plugin: Plugins = None,
) -> None:
    """What there is, one line each."""
    config.plug_in(plugin or [])
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
        widest = max(map(len, things[title]))
        for name, meaning in things[title].items():
            say(f"  {name:{widest}} {meaning}")


def space(
    name: Annotated[str, typer.Argument(help="a search space; `fedloom list spaces` names them")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings of the space")] = None,
    classes: Annotated[int, typer.Option(min=2, help="classes to tell apart")] = 10,
    size: Annotated[int, typer.Option(min=1, help="side of the images in pixels")] = 32,
    latency: Annotated[bool, typer.Option("--latency", help="measure the time of an image on this machine's CPU as well")] = False,
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """The card of a search space: genes, architectures, parameters and multiply-accumulates of colour images."""
    config.plug_in(plugin or [])
    supernet = make_supernet(name, space_settings(name, overrides or []), ImageShape(3, size, classes))
    card = space_card(supernet, partial(measure_latency, supernet, device=torch.device("cpu")) if latency else None)
    if as_json:
        print(json.dumps(card, indent=2))
    else:
        console.print(space_table(card))


def pretrain(
    name: Annotated[str, typer.Argument(metavar="SPACE", help="a search space; `fedloom list spaces` names them")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings of the stages, data and space")] = None,
    folder: Annotated[Path | None, typer.Option(help="where every stage leaves its file; pretrain/SPACE if not said")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    plugin: Plugins = None,
) -> None:
    """Train the generator of a search space and its predictor; run it again to go on where it stopped."""
    config.plug_in(plugin or [])
    place = folder or Path("pretrain") / name
    work = workshop.plan(name, overrides or [])
    try:
        with LiveStages(console, f"a generator for {name}, into {place}") as view:
            generator = workshop.pretrain(work, place, device, view)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped. The same command goes on with what is in {place}") from None
    print(json.dumps(generator.facts["card"], indent=2))
    file = result_file(place, work.settings.model)
    say(f"The generator is {file}; use it with perfedsde.generator_file={file}")


def generate(
    name: Annotated[str, typer.Argument(metavar="SPACE", help="a search space; `fedloom list spaces` names them")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings of the space")] = None,
    data: Annotated[str, typer.Option(help="a folder of class folders, or a data set's name, whose images guide; nothing: unguided")] = "",
    count: Annotated[int, typer.Option(min=1, help="how many architectures")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="of the random draws")] = 0,
    strength: Annotated[float | None, typer.Option(min=0, help="of the guidance; the generator's own if not said")] = None,
    sampler: Annotated[str, typer.Option(help=f"{', '.join(SAMPLERS)}; the generator's own if not said")] = "",
    steps: Annotated[int, typer.Option(min=0, help="of the sampler; its own number if not said")] = 0,
    file: Annotated[str, typer.Option(help="a generator that `fedloom pretrain` wrote; the shipped one if not said")] = "",
    features: Annotated[str, typer.Option(help="weights of ResNet-18, for a generator that was trained with them")] = "",
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Draw architectures from the generator of a space, guided by images when data is given."""
    config.plug_in(plugin or [])
    generator, drawn = workshop.generate(name, overrides or [], count, seed, data, file, features, strength, sampler, steps)
    if as_json:
        used = None if not data else generator.strength if strength is None else strength
        print(json.dumps({"space": name, "data": data or None, "strength": used, "architectures": [a.id for a in drawn]}, indent=2))
        return
    for architecture in drawn:
        print(architecture.id)


def pretrain_help() -> str:
    rows = [f"{key} = {default}\n      {meaning}" for key, default, meaning in config.explain_table(PretrainSettings, "")]
    return "Settings (key = default, then its meaning), besides data.* and those of the space:\n\n\b\n" + "\n".join(rows)
