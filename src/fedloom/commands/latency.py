"""The command that measures a device for budgets elsewhere: latency."""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedloom import config
from fedloom.assemble.environment import usable_device
from fedloom.commands.terminal import say, source_and_changes
from fedloom.core.errors import InvalidConfig
from fedloom.spaces.base import ImageShape
from fedloom.supernets.base import make_supernet
from fedloom.training.latency import measure_latency
from fedloom.training.latency_table import make_table, write_table

FEWEST = 20


def latency(
    source: Annotated[str, typer.Argument(metavar="[PRESET or FILE.toml]", help="whose search space; default: quickstart")] = "quickstart",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings to change")] = None,
    size: Annotated[int, typer.Option(min=1, help="side of the images in pixels")] = 32,
    channels: Annotated[int, typer.Option(min=1, help="1 for grey images, 3 for colour")] = 3,
    classes: Annotated[int, typer.Option(min=2, help="number of classes")] = 10,
    count: Annotated[int, typer.Option(min=FEWEST, help="random architectures to measure")] = 200,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps (on a Mac), or auto: a CUDA GPU if there is one")] = "cpu",
    out: Annotated[Path, typer.Option(help="file to write")] = Path("latency.json"),
) -> None:
    """Measure what networks of a search space take on this device, for budget.latency_table elsewhere."""
    if out.exists():
        raise InvalidConfig(f"{out} exists. Choose another --out", key="out")
    settings = config.load(*source_and_changes(source, overrides))
    place = usable_device(device, "--device")
    supernet = make_supernet(settings.space, settings.components[settings.space], ImageShape(channels, size, classes))
    measure = partial(measure_latency, supernet, device=place)
    table = make_table(
        supernet.space, lambda architecture: measure(architecture=architecture), count, f"{platform.machine()}, {place.type}"
    )
    write_table(out, table)
    say(
        f"{out}: {table.measured} networks of {table.space} took {table.mean_ms:.2f} ms on average; "
        f"those that were left out were foretold to {table.error_ms:.2f} ms on average"
    )
