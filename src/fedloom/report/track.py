"""A run as scalars by round for TensorBoard (extra ``track``), Weights & Biases or MLflow: nothing but what the ledger has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fedloom.config import RunSettings
from fedloom.core.errors import UnusableFormat
from fedloom.core.result import LedgerEntry, RunResult, mean_and_std
from fedloom.files import write_file

PROJECT = "fedloom"  # the group of runs at Weights & Biases and MLflow


class Sink(Protocol):
    """Where scalars go. That is all there is to a tracking service here."""

    def write(self, scalars: Sequence[tuple[str, float]], step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Files in tensorboard/ of the run folder. What was written after the last checkpoint does not count after a resume."""

    def __init__(self, folder: Path, first: int) -> None:
        self._writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"), purge_step=first)

    def write(self, scalars: Sequence[tuple[str, float]], step: int) -> None:
        for name, value in scalars:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Named after the run folder; a resumed run goes on in the same one."""

    def __init__(self, folder: Path, first: int) -> None:
        number = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
        self._run: Any = import_module("wandb").init(project=PROJECT, name=folder.name, id=number, resume="allow", dir=str(folder))

    def write(self, scalars: Sequence[tuple[str, float]], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Named after the run folder; the service's own number of the run is kept there, so that a resume finds it."""

    def __init__(self, folder: Path, first: int) -> None:
        self._mlflow: Any = import_module("mlflow")
        note = folder / "mlflow.txt"
        self._mlflow.set_experiment(PROJECT)
        known = {"run_id": note.read_text().strip()} if note.exists() else {"run_name": folder.name}
        write_file(note, self._mlflow.start_run(**known).info.run_id.encode())

    def write(self, scalars: Sequence[tuple[str, float]], step: int) -> None:
        self._mlflow.log_metrics(dict(scalars), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


# name -> its package, what installs it, and the sink that is made of the run folder and the first round to come
SINKS: dict[str, tuple[str, str, Callable[[Path, int], Sink]]] = {
    "tensorboard": ("torch.utils.tensorboard", "'fedloom[track]'", TensorBoard),
    "wandb": ("wandb", "wandb", WandB),
    "mlflow": ("mlflow", "mlflow", MLflow),
}


def trackers(settings: RunSettings, folder: Path) -> list[Tracker]:
    """The watcher that the settings ask for, if they do."""
    return [Tracker(settings.tracker, folder)] if settings.track else []


class Tracker:
    """Watches a run and hands scalars to a sink, round by round."""

    def __init__(self, name: str, folder: Path) -> None:
        package, install, sink = SINKS[name]
        try:
            import_module(package)
        except ImportError as error:
            cure = f"Install it with: pip install {install}, or set run.track=false"
            raise UnusableFormat(f"run.track needs the package {name}, which is not installed here. {cure}") from error
        self._make, self._folder = sink, folder
        self._sink: Sink | None = None
        self._finals: list[LedgerEntry] = []

    def begin(self, rounds: int, clients: int, rounds_done: int, clients_done: int) -> None:
        self._sink = self._make(self._folder, rounds_done + 1)

    def stage(self, client: str, stage: str) -> None: ...

    def participation(self, entry: LedgerEntry) -> None:
        if entry.final:
            self._finals.append(entry)

    def round_done(self, round: int, entries: Sequence[LedgerEntry]) -> None:
        assert self._sink is not None
        self._sink.write(_scalars(entries), round)

    def end(self, result: RunResult) -> None:
        assert self._sink is not None
        self._sink.write([(f"personal models/{name}", value) for name, value in _scalars(self._finals)], result.rounds)
        self._sink.close()


def _scalars(entries: Sequence[LedgerEntry]) -> list[tuple[str, float]]:
    """Name and value of what several participations have in common."""
    found = []
    for kind in ("test", "validation"):
        known = [value for entry in entries if (value := getattr(entry, f"{kind}_accuracy")) is not None]
        for what, value in zip(("mean", "spread"), mean_and_std(known), strict=True):
            if value is not None:
                found.append((f"accuracy/{kind} {what}", value))
    stages = sorted({stage for entry in entries for stage in entry.seconds})
    found += [(f"seconds/{stage}", sum(entry.seconds.get(stage, 0.0) for entry in entries)) for stage in stages]
    found += [(f"megabytes/{way}", sum(getattr(entry, f"bytes_{way}") for entry in entries) / 1e6) for way in ("up", "down")]
    for note in sorted({name for entry in entries for name in entry.notes}):
        values = [entry.notes[note] for entry in entries if note in entry.notes]
        found.append((f"notes/{note}", sum(values) / len(values)))
    return found


class Several:
    """Several watchers as one."""

    def __init__(self, watchers: Sequence[Any]) -> None:
        self._watchers = watchers

    def begin(self, *facts: Any) -> None:
        self._tell("begin", *facts)

    def stage(self, *facts: Any) -> None:
        self._tell("stage", *facts)

    def participation(self, *facts: Any) -> None:
        self._tell("participation", *facts)

    def round_done(self, *facts: Any) -> None:
        self._tell("round_done", *facts)

    def end(self, *facts: Any) -> None:
        self._tell("end", *facts)

    def _tell(self, what: str, *facts: Any) -> None:
        for watcher in self._watchers:
            getattr(watcher, what)(*facts)
