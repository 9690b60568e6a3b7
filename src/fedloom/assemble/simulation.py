"""A federation on this machine: begun, resumed, or reopened to look at."""

from __future__ import annotations

import tomllib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.assemble.builder import Built, build
from fedloom.assemble.environment import environment, plugin_digests, share_gpu, usable_device
from fedloom.config import Settings, from_run, map_paths, read_toml, tier_of_each, to_toml, without_components
from fedloom.core.client_site import PersonalModel
from fedloom.core.errors import DamagedRun, InvalidConfig, InvalidData, UnusableFolder, UnusablePlugin
from fedloom.core.judgement import Judgement
from fedloom.core.messages import Arrays
from fedloom.core.method import Method
from fedloom.core.reading import parse_json
from fedloom.core.result import RunResult
from fedloom.core.sharing import once
from fedloom.data.readers import Dataset, read
from fedloom.data.splits import Federation, Split, make_split, reserved
from fedloom.engine.absence import with_absences
from fedloom.engine.base import Link
from fedloom.engine.inline import InlineLink
from fedloom.engine.processes import ProcessesLink, worker_processes
from fedloom.engine.protection import Account, Protection, simulated
from fedloom.engine.ray import RayLink, cluster, workers
from fedloom.engine.run import Run, Watcher
from fedloom.engine.store import Spent, Store, how_to_go_on, not_a_run, of_federation
from fedloom.engine.sums import SummedLink, sums_of
from fedloom.engine.visit import ClientRecords, Simulation
from fedloom.files import read_plain, write_file
from fedloom.training.judging import judge_model
from fedloom.training.tools import Tools

WEIGHTS = Path("state") / "weights.safetensors"  # a run's own copy of what it started from: a resume needs nothing from elsewhere


def new_run(settings: Settings, folder: Path, watcher: Watcher) -> RunResult:
    """Run a federation from its beginning into a new folder."""
    _refuse_used(folder)  # before the data set is read
    full = map_paths(settings, lambda path: path and str(Path(path).absolute()))  # a resume may start in another directory
    if settings.data.name == "digits":  # which needs no folder
        full = replace(full, data=settings.data)
    return _execute(full, Store(folder), watcher, resumed=False)


def resume_run(folder: Path, watcher: Watcher, rounds: int = 0) -> RunResult:
    """Continue a stopped run; a finished one gives its result again. rounds: go on until there are so many, after the end as well."""
    settings = saved_settings(folder, trust_plugins=True)
    if of_federation(folder):
        raise InvalidConfig(
            f"{folder} belongs to a federation over a network. `{how_to_go_on(folder)}` goes on with it", folder=str(folder)
        )
    if rounds:
        _check_more(settings, Store(folder), rounds)
        settings = replace(settings, rounds=rounds)
    return _execute(settings, Store(folder), watcher, resumed=True)


def _check_more(settings: Settings, store: Store, rounds: int) -> None:
    done, over = len({entry.round for entry in store.read_ledger() if not entry.final}), so_far(store)[1]
    if over and not done:
        raise InvalidConfig(f"{store.folder} is finished, and {settings.method} has no rounds, so that it cannot have more", key="rounds")
    if rounds < done or (rounds == done and over):
        raise InvalidConfig(f"{store.folder} has done {done} rounds already. Give more, such as rounds={done + 5}", key="rounds")


@dataclass(frozen=True)
class Reopened:
    """The parts of a run, rebuilt from its folder to look at: nothing is written."""

    settings: Settings
    tools: Tools
    method: Method[Any]
    federation: Federation
    store: Store
    finished: bool

    @property
    def facts(self) -> dict[str, Any]:
        """What an analysis says of the run."""
        own = self.settings
        return {"space": own.space, "dataset": own.data.name, "protocol": own.protocol, "seed": own.seed, "rounds": own.rounds}

    def state(self) -> Any:
        """The method's, after the last checkpoint."""
        found = self.store.load_state(self.method.start(self.settings.seed))
        if found is None:
            raise DamagedRun(f"{self.store.folder}/state/server.safetensors is missing; the run folder is incomplete")
        return found


def reopen_run(folder: Path, device: torch.device | None = None, trust_plugins: bool = False) -> Reopened:
    """A run with its settings, method and data, for analyses. device: where to put the data; default: the run's device.

    trust_plugins: import the plugins that the run names, which can do anything; without it a run that needs them is refused.
    """
    settings, store = saved_settings(folder, trust_plugins), Store(folder)
    dataset = read(settings.data)
    built = build(settings, dataset, device or device_of(settings), folder / WEIGHTS)
    federation = Federation(dataset, _saved_split(store, settings, dataset), built.tools.device)
    return Reopened(settings, built.tools, built.method, federation, store, finished=so_far(store)[1])


def saved_settings(folder: Path, trust_plugins: bool = False) -> Settings:
    """The settings of a run. trust_plugins: as for ``reopen_run``."""
    if not (folder / "config.toml").exists():
        raise DamagedRun(not_a_run(folder), folder=str(folder))
    try:
        return from_run(read_toml(folder / "config.toml"), trust_plugins)
    except InvalidConfig as error:
        raise DamagedRun(f"{folder / 'config.toml'} is damaged: {error}", folder=str(folder)) from error


def saved_outline(folder: Path, trust_plugins: bool = False) -> tuple[Settings, str]:
    """The settings of a run and nothing; or, where it needs plugins that are not imported, all but its components' settings, and why."""
    try:
        return saved_settings(folder, trust_plugins), ""
    except UnusablePlugin as error:
        if trust_plugins:
            raise
        with suppress(InvalidConfig):  # where a data set comes from a plugin as well
            return without_components(read_toml(folder / "config.toml")), str(error)
        raise


def free_folder(name: str) -> Path:
    """runs/NAME, or runs/NAME-2, … when that is taken."""
    number, folder = 1, Path("runs") / name
    while folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def so_far(store: Store) -> tuple[Spent | None, bool]:
    """What a run took before a resume, if anything says so, and whether it was finished."""
    try:
        result = parse_json(store.read_text("result.json"))
        said = Spent(float(result["cost"]["seconds"]), str(result.get("environment", {}).get("seconds", "")))
        over = bool(result["finished"])
    except (DamagedRun, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        said, over = None, False  # no result was written yet, or it is damaged
    return store.load_spent() or said, over


# -- running -------------------------------------------------------------------------
def _execute(settings: Settings, store: Store, watcher: Watcher, resumed: bool) -> RunResult:
    device = device_of(settings)
    if settings.training.precision == "half" and device.type != "cuda":
        where = f"{settings.engine}.device is {device.type}"
        raise InvalidConfig(f"training.precision=half needs a GPU, and {where}. Set training.precision=auto", key="training.precision")
    ready = cluster(settings.components["ray"], device.type == "cuda") if settings.engine == "ray" else nullcontext()
    with ready:  # before the folder is touched, like all that may be refused
        return _simulate(settings, store, watcher, resumed, device)


def _simulate(settings: Settings, store: Store, watcher: Watcher, resumed: bool, device: torch.device) -> RunResult:
    share_gpu(device)
    dataset = once(lambda: read(settings.data), "data", settings.data)  # before the folder is touched: most mistakes show here
    built = build(settings, dataset, device, store.folder / WEIGHTS if resumed else Path(settings.weights))
    account, initial = Account(settings.privacy, settings.participants), built.method.start(settings.seed)
    if not resumed:
        split = make_split(settings.split, dataset.train.labels, dataset.test.labels, settings.clients, settings.seed, dataset.members)
    store.claim()
    try:
        if resumed:
            split = _saved_split(store, settings, dataset)
            if saved_settings(store.folder, trust_plugins=True).rounds != settings.rounds:
                store.write_text("config.toml", to_toml(settings))
        else:
            _refuse_used(store.folder)  # again, now that no other process can write here
            store.save_split(split.to_arrays(), _fingerprint(dataset))
            if built.beginning:
                built.beginning.save(store.folder / WEIGHTS)
            elif settings.weights:
                write_file(store.folder / WEIGHTS, read_plain(settings.weights))
            store.write_text("config.toml", to_toml(settings))  # last: from here on the folder is a run
        federation = Federation(dataset, split, device)
        before, over = so_far(store)
        run = Run(
            method=built.method,
            initial=initial,
            store=store,
            watcher=watcher,
            rounds=settings.rounds,
            seed=settings.seed,
            facts=run_facts(settings, settings.data.name, built, device) | {"one_class": federation.one_class},
            space=built.tools.space,
            images=federation.images,
            account=account,
            checkpoint_every=settings.run.checkpoint_every,
            beside=True,
            before=before,
            over=over,
        )
        hardware = tier_of_each(settings, federation.names)
        protection = Protection(settings.privacy, settings.participants, simulated(settings.seed))
        sums, deadline = sums_of(settings.privacy, built.method, settings.participants), settings.hardware.deadline

        def judged(client: str, model: PersonalModel) -> Judgement:
            return judge_model(built.tools, model, federation.data_of(client))

        records = ClientRecords(built.method, store, built.model_facts, run.record, hardware, deadline, protection, sums, judged)
        with _linked(settings, built, federation, records, watcher) as reached:
            link = with_absences(reached, hardware, settings.seed)
            return run.execute(SummedLink(link, sums) if sums else link)
    finally:
        store.release()


def run_facts(settings: Settings, dataset: str, built: Built, device: torch.device) -> dict[str, Any]:
    """What a result says of its run."""
    start: dict[str, Any] = {"weights": built.start_remark} if built.start_remark else {}
    own = plugin_digests(settings.plugins)
    return {
        "method": settings.method,
        "space": settings.space,
        "dataset": dataset,
        "protocol": settings.protocol,
        "classes": tuple(built.model_facts["classes"]),
        "environment": environment(device) | start | ({"plugins": own} if own else {}),
    }


@contextmanager
def _linked(settings: Settings, built: Built, federation: Federation, records: ClientRecords, watcher: Watcher) -> Iterator[Link]:
    """The engine's way to reach clients."""
    if settings.engine == "inline":
        at_once = settings.components["inline"].at_once(built.tools.device.type == "cuda")
        yield InlineLink(built.method, federation.names, federation.data_of, records, watcher.stage, at_once)
        return
    start = {name: tensor.numpy() for name, tensor in built.tools.start.items()}
    begin = partial(simulation, to_toml(settings), federation.split.to_arrays(), start)
    if settings.engine == "processes":
        own = settings.components["processes"]
        with worker_processes(own.workers, begin) as made:
            yield ProcessesLink(federation.names, records, made, watcher.stage, own.at_once(built.tools.device.type == "cuda"))
        return
    with workers(settings.components["ray"], built.tools.device.type == "cuda", begin) as actors:
        yield RayLink(federation.names, records, actors, watcher.stage)


def simulation(settings_text: str, split: Arrays, start: Arrays) -> Simulation:
    """The client half of a run, in another process: it reads the data itself."""
    settings = from_run(tomllib.loads(settings_text), trust_plugins=True)
    dataset, device = read(settings.data), device_of(settings)
    own = settings.components[settings.engine]
    share_gpu(device, own.workers if settings.engine == "processes" else own.per_gpu)
    built = build(settings, dataset, device, start={name: torch.tensor(array) for name, array in start.items()})
    return built.method, Federation(dataset, Split.from_arrays(dict(split), own_tests=settings.split.test > 0), device).data_of


def _refuse_used(folder: Path) -> None:
    if (folder / "config.toml").exists() or (folder / "state" / "server.safetensors").exists():
        raise UnusableFolder(f"{folder} already holds a run. Continue it with `fedloom resume {folder}`, or choose another run.folder")


def device_of(settings: Settings) -> torch.device:
    own = settings.components[settings.engine]
    if own.threads:
        torch.set_num_threads(own.threads)
    return usable_device(own.device, f"{settings.engine}.device")


# -- the split -----------------------------------------------------------------------
def _fingerprint(dataset: Dataset) -> dict[str, Any]:
    """Enough to notice that a run is resumed on other data."""
    checksum = 0
    for array in (dataset.train.images, dataset.train.labels, dataset.test.images, dataset.test.labels):
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return {"dataset": dataset.name, "train": len(dataset.train.labels), "test": len(dataset.test.labels), "checksum": checksum}


def _saved_split(store: Store, settings: Settings, dataset: Dataset) -> Split:
    saved = store.load_split()
    if saved is None:
        raise DamagedRun(f"{store.folder}/state/split.safetensors is missing; the run folder is incomplete")
    arrays, facts = saved
    if facts != _fingerprint(dataset):
        cure = f"Put the original back in {settings.data.folder}, or go on with other images in a new run: weights={store.folder}"
        raise InvalidData(f"The data set {dataset.name} is not the one this run began with. {cure}", dataset=dataset.name)
    split = Split.from_arrays(dict(arrays), own_tests=settings.split.test > 0)
    held = np.concatenate([split.train, split.validation, *([split.test] if split.own_tests else [])])
    if np.isin(held, reserved(settings.split, len(dataset.train), settings.seed)).any():
        what = "clients hold images that are the server's by split.server and seed: one of them was changed. Put back what config.toml had"
        raise DamagedRun(f"{store.folder}: {what}", folder=str(store.folder))
    return split
