"""Run folders read for a report: what is there, what is not and why, and which runs beside them they can be measured by."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom import config
from fedloom.assemble import Reopened, reopen_run, saved_settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import DamagedRun, FedloomError
from fedloom.core.result import SCHEMA, ClientResult
from fedloom.engine.store import Store
from fedloom.exchange.models import make_supernet
from fedloom.files import read_arrays
from fedloom.methods.base import METHODS
from fedloom.report.view import BASELINES, Baseline, Course, Holdings, RunView
from fedloom.report.words import plain
from fedloom.spaces.base import SPACES, ImageShape, SearchSpace

# Settings in which runs may differ and still be compared without a word.
NO_DIFFERENCE = ("method", "run.folder", "run.checkpoint_every", "engine", "plugins", "data.folder")


# -- one run --------------------------------------------------------------------------------
def open_run(folder: Path) -> RunView:
    """A run as far as it has come. Refuses what is no run or is damaged; what is only absent is said in the page."""
    settings, result = saved_settings(folder), read_result(folder)
    course = Course.of(Store(folder).read_ledger())
    reopened, why = _reopened(folder)
    space, no_space = (reopened.bench.supernet.space, "") if reopened else _space_without_data(folder, settings, why)
    clients = tuple(_client(row) for row in result.get("clients", ())) or _clients_so_far(course, reopened)
    return RunView(
        folder=str(folder),
        method=plain(settings.method),
        space_name=plain(settings.space),
        dataset=plain(settings.data.name),
        protocol=settings.protocol,
        seed=settings.seed,
        rounds=settings.rounds,
        rounds_done=int(result.get("rounds", 0)),
        finished=bool(result.get("finished", False)),
        client_count=settings.clients,
        participants=settings.participants,
        clients=clients,
        seconds=float(result.get("cost", {}).get("seconds", 0.0)),
        course=course,
        settings=flat_settings(folder),
        environment=result.get("environment", {}),
        defaults=_defaults(),
        manifest=reopened.method.uploads if reopened else _manifest_without_data(settings.method),
        space=space,
        holdings=_holdings(reopened) if reopened else None,
        no_data=why,
        no_space=no_space,
    )


def read_result(folder: Path) -> dict[str, Any]:
    """result.json; empty if the run has not come to its first checkpoint."""
    path = folder / "result.json"
    if not path.exists():
        return {}
    try:
        result = json.loads(path.read_bytes())
        if result["schema"] != SCHEMA:
            raise ValueError(f"its schema is {result['schema']!r}, not {SCHEMA!r}")
        for key, kind in (("clients", list), ("cost", dict), ("environment", dict), ("rounds", int), ("finished", bool), ("uploads", list)):
            if not isinstance(result[key], kind):
                raise ValueError(f"{key} is {plain(result[key], 40)!r}")
        for row in result["clients"]:
            _client(row)
        return dict(result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else plain(error, 160)
        raise DamagedRun(f"{path} is damaged ({what}). `fedloom resume {folder}` writes it again", path=str(path)) from error


def _client(row: Any) -> ClientResult:
    """Raises KeyError, TypeError or ValueError for what is no client's line."""
    kinds: dict[str, Any] = {"str": str, "float": (int, float), "int": int}
    for item in fields(ClientResult):
        if not isinstance(row[item.name], kinds[str(item.type)]) or isinstance(row[item.name], bool):
            raise ValueError(f"{item.name} of a client is {plain(row[item.name], 40)!r}")
    return ClientResult(**{item.name: row[item.name] for item in fields(ClientResult)})


def flat_settings(folder: Path) -> dict[str, Any]:
    """key -> value of config.toml, which has been read before."""
    table = tomllib.loads((folder / "config.toml").read_text())
    flat = {name: value for name, value in table.items() if not isinstance(value, dict)}
    return flat | {f"{name}.{key}": part for name, value in table.items() if isinstance(value, dict) for key, part in value.items()}


def _defaults() -> dict[str, tuple[Any, str]]:
    """key -> default and meaning of every setting there is."""
    return {key: (tomllib.loads(f"value = {default}")["value"], meaning) for key, default, meaning in config.explain()}


def _reopened(folder: Path) -> tuple[Reopened | None, str]:
    try:
        return reopen_run(folder, torch.device("cpu")), ""
    except FedloomError as error:
        return None, f"The data set or the split cannot be read: {plain(error, 300)}."


def _holdings(run: Reopened) -> Holdings:
    split, data = run.federation.split, run.federation.dataset
    classes = len(data.classes)

    def counts(part: str, labels: Any) -> Any:
        return np.array([np.bincount(labels[split.part(part, client)], minlength=classes) for client in range(split.clients)])

    tested = data.train.labels if split.own_tests else data.test.labels
    names = tuple(plain(name) for name in data.classes)
    return Holdings(tuple(run.federation.names), names, counts("train", data.train.labels), counts("test", tested))


def _clients_so_far(course: Course, run: Reopened | None) -> tuple[ClientResult, ...]:
    """Of a run that was stopped while clients took their personal models: those that have theirs."""
    if run is None:
        return ()
    clients = []
    for name, entry in sorted(course.totals.final.items()):
        if entry.test_accuracy is None or entry.validation_accuracy is None or name not in run.federation.names:
            continue
        cost, number = run.bench.supernet.space.cost(Architecture.parse(entry.architecture)), run.federation.names.index(name)
        images = [len(run.federation.split.part(part, number)) for part in ("train", "test")]
        accuracies = (entry.test_accuracy, entry.validation_accuracy)
        clients.append(ClientResult(name, *accuracies, entry.architecture, cost.parameters, cost.macs, images[0], images[1]))
    return tuple(clients)


def _space_without_data(folder: Path, settings: Any, why: str) -> tuple[SearchSpace | None, str]:
    """The space of a run whose data are elsewhere: a personal model knows the shape of its images."""
    try:
        model = next(folder.glob("clients/*/model.safetensors"), None)
        if model is None:
            return None, f"No personal model says what its images look like. {why}"
        _, facts = read_arrays(model)
        return make_supernet(settings.space, settings.components[settings.space], ImageShape(**facts["image"])).space, ""
    except (FedloomError, KeyError, TypeError) as error:
        return None, f"The search space cannot be made: {plain(error, 200)}."


def _manifest_without_data(method: str) -> Any:
    declared = getattr(METHODS[method].make, "uploads", None)
    return declared if isinstance(declared, Mapping) else None


# -- several ---------------------------------------------------------------------------------
def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Runs by their folders; a folder that holds runs, such as compare's, stands for all of them."""
    found: list[Path] = []
    for path in paths:
        inside = [path] if (path / "config.toml").exists() else sorted(other.parent for other in path.glob("*/config.toml"))
        if not inside:
            raise DamagedRun(f"{path} is neither a run folder (it has no config.toml) nor a folder of runs", folder=str(path))
        found += [folder for folder in inside if folder.resolve() not in [other.resolve() for other in found]]
    return found


def baselines_of(folder: Path, given: Sequence[Path] = ()) -> list[Baseline]:
    """Finished runs of local and fedavg on the same images with the same seed: those given first, then those that lie beside it."""
    beside = sorted(path.parent for path in folder.resolve().parent.glob("*/config.toml"))
    own = folder.resolve()
    places = list(dict.fromkeys(path.resolve() for path in [*given, *beside] if path.resolve() != own))
    mine = flat_settings(folder)
    fitting: dict[str, list[Path]] = {}
    for place in places:
        theirs = _settings_of_neighbour(place)
        if theirs and theirs.get("method") in BASELINES and theirs["method"] != mine["method"] and _same_split(folder, place, mine, theirs):
            fitting.setdefault(theirs["method"], []).append(place)
    return [_baseline(mine, fitting[method], folder) for method in BASELINES if method in fitting]


def _settings_of_neighbour(place: Path) -> dict[str, Any] | None:
    """Nothing for a neighbour that is no finished run: it is not what was asked about."""
    try:
        result = read_result(place)
        return flat_settings(place) if result.get("finished") and result["clients"] else None
    except (FedloomError, OSError, ValueError):
        return None


def _same_split(folder: Path, place: Path, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return mine.get("seed") == theirs.get("seed") and split_bytes(folder) is not None and split_bytes(folder) == split_bytes(place)


def split_bytes(folder: Path) -> bytes | None:
    """The division of the images, with a fingerprint of the data set."""
    try:
        return (folder / "state" / "split.safetensors").read_bytes()
    except OSError:
        return None


def _baseline(mine: Mapping[str, Any], places: Sequence[Path], folder: Path) -> Baseline:
    place = places[0]
    result, theirs = read_result(place), flat_settings(place)
    methods = {entry.name for entry in METHODS}
    spaces = {entry.name for entry in SPACES} - {mine["space"]}
    differs = tuple(
        f"{key} ({plain(value, 40)} there, {plain(mine.get(key), 40)} here)"
        for key, value in theirs.items()
        if value != mine.get(key) and key not in NO_DIFFERENCE and key.partition(".")[0] not in {*methods, *spaces, *config.ENGINES}
    )
    shown = str(place.relative_to(Path.cwd())) if place.is_relative_to(Path.cwd()) else str(place)
    accuracies = {row["name"]: row["test_accuracy"] for row in result["clients"]}
    cost = result["cost"]
    return Baseline(theirs["method"], shown, accuracies, float(cost["seconds"]), int(cost["bytes_up"]), differs, len(places) - 1)
