"""The commands about generators of architectures: pretrain, generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedloom import config
from fedloom.assemble import pretraining
from fedloom.commands.terminal import Plugins, console, say
from fedloom.core.errors import Interrupted
from fedloom.generator.pretrain import PretrainSettings, result_file
from fedloom.maths.samplers import SAMPLERS
from fedloom.report.terminal.live_stages import LiveStages


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
    work = pretraining.plan(name, overrides or [])
    try:
        with LiveStages(console, f"a generator for {name}, into {place}") as view:
            generator = pretraining.pretrain(work, place, device, view)
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
    generator, drawn = pretraining.generate(name, overrides or [], count, seed, data, file, features, strength, sampler, steps)
    if as_json:
        used = None if not data else generator.strength if strength is None else strength
        print(json.dumps({"space": name, "data": data or None, "strength": used, "architectures": [a.id for a in drawn]}, indent=2))
        return
    for architecture in drawn:
        print(architecture.id)


def pretrain_help() -> str:
    rows = [f"{key} = {default}\n      {meaning}" for key, default, meaning in config.explain_table(PretrainSettings, "")]
    return "Settings (key = default, then its meaning), besides data.* and those of the space:\n\n\b\n" + "\n".join(rows)
