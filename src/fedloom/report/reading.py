"""A run folder read for a report: what is there, and what is not and why."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom import config
from fedloom.assemble import Reopened, reopen_run, saved_outline
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import DamagedRun, FedloomError, InvalidArchitecture
from fedloom.core.result import ClientResult
from fedloom.engine.run import describe_client
from fedloom.engine.store import Store, client_result, of_federation, read_result
from fedloom.files import read_arrays, read_plain
from fedloom.methods.base import METHODS
from fedloom.report.view import Course, Holdings, RunView
from fedloom.report.words import plain
from fedloom.spaces.base import ImageShape, SearchSpace
from fedloom.supernets.base import make_supernet


# -- one run --------------------------------------------------------------------------------
def open_run(folder: Path, trust_plugins: bool = False) -> RunView:
    """A run as far as it has come. Refuses what is no run or is damaged; what is only absent is said in the page.

    trust_plugins: import the plugins that the run names, which can do anything; without them the page has no space and no data.
    """
    settings, lacking = saved_outline(folder, trust_plugins)
    result, course = read_result(folder), Course.of(Store(folder).read_ledger())
    if of_federation(folder):
        reopened, why = None, "The images are at the sites; nothing about them is written down here."
    else:
        reopened, why = (None, f"{plain(lacking, 300)}.") if lacking else _reopened(folder, trust_plugins)
    space, no_space = (reopened.tools.supernet.space, "") if reopened else _space_without_data(folder, settings, why)
    clients = tuple(client_result(row) for row in result.get("clients", ())) or _clients_so_far(course, reopened)
    if space is not None:
        _check_architectures(folder, clients, space)
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
        privacy=result.get("privacy", {}),
        protection=settings.privacy,
        one_class=tuple(result.get("one_class", ())),
        defaults={key: (tomllib.loads(f"value = {default}")["value"], meaning) for key, default, meaning in config.explain()},
        manifest=reopened.method.uploads if reopened else _manifest_without_data(settings.method),
        space=space,
        holdings=_holdings(reopened) if reopened else None,
        split=hashlib.blake2b(split_bytes(folder) or b"").hexdigest(),
        about=plain(METHODS[settings.method].meaning, 200) if settings.method in METHODS else "",
        federation=of_federation(folder),
        classes=tuple(plain(row["name"]) for row in result.get("judged", {}).get("classes", ())),
        no_data=why,
        no_space=no_space,
    )


def _check_architectures(folder: Path, clients: Sequence[ClientResult], space: SearchSpace) -> None:
    try:
        for client in clients:
            space.check(Architecture.parse(client.architecture))
    except InvalidArchitecture as error:
        raise DamagedRun(f"{folder}/result.json has a client whose architecture is none: {error}", folder=str(folder)) from error


def flat_settings(folder: Path) -> dict[str, Any]:
    """key -> value of config.toml, which has been read before."""
    table = config.read_toml(folder / "config.toml")
    flat = {name: value for name, value in table.items() if not isinstance(value, dict)}
    return flat | {f"{name}.{key}": part for name, value in table.items() if isinstance(value, dict) for key, part in value.items()}


def read_method(folder: Path) -> str:
    """Which method a run has, as far as its settings can be read; whoever opens it says what is wrong with them."""
    try:
        return str(flat_settings(folder).get("method"))
    except FedloomError:
        return ""


def split_bytes(folder: Path) -> bytes | None:
    """The division of the images, with a fingerprint of the data set."""
    try:
        return read_plain(folder / "state" / "split.safetensors")
    except OSError:
        return None


def _reopened(folder: Path, trust_plugins: bool) -> tuple[Reopened | None, str]:
    try:
        return reopen_run(folder, torch.device("cpu"), trust_plugins), ""
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
    entries, images = sorted(course.totals.final.items()), run.federation.images
    known = [entry for name, entry in entries if name in images and None not in (entry.test_accuracy, entry.validation_accuracy)]
    return tuple(describe_client(entry, run.tools.supernet.space, images) for entry in known)


def _space_without_data(folder: Path, settings: Settings, why: str) -> tuple[SearchSpace | None, str]:
    """The space of a run whose data are elsewhere: a personal model knows the shape of its images."""
    if settings.space not in settings.components:
        return None, why
    try:
        model = next(folder.glob("clients/*/model.safetensors"), None)
        if model is None:
            return None, f"No personal model says what its images look like. {why}"
        _, facts = read_arrays(model)
        return make_supernet(settings.space, settings.components[settings.space], ImageShape(**facts["image"])).space, ""
    except (FedloomError, KeyError, TypeError) as error:
        return None, f"The search space cannot be made: {plain(error, 200)}."


def _manifest_without_data(method: str) -> Any:
    declared: Any = METHODS[method].make.uploads if method in METHODS else None  # a property where it depends on settings
    return declared if isinstance(declared, Mapping) else None
