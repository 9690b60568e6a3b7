"""The commands that use models: predict, for images of unknown classes, and evaluate, for images of known ones."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom import config
from fedloom.commands.networks import model_of
from fedloom.commands.terminal import Plugins, PrintJson, TrustPlugins, console, new_console, say
from fedloom.core.errors import FedloomError, InvalidConfig, InvalidData
from fedloom.files import write_file
from fedloom.models.evaluate import Evaluated, test_part
from fedloom.models.evaluate import evaluate as evaluated
from fedloom.models.predict import image_files, read_model
from fedloom.models.predict import predict as seen_in
from fedloom.report.terminal.judged import class_table, confusion_table, judged_line, models_table

ModelOrRun = Annotated[
    Path, typer.Argument(metavar="MODEL or RUN", help="a file written by export, a client's model.safetensors, or the folder of a run")
]
Client = Annotated[str, typer.Option(help="RUN: the client whose personal model is used")]
Csv = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="write a line for every image")]


def predict(
    model: ModelOrRun,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="png, jpeg, webp, bmp, gif, tiff or ppm files, or folders")],
    client: Client = "",
    top: Annotated[int, typer.Option(min=1, help="number of classes to name")] = 3,
    table: Csv = None,
    plugin: Plugins = None,
    trust_plugins: TrustPlugins = False,
    as_json: PrintJson = False,
) -> None:
    """Name the classes that a model sees in images, with probabilities; "unsure" where the likeliest is below the model's threshold.

    Images that cannot be read are listed at the end (exit code 5), after the predictions for the others.
    """
    config.plug_in(plugin or [])
    read = read_model(_one(model, client, trust_plugins))
    paths = image_files(images)
    seen, unreadable = seen_in(read, paths, len(read.classes) if table else top)
    if table:
        rows = [[one.image, one.classes[0][0], one.unsure, *(dict(one.classes)[name] for name in read.classes)] for one in seen]
        _write_table(table, ["image", "class", "unsure", *(f"p({name})" for name in read.classes)], rows)
        say(f"{table}: {len(rows)} images")
    elif as_json and seen:
        print(json.dumps([_row(one.image, one.classes, one.unsure, read.threshold > 0) for one in seen], indent=2))
    elif seen:
        for one in seen:
            words = ", ".join(f"{name} {probability:.1%}" for name, probability in one.classes)
            say(f"{one.image}: {'unsure: ' if one.unsure else ''}{words}")
    _refuse_unreadable(unreadable, len(paths))


def _row(image: str, classes: Sequence[tuple[str, float]], unsure: bool, has_threshold: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"image": image, "classes": [{"name": name, "probability": p} for name, p in classes]}
    return {**row, "unsure": unsure} if has_threshold else row


def evaluate(
    model: ModelOrRun,
    folder: Annotated[Path, typer.Argument(metavar="IMAGES", help="a folder of class folders; of train/ and test/ the latter is used")],
    client: Client = "",
    table: Csv = None,
    plugin: Plugins = None,
    trust_plugins: TrustPlugins = False,
    as_json: PrintJson = False,
) -> None:
    """Judge a model on labelled images: confusion matrix, sensitivity and precision by class, calibration, and what it says to noise.

    Of a run without --client, all personal models are judged on the same images.
    """
    config.plug_in(plugin or [])
    model = _of_client(model)
    if model.is_dir():
        _remark_known(model, folder)
    if model.is_dir() and not client:
        _evaluate_all(model, folder, table, trust_plugins, as_json)
        return
    read = read_model(_one(model, client, trust_plugins))
    found = evaluated(read, folder)
    if table:
        _write_table(table, _heads(read.classes), _rows(found, read.classes, read.threshold))
    if as_json:
        print(json.dumps({"schema": "fedloom.evaluate/1", "classes": read.classes, **_card(found)}, indent=2))
    else:
        say(judged_line(str(model), found.judged))
        console.print(class_table(found.judged, read.classes))
        if shown := confusion_table(found.judged, read.classes):
            console.print(shown)
    _refuse_unreadable(found.unreadable, len(found.images) + len(found.unreadable))


def _evaluate_all(run: Path, folder: Path, table: Path | None, trust_plugins: bool, as_json: bool) -> None:
    names = sorted(path.parent.name for path in run.glob("clients/*/model.safetensors"))
    if not names:
        model_of(run, "", trust_plugins)  # which says what is wrong
    models = {name: read_model(model_of(run, name, trust_plugins)) for name in names}
    found = {name: evaluated(model, folder) for name, model in models.items()}
    if table:
        classes = next(iter(models.values())).classes
        rows = [[name, *row] for name, own in found.items() for row in _rows(own, classes, models[name].threshold)]
        _write_table(table, ["client", *_heads(classes)], rows)
    if as_json:
        print(json.dumps({"schema": "fedloom.evaluate/1", "clients": {name: _card(own) for name, own in found.items()}}, indent=2))
    else:
        console.print(models_table({name: (own.accuracy, own.judged) for name, own in found.items()}))
    first = next(iter(found.values()))
    _refuse_unreadable(first.unreadable, len(first.images) + len(first.unreadable))


def _of_client(model: Path) -> Path:
    """A client's folder in a run is as good as the model in it."""
    inside = model / "model.safetensors"
    return inside if inside.is_file() else model


def _remark_known(run: Path, images: Path) -> None:
    """A model looks too good on images that it was trained on."""
    try:
        data = config.read_toml(run / "config.toml")["data"]
        own = data["name"] in ("folder", "sites")
        known, these = Path(data["folder"]).resolve(), test_part(images).resolve()
    except (FedloomError, KeyError, TypeError):
        return  # no run that trained on folders of images; model_of says what else is wrong
    kept_apart = these.name == "test" and (these.parent / "train").is_dir()
    if own and not kept_apart and (these.is_relative_to(known) or known.is_relative_to(these)):
        text = f"{images} holds images that this run trained on, so its models look better here than they are. `fedloom show {run}` has"
        new_console(stderr=True).print(f"{text} their accuracy on test images", highlight=False, soft_wrap=True)


def _one(model: Path, client: str, trust_plugins: bool) -> Path:
    """The file of one model."""
    model = _of_client(model)
    if model.is_dir():
        if not client:
            raise InvalidConfig(f"{model} is a folder. Of a run say which model: --client NAME")
        return model_of(model, client, trust_plugins)
    if client:
        raise InvalidConfig(f"{model} is one model, and --client chooses one of a run. Leave it out")
    return model


def _card(found: Evaluated) -> dict[str, Any]:
    return {"images": len(found.images), "accuracy": found.accuracy, **{k: v for k, v in asdict(found.judged).items() if k != "classes"}}


def _heads(classes: Sequence[str]) -> list[str]:
    return ["image", "truth", "class", "unsure", *(f"p({name})" for name in classes)]


def _rows(found: Evaluated, classes: Sequence[str], threshold: float) -> Iterable[list[object]]:
    for image, label, row in zip(found.images, found.labels.tolist(), found.probabilities.tolist(), strict=True):
        yield [image, classes[label], classes[row.index(max(row))], max(row) < threshold, *row]


def _write_table(path: Path, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([[f"{cell:.6f}" if isinstance(cell, float) else cell for cell in row] for row in rows])
    write_file(path, text.getvalue().encode(errors="replace"))


def _refuse_unreadable(unreadable: Mapping[str, str], of: int) -> None:
    if unreadable:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in unreadable.items())
        raise InvalidData(f"{len(unreadable)} of {of} images cannot be read: {reasons}", files=tuple(unreadable))
