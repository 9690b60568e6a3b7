"""Several methods on the same splits and within the same budget: every method and seed is an ordinary run, in a process of its own.

Several runs can share one process instead, which is for GPUs: what clients of different runs ask for at the same time, with the same
settings, is done together, as for clients of one run (``training/together.py``).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn, Protocol

import torch

from fedloom import config
from fedloom.assemble import new_run, resume_run
from fedloom.assemble.environment import AT_ONCE
from fedloom.config import Settings
from fedloom.core.errors import DamagedRun, FedloomError, Interrupted, InvalidConfig, UnusableFolder, UnusablePlugin
from fedloom.core.machine import usable_cores
from fedloom.core.sharing import sharing
from fedloom.engine.events import Event, Events
from fedloom.engine.store import read_result
from fedloom.files import ORDER, read_plain, write_file
from fedloom.methods.base import METHODS
from fedloom.training.together import answers

FEDLOOM = (sys.executable, "-m", "fedloom")
GLANCE_SECONDS = 0.1  # between two looks at the processes
PATIENCE_SECONDS = 10.0  # for a process that was asked to end
PARENT_DEATH = 1  # PR_SET_PDEATHSIG of Linux


@dataclass(frozen=True)
class PlannedRun:
    """One method at one seed, and the command that brings it to its result; none if it has one already."""

    method: str
    seed: int
    folder: Path
    command: tuple[str, ...]
    value: str = ""  # of the setting that a sweep is over

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}" if self.value else self.folder.name


class RunsView(Protocol):
    """Whoever wants to see several runs go by, each by its name."""

    def begin(self, name: str) -> None: ...
    def news(self, name: str, text: str) -> None: ...
    def end(self, name: str, text: str) -> None: ...


@dataclass(frozen=True)
class Failure:
    """A run that ended without a result."""

    run: PlannedRun
    exit_code: int
    reason: str


# -- planning ---------------------------------------------------------------------
@dataclass(frozen=True)
class Sweep:
    """Every method and seed once for each value of one setting."""

    key: str
    values: tuple[str, ...]  # as TOML writes them

    @classmethod
    def read(cls, text: str) -> Sweep:
        """``split.alpha=0.1,0.3,1``; text and lists as in key=value."""
        key, equals, listed = (part.strip() for part in text.partition("="))
        if not (key and equals and listed):
            raise InvalidConfig(f"--over {text} names no values: write it as --over split.alpha=0.1,0.3,1")
        if key in ("method", "seed", "run.folder", "plugins"):
            cure = {"method": "--methods names the methods", "seed": "--seeds says how many seeds"}.get(key, "Choose another setting")
            raise InvalidConfig(f"--over cannot change {key} from run to run. {cure}", key=key)
        try:
            values = _values(listed)
        except (ValueError, TypeError):  # one of them is a bare word: the others stay what they are
            values = [value for word in listed.split(",") for value in _value_or_text(word.strip())]
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise InvalidConfig(f"--over {text} has {twice[0]} twice: write each value once", key=key)
        return cls(key, tuple(values))

    def change(self, value: str) -> str:
        return f"{self.key}={value}"

    def folder(self, value: str) -> str:
        """KEY=VALUE as a folder's name; a value that could not be one has a digest in its place."""
        shown = value.strip('"')
        plain = re.fullmatch(r"[\w.+-]{1,60}", shown, re.ASCII)
        return f"{self.key}={shown if plain else hashlib.blake2b(value.encode(), digest_size=6).hexdigest()}"


def _values(listed: str) -> list[str]:
    return [json.dumps(value, ensure_ascii=False) for value in tomllib.loads(f"values = [{listed}]")["values"]]


def _value_or_text(word: str) -> list[str]:
    try:
        return _values(word) or ['""']
    except (ValueError, TypeError):
        return [json.dumps(word, ensure_ascii=False)]


def plan(source: str, changes: Sequence[str], methods: Sequence[str], seeds: int, sweep: Sweep | None = None) -> list[PlannedRun]:
    """The runs, seed by seed: in runs/compare-SOURCE/METHOD-SEED, or in run.folder/METHOD-SEED; of a sweep in a folder for each value.
    Refuses before anything is run."""
    if sweep is None:
        return _plan(source, changes, methods, seeds)
    if sweep.key in [change.partition("=")[0].strip() for change in changes]:
        raise InvalidConfig(f"{sweep.key} is set and swept over. Leave one of them out", key=sweep.key)
    return [
        run
        for value in sweep.values
        for run in _plan(source, [*changes, sweep.change(value)], methods, seeds, sweep.folder(value), value.strip('"'))
    ]


def _plan(source: str, changes: Sequence[str], methods: Sequence[str], seeds: int, below: str = "", value: str = "") -> list[PlannedRun]:
    """below: a folder in that of the comparison; value: what a sweep has there."""
    if any(change.partition("=")[0].strip() == "method" for change in changes):
        raise InvalidConfig("method=… cannot be used in a comparison: --methods names the methods", key="method")
    if "" in methods:
        raise InvalidConfig("--methods has a name that is empty: write one comma between two names, such as --methods perfedsde,fedavg")
    twice = [method for method in methods if methods.count(method) > 1]
    if twice:
        raise InvalidConfig(f"--methods names {twice[0]} twice: write each method once, such as --methods perfedsde,fedavg")
    common = config.load(source, changes)
    for method in methods:
        METHODS[method]  # refuses what there is not
    _refuse_other_splits(own_settings(source, changes, methods), source)
    base = (Path(common.run.folder) if common.run.folder else Path("runs") / f"compare-{Path(source).stem}") / below
    runs = []
    for seed in range(common.seed, common.seed + seeds):
        for method in methods:
            folder = base / f"{method}-{seed}"
            own = [*changes, f"method={method}", f"seed={seed}", f"run.folder={json.dumps(str(folder), ensure_ascii=False)}"]
            runs.append(PlannedRun(method, seed, folder, command_for(source, own, folder), value))
    return runs


@dataclass(frozen=True)
class OwnSetting:
    """What a source says for one method alone ([when.METHOD]), where the first method has something else. Settings of methods themselves
    are none: no two methods share them."""

    method: str
    key: str
    value: Any
    first: str  # the method that is compared to
    usual: Any  # what that one has

    def __str__(self) -> str:
        return f"{self.method} ran with {self.key}={self.value}, {self.first} with {self.usual}"


def own_settings(source: str, changes: Sequence[str], methods: Sequence[str]) -> list[OwnSetting]:
    flat = {method: _flat(config.load(source, [*changes, f"method={method}"])) for method in methods}
    first, *others = methods
    named = set(METHODS)
    return [
        OwnSetting(method, key, value, first, flat[first][key])
        for method in others
        for key, value in flat[method].items()
        if value != flat[first][key] and key != "method" and key.partition(".")[0] not in named
    ]


def _refuse_other_splits(own: Sequence[OwnSetting], source: str) -> None:
    """Clients that hold other images under another method cannot be compared."""
    for one in own:
        if one.key.startswith("split."):
            what = f"{source} has {one.key}={one.usual} for {one.first} and {one.key}={one.value} for {one.method}"
            cure = f"Say which it is for all of them, such as {one.key}={one.value}"
            raise InvalidConfig(f"{what}, so their clients would hold different images. {cure}", key=one.key)


def command_for(source: str, changes: list[str], folder: Path) -> tuple[str, ...]:
    if not (folder / "config.toml").exists():
        return (*FEDLOOM, "run", source, *changes)
    try:
        saved = _flat(config.from_run(config.read_toml(folder / "config.toml"), trust_plugins=False))
    except UnusablePlugin as error:
        what = f"{folder} holds a run with another plugin, {error.facts['plugin']}"
        raise UnusableFolder(f"{what}. Choose another run.folder, or remove that one", folder=str(folder), key="plugins") from error
    except InvalidConfig as error:
        raise DamagedRun(f"{folder} holds a run that cannot be read ({error}). Choose another run.folder", folder=str(folder)) from error
    wanted = _flat(config.load(source, changes))
    for key, value in wanted.items():
        if saved[key] != value:
            what = f"{folder} holds a run with other settings: {key} is {saved[key]!r} there and {value!r} here"
            raise UnusableFolder(f"{what}. Choose another run.folder, or remove that one", folder=str(folder), key=key)
    return () if finished(folder) else (*FEDLOOM, "resume", str(folder))


def _flat(settings: Settings) -> dict[str, Any]:
    """key -> value of everything that decides a run's result; where it is kept does not, and paths are full ones, as a run saves them."""
    table = tomllib.loads(config.to_toml(config.map_paths(settings, lambda path: path and str(Path(path).absolute()))))
    flat = dict(_leaves(table))
    del flat["run.folder"]
    return flat


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of all settings in a table and in the tables in it."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def write_order(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Which method the others are compared with, for whoever looks at the folder later: the first."""
    methods = list(dict.fromkeys(run.method for run in runs))
    write_file(folder / ORDER, (json.dumps({"methods": methods}) + "\n").encode())


def common_folder(runs: Sequence[PlannedRun]) -> Path:
    """Of all runs of a comparison; a sweep has a folder for each value in it."""
    return runs[0].folder.parent.parent if runs[0].value else runs[0].folder.parent


def usual_jobs(settings: Settings) -> int:
    """As many processes as this one may use cores; one where they would share a GPU."""
    device = settings.components[settings.engine].device
    gpu = device == "mps" or (device != "cpu" and torch.cuda.is_available())
    return usable_cores() if settings.engine == "inline" and not gpu else 1  # the others take many cores for one run


# -- running ----------------------------------------------------------------------
@dataclass
class Child:
    """A run's process. Its output goes to files without a name: nothing blocks, however much it says."""

    run: PlannedRun
    jobs: int  # processes at a time
    output: Any = field(default_factory=TemporaryFile)
    errors: Any = field(default_factory=TemporaryFile)

    def __post_init__(self) -> None:
        threads = max(usable_cores() // self.jobs, 1)
        surroundings = {"OMP_NUM_THREADS": str(threads), **os.environ, AT_ONCE: str(self.jobs)}  # of threads the user's number wins
        self.process = subprocess.Popen(
            (*self.run.command, "--events"),
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.errors,
            env=surroundings,
            preexec_fn=_ends_with_parent() if sys.platform == "linux" else None,
        )

    def news(self) -> str:
        """The last it said about its progress."""
        events = map(Event.from_json, reversed(_written(self.output)))
        return next((event.sentence() for event in events if event), "")

    def failure(self) -> Failure | None:
        """Why it ended without a result, in its own words."""
        code = self.process.returncode
        if code == 0:
            return None
        last = next((line for line in reversed(_written(self.errors)) if line.strip()), "it said nothing")
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else last.removeprefix("fedloom: ")
        return Failure(self.run, 128 - code if code < 0 else code, killed)


def _ends_with_parent() -> Callable[[], None]:
    """For a new process: it is asked to end when this one is killed, so that the same command can go on with its run."""
    library = ctypes.CDLL(None)  # before the fork: little may be done after it
    return lambda: library.prctl(PARENT_DEATH, signal.SIGTERM) and None


def _written(file: Any) -> list[str]:
    """Lines so far, read without moving the place where the process writes."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace").splitlines()


def execute(runs: Sequence[PlannedRun], jobs: int, view: RunsView, minutes: float = math.inf) -> list[Failure]:
    """Bring all runs to their results, so many at a time, each in a process of its own. One that fails does not stop the others; leaving
    early stops them all. minutes: those that have no result then are stopped, and are failures that the same command goes on with."""
    waiting, until = _to_do(runs, view), time.monotonic() + 60 * minutes
    jobs = min(jobs, len(waiting)) or 1
    working: list[Child] = []
    failures: list[Failure] = []
    before = signal.signal(signal.SIGTERM, _leave)  # so that the processes are stopped then, too
    try:
        while (waiting or working) and time.monotonic() < until:
            while waiting and len(working) < jobs:
                run = waiting.pop(0)
                working.append(Child(run, jobs))
                view.begin(run.name)
            time.sleep(GLANCE_SECONDS)
            for child in list(working):
                view.news(child.run.name, child.news())
                if child.process.poll() is None:
                    continue
                working.remove(child)
                failure = child.failure() or _without_result(child.run)
                failures += [failure] if failure else []
                view.end(child.run.name, f"failed: {failure.reason}" if failure else outcome(child.run))
    finally:
        for child in working:  # a run may be stopped at any moment, and goes on from there
            child.process.terminate()
        for child in working:
            try:
                child.process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
        signal.signal(signal.SIGTERM, before)
    places = {run: "before it began" for run in waiting} | {child.run: child.news() for child in working}
    for run, place in places.items():
        reason = f"stopped after {minutes:g} minutes{', ' if place else ''}{place}. The same command goes on with it"
        failures += [] if finished(run.folder) else [Failure(run, Interrupted.exit_code, reason)]
        view.end(run.name, outcome(run) if finished(run.folder) else reason)
    return failures


def execute_side_by_side(runs: Sequence[PlannedRun], several: int, view: RunsView) -> list[Failure]:
    """The same in this process, ``several`` at a time; the next begins when one ends. Work that is done together fails for all of them."""
    waiting = _to_do(runs, view)
    failures: list[Failure] = []

    def one_after_the_other() -> None:
        while waiting:
            run = waiting.pop(0)
            view.begin(run.name)
            try:
                _bring_to_its_result(run, view)
                view.end(run.name, outcome(run))
            except Exception as error:  # the others go on
                code, reason = (error.exit_code, str(error)) if isinstance(error, FedloomError) else (1, f"{type(error).__name__}: {error}")
                failures.append(Failure(run, code, reason))
                view.end(run.name, f"failed: {reason}")

    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with sharing():
            answers([one_after_the_other] * min(several, len(waiting)))
    finally:
        signal.signal(signal.SIGTERM, before)
    return failures


def _bring_to_its_result(run: PlannedRun, view: RunsView) -> None:
    """What its command does in a process of its own."""
    events = Events(lambda event: view.news(run.name, event.sentence()))
    command, what, *changes = run.command[len(FEDLOOM) :]
    if command == "run":
        new_run(config.load(what, changes), run.folder, events)
    else:
        resume_run(run.folder, events)


def _to_do(runs: Sequence[PlannedRun], view: RunsView) -> list[PlannedRun]:
    for run in runs:
        if not run.command:
            view.end(run.name, f"finished before: {outcome(run)}")
    return [run for run in runs if run.command]


def _leave(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


# -- results ----------------------------------------------------------------------
def finished(folder: Path) -> dict[str, Any] | None:
    """The result of a finished run."""
    try:
        result = read_result(folder)
    except DamagedRun:
        return None
    return result if result and result["finished"] and result["clients"] else None


def result_of(run: PlannedRun) -> dict[str, Any]:
    result = finished(run.folder)
    if result is None:
        raise DamagedRun(f"{run.folder}/result.json is not the result of a finished run", folder=str(run.folder))
    return result


def _without_result(run: PlannedRun) -> Failure | None:
    """A run that ended well and left nothing that can be read. The others go on."""
    reason = f"it left no result that can be read. Remove {run.folder}, and the same command runs it again"
    return None if finished(run.folder) else Failure(run, DamagedRun.exit_code, reason)


def outcome(run: PlannedRun) -> str:
    result = result_of(run)
    return f"{result['accuracy']['mean']:.1%} ± {result['accuracy']['std']:.1%} over clients, {result['cost']['seconds']:.1f} s"


def collect(runs: Sequence[PlannedRun], failures: Sequence[Failure]) -> dict[str, dict[int, dict[str, Any]]]:
    """method -> seed -> result of all that have one; refused if methods had different splits at a seed."""
    failed = {failure.run for failure in failures}
    results: dict[str, dict[int, dict[str, Any]]] = {run.method: {} for run in runs}
    splits: dict[int, tuple[PlannedRun, bytes]] = {}
    for run in runs:
        if run in failed:
            continue
        results[run.method][run.seed] = result_of(run)
        try:
            split = read_plain(run.folder / "state" / "split.safetensors")
        except OSError as error:
            what = f"{run.folder}/state/split.safetensors cannot be read ({error.strerror})"
            raise DamagedRun(f"{what}. Remove {run.folder}, and the same command runs it again", folder=str(run.folder)) from error
        other, expected = splits.setdefault(run.seed, (run, split))
        if split != expected:
            raise DamagedRun(f"{other.folder} and {run.folder} have different splits, so their clients cannot be compared. Remove one")
    return results
