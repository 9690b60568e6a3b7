"""How much faster is a simulation with two Ray workers than in one process, and what does a task cost?

    python benchmarks/ray.py [--workers 2] [--repeats 3] [--set key=value]

Speed-up: the rounds of `quickstart` (PerFedSDE-NAS, all twelve clients in each) after the first, in which workers load what they need, and
without final participations; one thread per worker, against one process with one thread, in turn. The results are compared too: they
are equal. At least 1.7 is expected of two workers, on two cores that nothing else uses: the record says how busy they were before.
Overhead: a method whose clients answer at once, so that all there is to see is Ray: seconds per task, with an empty message and with
25 MB that all tasks of a round share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom import config
from fedloom.assemble import environment, new_run
from fedloom.core.client_site import ClientMemory
from fedloom.core.hardware import Hardware
from fedloom.core.messages import TRAIN, Instruction, Report
from fedloom.core.method import Answer
from fedloom.engine.ray import RayLink, RaySettings, cluster, workers
from fedloom.engine.visit import Visited

RESULT = Path(__file__).parent / "results" / "ray.json"
SETTINGS = ["participants=12", "rounds=4", "training.finetune_epochs=0"]
TASKS = 40  # in a round of the method that does nothing


class Watch:
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def round_done(self, *facts: object) -> None:
        self.ends.append(time.perf_counter())

    def begin(self, *facts: object) -> None: ...
    def stage(self, client: str, stage: str) -> None: ...

    def participation(self, entry: object) -> None: ...
    def end(self, result: object) -> None: ...


class Idle:
    """A method whose clients answer at once."""

    uploads: dict[str, Any] = {}  # noqa: RUF012

    def answer(self, instruction: Instruction, site: object) -> Answer:
        return Answer(Report(instruction.client, instruction.round))


class NoBooks:
    def before(self, instruction: Instruction) -> tuple[ClientMemory, Hardware]:
        return ClientMemory(), Hardware()

    def keep(self, instruction: Instruction, visited: Visited) -> Report:
        return visited.answer.report


def rounds(overrides: list[str]) -> tuple[float, dict[str, Any]]:
    """Seconds of all rounds but the first, and the accuracies."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        result = new_run(config.load("quickstart", [*SETTINGS, *overrides]), Path(folder) / "run", watch)  # type: ignore[arg-type]
    return watch.ends[-1] - watch.ends[0], json.loads(result.to_json())["accuracy"]


def idle(link: RayLink, megabytes: int) -> float:
    """Seconds per task."""
    shared = {"w": np.zeros(megabytes * 250_000, np.float32)}
    asked = [Instruction(f"client-{number}", 0, TRAIN, 0, {"weights": shared}) for number in range(TASKS)]
    start = time.perf_counter()
    assert len(link.exchange(asked)) == TASKS
    return (time.perf_counter() - start) / TASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="key=value")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]  # of the last minute
    if load > 0.5:
        print(f"The machine is busy (load {load:.1f}): what is measured now says little about two free cores", flush=True)
    sys.path = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]  # ray is not this file
    engines = {"inline": ["inline.threads=1"], "ray": ["engine=ray", f"ray.workers={arguments.workers}"]}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(arguments.repeats):
        found = {}
        for name, own in engines.items():
            seconds, found[name] = rounds([*own, *arguments.set])
            times[name].append(seconds)
            print(f"{name:7} {seconds:.2f} s", flush=True)
        assert found["inline"] == found["ray"], found
    own = RaySettings(workers=arguments.workers)
    with cluster(own, False), workers(own, False, lambda: (Idle(), lambda name: None)) as made:  # type: ignore[arg-type, return-value]
        link = RayLink(["client-0"], NoBooks(), made)  # type: ignore[arg-type]
        tasks = {f"{size} MB": statistics.median(idle(link, size) for _ in range(5)) for size in (0, 25)}
    ratios = [inline / ray for inline, ray in zip(times["inline"], times["ray"], strict=True)]
    record = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(torch.device("cpu")),
        "cores": os.cpu_count(),
        "load_before": load,
        "workers": arguments.workers,
        "seconds_of_rounds": times,
        "speed_up": {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)},
        "seconds_per_task": tasks,
    }
    print(json.dumps({name: record[name] for name in ("speed_up", "seconds_per_task")}, indent=2))
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
