"""The commands about generators of architectures: pretrain, generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedloom import config
from fedloom.assemble import pretraining
from fedloom.commands.terminal import Plugins, PrintJson, console, say, stoppable
from fedloom.generator.pretrain import PretrainSettings, result_file
from fedloom.maths.samplers import SAMPLERS
from fedloom.report.terminal.live_stages import LiveStages


def pretrain(
    name: Annotated[str, typer.Argument(metavar="SPACE", help="a search space; `fedloom list spaces` names them")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings of stages, data and space")] = None,
    folder: Annotated[Path | None, typer.Option(help="folder for the files of all stages; default: pretrain/SPACE")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps (on a Mac), or auto: a CUDA GPU if there is one")] = "auto",
    plugin: Plugins = None,
) -> None:
    """Train the generator of a search space and its predictor. Run it again to continue after a stop."""
    config.plug_in(plugin or [])
    place = folder or Path("pretrain") / name
    work = pretraining.plan(name, overrides or [])
    title = f"a generator for {name}, into {place}"
    with stoppable(f"The same command goes on with what is in {place}"), LiveStages(console, title) as view:
        generator = pretraining.pretrain(work, place, device, view)
    print(json.dumps(generator.facts["card"], indent=2))
    file = result_file(place, work.settings.model)
    say(f"The generator is {file}; use it with perfedsde.generator_file={file}")


def generate(
    name: Annotated[str, typer.Argument(metavar="SPACE", help="a search space; `fedloom list spaces` names them")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings of the space")] = None,
    data: Annotated[str, typer.Option(help="images that guide: a folder of class folders, or a data set's name; default: none")] = "",
    count: Annotated[int, typer.Option(min=1, help="number of architectures")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="seed of the random draws")] = 0,
    strength: Annotated[float | None, typer.Option(min=0, help="strength of guidance; default: the generator's own")] = None,
    sampler: Annotated[str, typer.Option(help=f"{', '.join(SAMPLERS)}; default: the generator's own")] = "",
    steps: Annotated[int, typer.Option(min=0, help="steps of the sampler; 0: its own number")] = 0,
    file: Annotated[str, typer.Option(help="a generator written by `fedloom pretrain`; default: the included one")] = "",
    features: Annotated[str, typer.Option(help="weights of ResNet-18, for a generator that was trained with them")] = "",
    plugin: Plugins = None,
    as_json: PrintJson = False,
) -> None:
    """Draw architectures with the generator of a space; --data guides it by images."""
    config.plug_in(plugin or [])
    generator, drawn = pretraining.generate(name, overrides or [], count, seed, data, file, features, strength, sampler, steps)
    if as_json:
        used = None if not data else generator.strength if strength is None else strength
        print(json.dumps({"space": name, "data": data or None, "strength": used, "architectures": [a.id for a in drawn]}, indent=2))
        return
    for architecture in drawn:
        print(architecture.id)


def pretrain_help() -> str:
    rows = [f"{key} = {default}\n      {meaning}" for key, default, meaning in config.explain_table(PretrainSettings, "")]
    return "Settings (key = default, then its meaning). Those of data.* and of the space can be set too:\n\n\b\n" + "\n".join(rows)
