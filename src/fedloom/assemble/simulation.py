"""From settings to a federation ready to run: the one place that knows which part goes where."""

from __future__ import annotations

import json
import platform
import subprocess
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedloom
from fedloom.config import COMPONENT_PATHS, Settings, from_run, read_toml, to_toml
from fedloom.core.architecture import Architecture
from fedloom.core.errors import DamagedRun, InvalidConfig, InvalidData, UnusableFolder
from fedloom.core.hardware import assigned
from fedloom.core.messages import Arrays
from fedloom.core.method import Method
from fedloom.core.result import ClientResult, LedgerEntry, RunResult
from fedloom.data.readers import Dataset, read
from fedloom.data.splits import Federation, Split, make_split, reserved, server_images
from fedloom.engine.inline import InlineLink
from fedloom.engine.loop import Link
from fedloom.engine.processes import ProcessesLink, worker_processes
from fedloom.engine.ray import RayLink, cluster, workers
from fedloom.engine.run import Run, Watcher
from fedloom.engine.store import Spent, Store
from fedloom.engine.visit import Books, Simulation
from fedloom.files import write_file
from fedloom.methods.base import METHODS
from fedloom.models.personal import MODEL
from fedloom.models.personal import load_model as load_model  # part of what this module offers
from fedloom.models.supernet_weights import starting_weights
from fedloom.spaces.base import ImageShape
from fedloom.spaces.budget import bounded
from fedloom.supernets.base import make_supernet
from fedloom.training.bench import Bench
from fedloom.training.latency import measure_latency
from fedloom.training.local import Pixels


def new_run(settings: Settings, folder: Path, watcher: Watcher) -> RunResult:
    """Run a federation from its beginning into a new folder."""
    store = Store(folder)
    _refuse_used(folder)  # before the data set is read
    if settings.data.name != "digits":  # a resume may start in another directory
        server = str(Path(settings.data.server).absolute()) if settings.data.server else ""
        settings = replace(settings, data=replace(settings.data, folder=str(Path(settings.data.folder).absolute()), server=server))
    if settings.weights:
        settings = replace(settings, weights=str(Path(settings.weights).absolute()))
    settings = replace(settings, components=_full_paths(settings.components))
    return _execute(settings, store, watcher, resumed=False)


def _full_paths(components: Mapping[str, Any]) -> dict[str, Any]:
    """The components with files named so that any directory finds them; empty names stay empty."""
    full = dict(components)
    for key in COMPONENT_PATHS:
        name, _, item = key.partition(".")
        if path := getattr(full[name], item):
            full[name] = replace(full[name], **{item: str(Path(path).absolute())})
    return full


def resume_run(folder: Path, watcher: Watcher) -> RunResult:
    """Continue a stopped run; a finished one gives its result again."""
    return _execute(saved_settings(folder), Store(folder), watcher, resumed=True)


@dataclass(frozen=True)
class Reopened:
    """The parts of a run, rebuilt from its folder to look at: nothing is written."""

    settings: Settings
    bench: Bench
    method: Method[Any]
    federation: Federation
    store: Store
    finished: bool

    def state(self) -> Any:
        """The method's, after the last checkpoint."""
        found = self.store.load_state(self.method.start(self.settings.seed))
        if found is None:
            raise DamagedRun(f"{self.store.folder}/state/server.safetensors is missing; the run folder is incomplete")
        return found


def reopen_run(folder: Path, device: torch.device | None = None) -> Reopened:
    """device: where its data lie, if not where the run had them."""
    settings, store = saved_settings(folder), Store(folder)
    dataset = read(settings.data)
    bench = make_bench(settings, dataset, device or _device(settings))
    if settings.weights:
        bench, _ = with_weights(bench, folder / "state" / "weights.safetensors", settings.weights)
    method = METHODS[settings.method].make(settings.components[settings.method], bench)
    federation = Federation(dataset, _saved_split(store, settings, dataset), bench.device)
    return Reopened(settings, bench, method, federation, store, finished=so_far(store)[1])


def saved_settings(folder: Path) -> Settings:
    if not (folder / "config.toml").exists():
        raise DamagedRun(f"{folder} is not a run folder: it has no config.toml", folder=str(folder))
    try:
        return from_run(read_toml(folder / "config.toml"))
    except InvalidConfig as error:
        raise DamagedRun(f"{folder / 'config.toml'} is damaged: {error}", folder=str(folder)) from error


def _refuse_used(folder: Path) -> None:
    if (folder / "config.toml").exists() or (folder / "state" / "server.safetensors").exists():
        raise UnusableFolder(f"{folder} already holds a run. Continue it with `fedloom resume {folder}`, or choose another run.folder")


def free_folder(name: str) -> Path:
    """runs/NAME, or runs/NAME-2, … when that is taken."""
    number, folder = 1, Path("runs") / name
    while folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def _execute(settings: Settings, store: Store, watcher: Watcher, resumed: bool) -> RunResult:
    device = _device(settings)
    ready = cluster(settings.components["ray"], device.type == "cuda") if settings.engine == "ray" else nullcontext()
    with ready:  # before the folder is touched, like all that may be refused
        return _federate(settings, store, watcher, resumed, device)


def _federate(settings: Settings, store: Store, watcher: Watcher, resumed: bool, device: torch.device) -> RunResult:
    dataset = read(settings.data)  # before the folder is touched: most mistakes show here
    bench = make_bench(settings, dataset, device)
    surroundings = environment(device)
    if settings.weights:
        kept = store.folder / "state" / "weights.safetensors"  # a resume needs nothing from elsewhere
        bench, surroundings["weights"] = with_weights(bench, kept if resumed else Path(settings.weights), settings.weights)
    method = METHODS[settings.method].make(settings.components[settings.method], bench)
    initial = method.start(settings.seed)
    if not resumed:
        split = make_split(
            settings.split, dataset.train.labels, dataset.test.labels, settings.clients, settings.seed, dataset.members
        )
    store.claim()
    try:
        if resumed:
            split = _saved_split(store, settings, dataset)
        else:
            _refuse_used(folder=store.folder)  # again, now that nobody else can write here
            store.save_split(split.to_arrays(), _fingerprint(dataset))
            if settings.weights:
                write_file(kept, Path(settings.weights).read_bytes())
            store.write_text("config.toml", to_toml(settings))  # last: from here on the folder is a run
        federation = Federation(dataset, split, device)
        numbers = {name: number for number, name in enumerate(federation.names)}

        def describe_client(entry: LedgerEntry) -> ClientResult:
            cost = bench.space.cost(Architecture.parse(entry.architecture))
            return ClientResult(
                name=entry.client,
                test_accuracy=_known(entry.test_accuracy),
                validation_accuracy=_known(entry.validation_accuracy),
                architecture=entry.architecture,
                parameters=cost.parameters,
                macs=cost.macs,
                train_examples=len(split.part("train", numbers[entry.client])),
                test_examples=len(split.part("test", numbers[entry.client])),
            )

        before, over = so_far(store)
        facts = {"method": settings.method, "space": settings.space, "dataset": settings.data.name, "protocol": settings.protocol}
        run = Run(
            method=method,
            initial=initial,
            store=store,
            watcher=watcher,
            rounds=settings.rounds,
            seed=settings.seed,
            facts={**facts, "environment": surroundings},
            describe_client=describe_client,
            checkpoint_every=settings.run.checkpoint_every,
            before=before,
            over=over,
        )
        hardware = assigned(settings.hardware, federation.names, settings.seed)
        books = Books(method, store, describe_model(settings, dataset), run.record, hardware, settings.hardware.deadline)
        with _linked(settings, method, federation, split, books, bench, watcher) as link:
            return run.execute(link)
    finally:
        store.release()


@contextmanager
def _linked(
    settings: Settings, method: Method[Any], federation: Federation, split: Split, books: Books, bench: Bench, watcher: Watcher
) -> Iterator[Link]:
    """The engine's way to reach clients."""
    if settings.engine == "inline":
        yield InlineLink(method, federation.names, federation.data_of, books, watcher.stage)
        return
    begin = partial(simulation, to_toml(settings), split.to_arrays(), {name: tensor.numpy() for name, tensor in bench.start.items()})
    if settings.engine == "processes":
        with worker_processes(settings.components["processes"].workers, begin) as made:
            yield ProcessesLink(federation.names, books, made, watcher.stage)
        return
    with workers(settings.components["ray"], bench.device.type == "cuda", begin) as actors:
        yield RayLink(federation.names, books, actors, watcher.stage)


def simulation(settings_text: str, split: Arrays, start: Arrays) -> Simulation:
    """The client half of a run, in another process: it reads the data itself."""
    settings = from_run(tomllib.loads(settings_text))
    dataset, device = read(settings.data), _device(settings)
    bench = replace(make_bench(settings, dataset, device), start={name: torch.tensor(array) for name, array in start.items()})
    method = METHODS[settings.method].make(settings.components[settings.method], bench)
    return method, Federation(dataset, Split.from_arrays(dict(split), own_tests=settings.split.test > 0), device).data_of


# -- parts ------------------------------------------------------------------------
def make_bench(settings: Settings, dataset: Dataset, device: torch.device) -> Bench:
    image = _image_shape(dataset)
    for name in ("crop", "cutout"):
        pixels = getattr(settings.training, name)
        if pixels >= image.size:
            raise InvalidConfig(f"training.{name} is {pixels}, but {dataset.name} has images of {image.size} pixels. Lower it; 0 is off")
    supernet = make_supernet(settings.space, settings.components[settings.space], image)
    latency_ms = cache(lambda architecture: measure_latency(supernet, architecture, device))
    return Bench(
        space=bounded(supernet.space, settings.budget, settings.training.batch, latency_ms),
        supernet=supernet,
        training=settings.training,
        pixels=Pixels(dataset.mean, dataset.std),
        participants=settings.participants,
        rounds=settings.rounds,
        protocol=settings.protocol,
        device=device,
        server=server_images(settings.split, dataset, settings.seed, device),
    )


def with_weights(bench: Bench, path: Path, named: str) -> tuple[Bench, str]:
    """The bench that begins with the weights of a file, and what the result says of them."""
    if str(path) != named and not path.exists():
        raise DamagedRun(f"{path} is missing; the run folder is incomplete", path=str(path))
    start, remarks = starting_weights(path, bench.supernet, bench.pixels.mean, bench.pixels.std)
    return replace(bench, start=start), f"the weights in {named}{remarks}"


def _image_shape(dataset: Dataset) -> ImageShape:
    _, channels, height, _ = dataset.train.images.shape
    return ImageShape(channels, height, len(dataset.classes))


def _device(settings: Settings) -> torch.device:
    own = settings.components[settings.engine]
    if own.threads:
        torch.set_num_threads(own.threads)
    return usable_device(own.device, f"{settings.engine}.device")


def usable_device(wanted: str, key: str = "device") -> torch.device:
    """wanted: auto, cpu or cuda."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise InvalidConfig(f"{key} must be auto, cpu or cuda, got {wanted!r}", key=key)
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(f"{key} is cuda, but torch finds no GPU. Use {key}=cpu", key=key)
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


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
        cure = f"Put the original back in {settings.data.folder}"
        raise InvalidData(f"The data set {dataset.name} is not the one this run began with. {cure}", dataset=dataset.name)
    split = Split.from_arrays(dict(arrays), own_tests=settings.split.test > 0)
    held = np.concatenate([split.train, split.validation, *([split.test] if split.own_tests else [])])
    if np.isin(held, reserved(settings.split, len(dataset.train), settings.seed)).any():
        what = "clients hold images that are the server's by split.server and seed: one of them was changed. Put back what config.toml had"
        raise DamagedRun(f"{store.folder}: {what}", folder=str(store.folder))
    return split


def so_far(store: Store) -> tuple[Spent | None, bool]:
    """What a run took before a resume, if anything says so, and whether it was finished."""
    try:
        result = json.loads(store.read_text("result.json"))
        said = Spent(float(result["cost"]["seconds"]), str(result.get("environment", {}).get("seconds", "")))
        over = bool(result["finished"])
    except (DamagedRun, ValueError, KeyError, TypeError, AttributeError):
        said, over = None, False  # no result was written yet, or it is damaged
    return store.load_spent() or said, over


def _known(accuracy: float | None) -> float:
    if accuracy is None:
        raise DamagedRun("ledger.jsonl holds a final participation without accuracies")
    return accuracy


@cache
def _commit() -> str:
    """The commit this code was checked out from, marked when the code has changed since; unknown for an installed package."""
    code = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(code), *arguments], capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != code.parents[1]:
            return "unknown"  # some other repository that this package lies in
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(code))
        return git("rev-parse", "--short=12", "HEAD") + ("+changed" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, commit and device, as the result records them."""
    return {
        "fedloom": fedloom.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


# -- personal models ------------------------------------------------------------------
def describe_model(settings: Settings, dataset: Dataset) -> dict[str, Any]:
    """What a personal model's file says of itself: enough to build the network and feed it images."""
    return {
        "format": MODEL,
        "space": settings.space,
        "settings": asdict(settings.components[settings.space]),
        "image": asdict(_image_shape(dataset)),
        "classes": list(dataset.classes),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "fedloom": fedloom.__version__,
    }
