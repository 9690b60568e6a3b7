"""The command line."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
import typer.core
from rich.console import Console
from rich.table import Table

import fedloom
from fedloom import compare as comparison
from fedloom import config, workshop
from fedloom.analyses.client_commands import gain
from fedloom.analyses.client_commands import join as join_in_simulation
from fedloom.analyses.commands import app as analyse
from fedloom.assemble import free_folder, new_run, read_result, resume_run, saved_settings
from fedloom.core.errors import DamagedRun, FedloomError, Interrupted, InvalidConfig, InvalidData
from fedloom.core.registry import did_you_mean
from fedloom.core.result import RunResult
from fedloom.core.seeds import rng
from fedloom.data.readers import DATASETS
from fedloom.engine.newcomers import ROUNDS
from fedloom.engine.run import Watcher
from fedloom.engine.store import Store
from fedloom.exchange import foreign
from fedloom.exchange.export import FORMATS
from fedloom.exchange.models import load_model, make_supernet, space_settings, supernet_of
from fedloom.exchange.predict import predict as judge
from fedloom.exchange.predict import read_model
from fedloom.exchange.weights import take_network
from fedloom.federate.commands import certs, join_site, serve, site
from fedloom.files import write_file
from fedloom.generator.pretrain import PretrainSettings, result_file
from fedloom.maths.samplers import SAMPLERS
from fedloom.methods.base import METHODS
from fedloom.report.comparison import comparison_card, comparison_notes, comparison_table
from fedloom.report.drawing import draw
from fedloom.report.live import LiveView
from fedloom.report.live_runs import LiveRuns
from fedloom.report.live_stages import LiveStages
from fedloom.report.show import client_view, run_view
from fedloom.report.tables import client_table, space_card, space_table, summary
from fedloom.report.track import Several, Tracker
from fedloom.reporting.command import report
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.training.latency import measure_latency

typer.core.HAS_RICH = False  # typer escapes brackets for rich even where, as here, its rich help is off
app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=fedloom.__doc__
)
app.add_typer(analyse, name="analyse")
app.command()(gain)
for command in (report, serve, site, certs):
    app.command()(command)
console = Console()


def _settings_help() -> str:
    rows = [f"{key} = {default}\n      {meaning}" for key, default, meaning in config.explain()]
    return "Settings (key = default, then its meaning):\n\n\b\n" + "\n".join(rows)


def _pretrain_help() -> str:
    rows = [f"{key} = {default}\n      {meaning}" for key, default, meaning in config.explain_table(PretrainSettings, "")]
    return "Settings (key = default, then its meaning), besides data.* and those of the space:\n\n\b\n" + "\n".join(rows)


Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="FILE or MODULE", help="components of your own, which are imported; may be given several times"),
]


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
    try:
        with LiveView(console, title) as view:
            result = work(Several([view, *trackers]) if trackers else view)
    except KeyboardInterrupt:
        begun = (folder / "config.toml").exists()
        raise Interrupted(f"stopped. Continue with `fedloom resume {folder}`" if begun else "stopped before the run began") from None
    console.print(client_table(result))
    _print(summary(result))
    if "weights" in result.environment:
        _print(f"It began with {result.environment['weights']}")
    _print(f"The result is in {folder}/result.json, the personal models in {folder}/clients/")


@app.command()
def compare(
    methods: Annotated[str, typer.Option(help="which methods, such as perfedsde,fedavg,local; each is compared to the first")],
    source: Annotated[str, typer.Argument(metavar="[PRESET or FILE.toml]", help="what to run; quickstart if nothing is said")] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="settings of all methods; seed is the first seed")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="how many seeds, each with a split of its own")] = 1,
    jobs: Annotated[int, typer.Option(min=0, help="how many runs at a time; 0 is one per core, or one with a GPU or Ray")] = 0,
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
        _print(comparison_notes(card))
        for warning in [*map(str, own), *comparison.stale(results)]:
            _print(warning)
        _print(f"The runs are in {card['folder']}, in a folder for each method and seed")
    if failures:
        first = failures[0]
        error = FedloomError(f"{len(failures)} of {len(runs)} runs failed, first {first.run.name}: {first.reason}")
        error.exit_code = first.exit_code
        raise error


def _print(text: str) -> None:
    """Text as it is: no colours for numbers, no line breaks of the console's own."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


@app.command("list")
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
            _print(f"  {name:{widest}} {meaning}")


@app.command()
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


@app.command(epilog=_pretrain_help())
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
    _print(f"The generator is {file}; use it with perfedsde.generator_file={file}")


@app.command()
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


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN or WEIGHTS", help="the folder of a run, or a file written by import-weights")],
    client: Annotated[str, typer.Option(help="whose personal model, from a run")] = "",
    architecture: Annotated[str, typer.Option(help="which network of a weights file: smallest, medium, largest, an id, a genotype")] = "",
    format: Annotated[
        str, typer.Option(help="safetensors, torch (a .pt2 program) or onnx (needs the extra: fedloom[export])")
    ] = "safetensors",
    out: Annotated[
        Path | None, typer.Option(help="where to write it; CLIENT.safetensors (.pt2, .onnx) or WEIGHTS-NETWORK… here if not said")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Write a network to a file that describes itself: architecture, classes, normalisation."""
    config.plug_in(plugin or [])
    if format not in FORMATS:
        raise InvalidConfig(f"There is no export format {format!r}. {did_you_mean(format, list(FORMATS))}")
    if bool(client) == bool(architecture):
        raise InvalidConfig("Say which network: --client NAME for one of a run, or --architecture NAME for one of a weights file")
    ending, write = FORMATS[format]
    if client:
        network, facts = load_model(_model_of(source, client))  # proves that the file is whole before it is handed on
        name = client
    else:
        network, facts = take_network(source, architecture)
        named = architecture in supernet_of(facts).space.named
        name = f"{source.stem}-{architecture if named else _file_name(facts['architecture'])}"
    target = out or Path(f"{name}.{ending}")
    if architecture:
        _keep(source, target)
    difference = write(target, network, facts)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    checked = "" if difference is None else f"; logits differ from torch's by at most {difference:.1e} on random images"
    _print(f"{target}: {facts['architecture']}, {parameters:,} parameters, {len(facts['classes'])} classes{checked}")


def _file_name(text: str) -> str:
    """For a file named after something that may hold any character and be of any length."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:200]


def _model_of(folder: Path, client: str) -> Path:
    if not (folder / "config.toml").exists():
        raise DamagedRun(f"{folder} is not a run folder: it has no config.toml", folder=str(folder))
    path = Store(folder).model_path(client)
    if not path.exists():
        known = sorted(path.parent.name for path in folder.glob("clients/*/model.safetensors"))
        cure = did_you_mean(client, known) if known else "The run has no personal models yet; finish it with `fedloom resume`"
        raise InvalidConfig(f"{folder} has no personal model of {client!r}. {cure}")
    saved_settings(folder)  # imports the plugins that its space may come from
    return path


def _keep(source: Path, target: Path) -> None:
    try:
        same = target.samefile(source)
    except OSError:  # one is not there, or cannot be; who reads or writes it says so
        same = False
    if same:
        raise InvalidConfig(f"{target} would be overwritten by what is taken out of it. Choose another --out")


@app.command("import-weights")
def import_weights(
    space: Annotated[str, typer.Argument(help="the search space: mobilenetv3, darts or nasvit")],
    file: Annotated[Path, typer.Argument(help="a checkpoint of the public network: a state dict saved by torch, or safetensors")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings of the space, for other sizes")] = None,
    size: Annotated[int, typer.Option(min=0, help="side of the images in pixels; 0 is the public network's own")] = 0,
    out: Annotated[Path | None, typer.Option(help="where to write it; SPACE.safetensors here if not said")] = None,
    plugin: Plugins = None,
) -> None:
    """Take over weights that were trained elsewhere with the public once-for-all, DARTS or NASViT code.

    The file written holds a whole supernet: `fedloom export` takes networks out of it, `fedloom run weights=FILE` starts from it.
    """
    config.plug_in(plugin or [])
    target = out or Path(f"{space}.safetensors")
    _keep(file, target)
    imported = foreign.import_weights(space, file, overrides or [], size, target)
    image = imported.supernet.space.image
    _print(f"{target}: {imported.source}, {image.classes} classes, {image.channels} channels")
    _print(f"{foreign.counted(len(imported.tensors), 'tensor')} taken")
    for kind, count in imported.expected_leftovers.items():
        _print(f"{foreign.counted(count, 'key')} left over as expected: {kind}")
    if left := imported.unexpected_leftovers:
        _print(f"{foreign.counted(len(left), 'key')} left over, and unexpected: {foreign.some(left, 20)}")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="a file written by export, or a client's model.safetensors inside a run")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="png, jpeg, webp, bmp, gif, tiff or ppm files")],
    top: Annotated[int, typer.Option(min=1, help="how many classes to name")] = 3,
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Name the classes that a model sees in images, with probabilities.

    Images that cannot be read are named at the end (exit code 5); the others are judged all the same.
    """
    config.plug_in(plugin or [])
    seen, unreadable = judge(read_model(model), images, top)
    if as_json and seen:
        rows = [{"image": one.image, "classes": [{"name": name, "probability": p} for name, p in one.classes]} for one in seen]
        print(json.dumps(rows, indent=2))
    elif seen:
        for one in seen:
            _print(f"{one.image}: {', '.join(f'{name} {probability:.1%}' for name, probability in one.classes)}")
    if unreadable:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in unreadable.items())
        raise InvalidData(f"{len(unreadable)} of {len(images)} images cannot be read: {reasons}", files=tuple(unreadable))


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
        for part in run_view(read_result(store), entries):
            console.print(part, highlight=False)
        return
    own = [entry for entry in entries if entry.client == client]
    if not own:
        names = sorted({entry.client for entry in entries})
        raise InvalidConfig(f"{folder} has nothing of a client {client!r}. {did_you_mean(client, names)}", client=client)
    drawing, architecture = None, ""
    if store.model_path(client).exists():
        _, facts = load_model(store.model_path(client))
        space = supernet_of(facts).space
        drawing, architecture = space.drawing(space.find(facts["architecture"], rng(0))), facts["architecture"]
    for part in client_view(client, own, drawing, architecture):
        console.print(part, highlight=False)


@app.command("draw")
def draw_(
    what: Annotated[str, typer.Argument(metavar="ARCHITECTURE", help="an id, SPACE:NAME (smallest, medium, largest, random), or a run")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings of the space; seed for random")] = None,
    client: Annotated[str, typer.Option(help="whose architecture, of a run")] = "",
    classes: Annotated[int, typer.Option(min=2, help="classes to tell apart; a run has its own")] = 10,
    size: Annotated[int, typer.Option(min=1, help="side of the images in pixels; a run has its own")] = 32,
    out: Annotated[Path | None, typer.Option(help="where to write it; a name like the architecture's here if not said")] = None,
    plugin: Plugins = None,
) -> None:
    """Draw an architecture as an SVG picture: `fedloom draw mobilenetv3:largest`, or `fedloom draw RUN --client NAME`."""
    config.plug_in(plugin or [])
    if client:
        _, facts = load_model(_model_of(Path(what), client))
        drawn, title = supernet_of(facts).space, f"{client} of {what}"
        architecture = drawn.find(facts["architecture"], rng(0))
    else:
        name, colon, text = what.partition(":")
        if not colon:
            cure = "Of a run say --client NAME" if os.path.isdir(what) else "Write an id, or SPACE:NAME such as mobilenetv3:largest"
            raise InvalidConfig(f"{what} is not an architecture. {cure}")
        seeds = [override for override in overrides or [] if override.startswith("seed=")]
        settings = space_settings(name, [override for override in overrides or [] if override not in seeds])
        drawn, title = SPACES[name].make(settings, ImageShape(3, size, classes)), what[:60] + "…" * (len(what) > 60)
        architecture = drawn.find(what if text[:1].isdigit() else text, rng(config.load(None, seeds).seed, "architecture"))
    cost = drawn.cost(architecture)
    numbers = f"{cost.parameters:,} parameters, {cost.macs:,} multiply-accumulates"
    target = out or Path(f"{_file_name(client or what)}.svg")
    write_file(target, draw(drawn.drawing(architecture), title, numbers).encode())
    _print(f"{target}: {architecture.id}, {numbers}")


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
