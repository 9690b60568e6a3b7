"""The commands that take networks in and out: export, import-weights, draw."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
import typer
from torch import nn

from fedloom import config
from fedloom.assemble import reopen_run, saved_outline
from fedloom.commands.terminal import Plugins, TrustPlugins, say
from fedloom.config import space_settings
from fedloom.core.errors import DamagedRun, InvalidConfig, UnusablePlugin
from fedloom.core.registry import did_you_mean
from fedloom.core.seeds import rng
from fedloom.data.members import read_member
from fedloom.engine.store import Store, how_to_go_on, not_a_run, of_federation
from fedloom.files import write_file
from fedloom.models import foreign
from fedloom.models.export import FORMATS, INT8, to_int8
from fedloom.models.personal import Facts, load_model, supernet_of
from fedloom.models.supernet_weights import take_network
from fedloom.report.drawing import draw as picture
from fedloom.report.words import AT_SITES
from fedloom.spaces.base import SPACES, ImageShape


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN or WEIGHTS", help="the folder of a run, or a file written by import-weights")],
    client: Annotated[str, typer.Option(help="RUN: the client whose personal model is exported")] = "",
    every: Annotated[bool, typer.Option("--all", help="RUN: export the personal models of all clients")] = False,
    architecture: Annotated[str, typer.Option(help="WEIGHTS: which network: smallest, medium, largest, an id or a genotype")] = "",
    format: Annotated[
        str,
        typer.Option(
            help="safetensors, torch (a .pt2 program), onnx (from pixels to probabilities) or onnx-int8 (the same in 8 bits); "
            "both need the extra: fedloom[export]"
        ),
    ] = "safetensors",
    images: Annotated[
        Path | None,
        typer.Option(help="onnx-int8: class folders of images to calibrate and test with; default: the client's own, in a simulation"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="file to write; default: CLIENT.safetensors (.pt2, .onnx), or WEIGHTS-NETWORK… for a weights file; "
            "with --all a folder, default: models in RUN"
        ),
    ] = None,
    plugin: Plugins = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Write a network to a file that describes itself: architecture, classes, normalisation."""
    config.plug_in(plugin or [])
    known = [*FORMATS, INT8]
    if format not in known:
        raise InvalidConfig(f"There is no export format {format!r}. {did_you_mean(format, known)}")
    if [bool(client), every, bool(architecture)].count(True) != 1:
        raise InvalidConfig("Say which network: --client NAME or --all for a run, or --architecture NAME for a weights file")
    ending = FORMATS[format][0] if format in FORMATS else "int8.onnx"
    if architecture:
        if format == INT8:
            raise InvalidConfig("onnx-int8 is for networks of clients, whose images show how large activations are. Use --client NAME")
        network, facts = take_network(source, architecture)
        named = architecture in supernet_of(facts).space.named
        target = out or Path(f"{source.stem}-{architecture if named else _file_name(facts['architecture'])}.{ending}")
        _keep(source, target)
        _write(target, format, network, facts, None)
        return
    clients = _clients_of(source) if every else [client]
    data = _Images(source, images, trust_plugins) if format == INT8 else None
    losses = []
    for name in clients:
        network, facts = load_model(model_of(source, name, trust_plugins))  # proves that the file is whole before it is handed on
        target = (out or source / "models") / f"{name}.{ending}" if every else out or Path(f"{name}.{ending}")
        losses.append(_write(target, format, network, facts, data.of(name, facts) if data else None))
    if every and data:
        say(f"In int8 clients lose {100 * sum(losses) / len(losses):.2f} points of test accuracy on average")


def _write(target: Path, format: str, network: nn.Module, facts: Facts, data: ClientImages | None) -> float:
    """Returns the share of test images that int8 loses."""
    parameters = sum(parameter.numel() for parameter in network.parameters())
    what = f"{target}: {facts['architecture']}, {parameters:,} parameters, {len(facts['classes'])} classes"
    if data is not None:
        found = to_int8(target, network, facts, *data)
        size = f"{found.bytes:,} bytes, {found.bytes / found.float_bytes:.0%} of the {found.float_bytes:,} in float"
        lost = f"test accuracy {found.accuracy:.1%}, in float {found.float_accuracy:.1%}: a loss of {100 * found.loss:.1f} points"
        say(f"{what}; {size}; {lost} on {found.images} images")
        return found.loss
    difference = FORMATS[format][1](target, network, facts)
    say(what + ("" if difference is None else f"; logits differ from torch's by at most {difference:.1e} on random images"))
    return 0.0


ClientImages = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.int64]]  # training images, test images, their labels


class _Images:
    """Where the images for int8 come from: a folder that was named, or the run's own clients."""

    def __init__(self, run: Path, folder: Path | None, trust_plugins: bool) -> None:
        self._folder = folder
        if folder is None and of_federation(run):
            raise InvalidConfig(
                "The images of a federation are at its sites: name this site's folder of class folders with --images FOLDER"
            )
        self._run = reopen_run(run, torch.device("cpu"), trust_plugins) if folder is None else None

    def of(self, client: str, facts: Facts) -> ClientImages:
        if self._run is not None:
            data = self._run.federation.data_of(client)
            return data.train.images.numpy(), data.test.images.numpy(), data.test.labels.numpy()
        assert self._folder is not None
        if facts["image"]["channels"] != 3:
            raise InvalidConfig("--images is for models of colour images, and this one sees grey ones. Leave it out")
        train, test = read_member(self._folder, facts["classes"], facts["image"]["size"])
        return train.images, test.images, test.labels


def _clients_of(folder: Path) -> list[str]:
    """All that have a personal model."""
    known = sorted(path.parent.name for path in folder.glob("clients/*/model.safetensors"))
    if not known:
        model_of(folder, "", trust_plugins=False)  # says why
    return known


def _file_name(text: str) -> str:
    """For a file named after something that may hold any character and be of any length."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:200]


def model_of(folder: Path, client: str, trust_plugins: bool) -> Path:
    if not (folder / "config.toml").exists():
        raise DamagedRun(not_a_run(folder), folder=str(folder))
    store, known = Store(folder), sorted(path.parent.name for path in folder.glob("clients/*/model.safetensors"))
    if client not in known:
        whose = f"personal model of {client!r}" if client else "personal models"
        if any(entry.client == client and entry.final and entry.architecture for entry in store.read_ledger()):
            raise DamagedRun(store.missing_models([client]), folder=str(folder))
        if of_federation(folder) and not known:
            raise InvalidConfig(f"{folder} has no {whose}. {AT_SITES}", client=client)
        cure = did_you_mean(client, known) if known else f"The run has no personal models yet; finish it with `{how_to_go_on(folder)}`"
        raise InvalidConfig(f"{folder} has no {whose}. {cure}")
    settings, lacking = saved_outline(folder, trust_plugins)
    if settings.space not in SPACES:
        raise UnusablePlugin(lacking, folder=str(folder))
    return store.model_path(client)


def _keep(source: Path, target: Path) -> None:
    try:
        same = target.samefile(source)
    except OSError:  # one is not there, or cannot be; who reads or writes it says so
        same = False
    if same:
        raise InvalidConfig(f"{target} would be overwritten by what is taken out of it. Choose another --out")


def import_weights(
    space: Annotated[str, typer.Argument(help="the search space: mobilenetv3, darts or nasvit")],
    file: Annotated[Path, typer.Argument(help="a checkpoint of the public network: a state dict saved by torch, or safetensors")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings of the space, for other sizes")] = None,
    size: Annotated[int, typer.Option(min=0, help="side of the images in pixels; 0: the public network's own")] = 0,
    part: Annotated[str, typer.Option(metavar="NAME", help="which state dict of a checkpoint with several, such as state_dict_ema")] = "",
    out: Annotated[Path | None, typer.Option(help="file to write; default: SPACE.safetensors")] = None,
    plugin: Plugins = None,
) -> None:
    """Import weights that were trained with the public once-for-all, DARTS or NASViT code.

    The new file holds a whole supernet. `fedloom export` takes networks out of it; `fedloom run weights=FILE` starts from it.
    """
    config.plug_in(plugin or [])
    target = out or Path(f"{space}.safetensors")
    _keep(file, target)
    imported = foreign.import_weights(space, file, overrides or [], size, target, part)
    image = imported.supernet.space.image
    say(f"{target}: {imported.source}, {image.classes} classes, {image.channels} channels")
    taken, others = imported.checkpoint.part, imported.checkpoint.others
    say(f"{foreign.counted(len(imported.tensors), 'tensor')} taken{taken and f' from {foreign.some([taken])}'}")
    if others and not part:
        say(f"The file holds other weights of this network in {foreign.some(others, 20)}: --part {foreign.some(others[:1])} takes those")
    for kind, count in imported.expected_leftovers.items():
        say(f"{foreign.counted(count, 'key')} left over as expected: {kind}")
    if left := imported.unexpected_leftovers:
        say(f"{foreign.counted(len(left), 'key')} left over, and unexpected: {foreign.some(left, 20)}")


def draw(
    what: Annotated[str, typer.Argument(metavar="ARCHITECTURE", help="an id, SPACE:NAME (smallest, medium, largest, random), or a run")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings of the space; seed for random")] = None,
    client: Annotated[str, typer.Option(help="RUN: the client whose architecture is drawn")] = "",
    classes: Annotated[int, typer.Option(min=2, help="number of classes; a run has its own")] = 10,
    size: Annotated[int, typer.Option(min=1, help="side of the images in pixels; a run has its own")] = 32,
    channels: Annotated[int, typer.Option(min=1, max=64, help="channels of the images, 1 for grey ones; a run has its own")] = 3,
    out: Annotated[Path | None, typer.Option(help="file to write; default: named after the architecture or client")] = None,
    plugin: Plugins = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Draw an architecture as SVG: `fedloom draw mobilenetv3:largest`, or `fedloom draw RUN --client NAME`."""
    config.plug_in(plugin or [])
    if client:
        _, facts = load_model(model_of(Path(what), client, trust_plugins))
        drawn, title = supernet_of(facts).space, f"{client} of {what}"
        architecture = drawn.find(facts["architecture"], rng(0))
    else:
        name, colon, text = what.partition(":")
        if not colon:
            cure = "Of a run say --client NAME" if os.path.isdir(what) else "Write an id, or SPACE:NAME such as mobilenetv3:largest"
            raise InvalidConfig(f"{what} is not an architecture. {cure}")
        seeds = [override for override in overrides or [] if override.startswith("seed=")]
        settings = space_settings(name, [override for override in overrides or [] if override not in seeds])
        drawn, title = SPACES[name].make(settings, ImageShape(channels, size, classes)), what[:60] + "…" * (len(what) > 60)
        architecture = drawn.find(what if text[:1].isdigit() else text, rng(config.load(None, seeds).seed, "architecture"))
    cost = drawn.cost(architecture)
    numbers = f"{cost.parameters:,} parameters, {cost.macs:,} multiply-accumulates"
    target = out or Path(f"{_file_name(client or what)}.svg")
    write_file(target, picture(drawn.drawing(architecture), title, numbers).encode())
    say(f"{target}: {architecture.id}, {numbers}")
