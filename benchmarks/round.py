"""Seconds a round of a preset takes, by stage, against reference mode in the same run, and the peak of GPU memory.

    python benchmarks/round.py cifar10-paper [space=darts …] [--rounds 5] [--reference 1] [--synthetic] [--kernels] [--name NAME]

The first round warms up: steps are captured and kernels built. --synthetic: random images, as many and as large as CIFAR-10's.
--kernels: which GPU kernels and which Python functions one further round spends its time in. --name: of the record in benchmarks/results.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pickle
import pstats
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from fedloom import config
from fedloom.assemble import new_run
from fedloom.assemble.environment import environment
from fedloom.core.result import LedgerEntry, RunResult

RESULTS = Path(__file__).parent / "results"


class Enough(Exception):
    """Ends a run after its last measured round."""


@dataclass
class Rounds:
    """Watches a run for some rounds. inside: of the last one, a profiler."""

    wanted: int
    last: Any = None
    seconds: list[float] = field(default_factory=list)
    stages: list[Counter[str]] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)

    def begin(self, rounds: int, clients: int, rounds_done: int, clients_done: int) -> None:
        self._start()

    def _start(self) -> None:
        if self.last is not None and len(self.seconds) == self.wanted - 1:
            self.last.__enter__()
        self._clock = time.perf_counter()

    def stage(self, client: str, stage: str) -> None: ...
    def participation(self, entry: LedgerEntry) -> None: ...
    def end(self, result: RunResult) -> None: ...

    def round_done(self, round: int, entries: Sequence[LedgerEntry]) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._clock)
        stages: Counter[str] = Counter()
        for entry in entries:
            stages.update(entry.seconds)
        self.stages.append(stages)
        tested = [entry.test_accuracy for entry in entries if entry.test_accuracy is not None]
        self.accuracy.append(sum(tested) / max(1, len(tested)))
        print(f"round {round}: {self.seconds[-1]:.3f} s, accuracy {self.accuracy[-1]:.1%}", flush=True)
        if len(self.seconds) == self.wanted:
            if self.last is not None:
                self.last.__exit__(None, None, None)
            raise Enough
        self._start()


def synthetic(folder: Path) -> None:
    """CIFAR-10's files with random images, of a colour that tells their class: all engines can read them."""
    draw, place = np.random.default_rng(0), folder / "cifar-10-batches-py"
    place.mkdir(parents=True)
    (place / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = np.arange(10_000) % 10
        images = draw.integers(0, 200, (10_000, 3072)) + 5 * labels[:, None]
        (place / name).write_bytes(pickle.dumps({"data": images.astype(np.uint8), "labels": labels.tolist()}))


def measured(source: str, changes: list[str], rounds: Rounds, folder: Path) -> Rounds:
    settings = config.load(source, changes)
    with suppress(Enough):
        new_run(settings, folder, rounds)
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("changes", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reference", type=int, default=1)
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--name")
    arguments = parser.parse_intermixed_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with TemporaryDirectory() as folder:
        if arguments.synthetic:
            synthetic(Path(folder) / "data")
            arguments.changes.append(f"data.folder={folder}/data")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        fast = measured(arguments.source, arguments.changes, Rounds(arguments.rounds + 1), Path(folder) / "fast")
        peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
        slow = None
        if arguments.reference:
            changes = [*arguments.changes, "engine=inline", "inline.reference=true"]
            slow = measured(arguments.source, changes, Rounds(arguments.reference), Path(folder) / "reference")
        if arguments.kernels:
            with_kernels(arguments.source, arguments.changes, Path(folder))
    seconds = median(fast.seconds[1:])
    stages = {name: round(median(one[name] for one in fast.stages[1:]), 4) for name in fast.stages[-1]}
    record = {
        "command": " ".join(["python", *sys.argv]),
        "seconds_a_round": round(seconds, 4),
        "seconds": [round(one, 4) for one in fast.seconds],
        "warm_up": round(fast.seconds[0] - seconds, 2),
        "stages": stages,
        "other": round(seconds - sum(stages.values()), 4),
        "peak_gpu_gb": round(peak, 2),
        "accuracy": fast.accuracy,
        "reference": None if slow is None else {"seconds": slow.seconds, "stages": dict(slow.stages[-1]), "accuracy": slow.accuracy},
        "ratio": None if slow is None else round(min(slow.seconds) / seconds, 2),
        "environment": environment(device),
    }
    print(json.dumps(record, indent=1))
    if arguments.name:
        (RESULTS / f"{arguments.name}.json").write_text(json.dumps(record, indent=1) + "\n")


def with_kernels(source: str, changes: list[str], folder: Path) -> None:
    python = cProfile.Profile()
    measured(source, changes, Rounds(3, python), folder / "python")
    for order, most in (("tottime", 30), ("cumtime", 80)):
        pstats.Stats(python).sort_stats(order).print_stats(most)
    if torch.cuda.is_available():
        gpu = profile(activities=[ProfilerActivity.CUDA])
        measured(source, changes, Rounds(3, gpu), folder / "kernels")
        print(gpu.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70))


if __name__ == "__main__":
    main()
