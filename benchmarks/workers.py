"""How much faster is a simulation with two workers (engine=processes, engine=ray) than in one process, and what does a task cost?

    python benchmarks/workers.py [--workers 2] [--repeats 3] [--set key=value]

Speed-up: the rounds of `quickstart` (PerFedSDE-NAS, all twelve clients in each) after the first, in which workers load what they need, and
without final participations; one thread per worker, against one process with one thread, in turn. The results are compared too: they
are equal. At least 1.7 is expected of two workers, on two cores that nothing else uses: the record says how busy they were before.
Overhead: a method whose clients answer at once, so that all there is to see is the engine: seconds per task, with an empty message and
with 25 MB that all tasks of a round share.
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
from fedloom.assemble import new_run
from fedloom.assemble.environment import environment
from fedloom.core.client_site import ClientMemory
from fedloom.core.hardware import Hardware
from fedloom.core.messages import TRAIN, Instruction, Report
from fedloom.core.method import Answer
from fedloom.engine.base import Link
from fedloom.engine.processes import ProcessesLink, worker_processes
from fedloom.engine.ray import RayLink, RaySettings, cluster, workers
from fedloom.engine.visit import Visited

RESULT = Path(__file__).parent / "results" / "workers.json"
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


def idle(link: Link, megabytes: int) -> float:
    """Seconds per task."""
    shared = {"w": np.zeros(megabytes * 250_000, np.float32)}
    asked = [Instruction(f"client-{number}", 0, TRAIN, 0, {"weights": shared}) for number in range(TASKS)]
    start = time.perf_counter()
    assert len(link.exchange(asked)) == TASKS
    return (time.perf_counter() - start) / TASKS


def nothing() -> Any:
    return Idle(), str


def seconds_per_task(count: int) -> dict[str, dict[str, float]]:
    def measured(link: Link) -> dict[str, float]:
        return {f"{size} MB": statistics.median(idle(link, size) for _ in range(5)) for size in (0, 25)}

    with worker_processes(count, nothing) as made:
        processes = measured(ProcessesLink(["client-0"], NoBooks(), made))  # type: ignore[arg-type]
    own = RaySettings(workers=count)
    with cluster(own, False), workers(own, False, nothing) as actors:
        return {"processes": processes, "ray": measured(RayLink(["client-0"], NoBooks(), actors))}  # type: ignore[arg-type]


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
    two = arguments.workers
    engines = {
        "inline": ["inline.threads=1"],
        "processes": ["engine=processes", f"processes.workers={two}"],
        "ray": ["engine=ray", f"ray.workers={two}"],
    }
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(arguments.repeats):
        found = {}
        for name, own in engines.items():
            seconds, found[name] = rounds([*own, *arguments.set])
            times[name].append(seconds)
            print(f"{name:9} {seconds:.2f} s", flush=True)
        assert found["inline"] == found["processes"] == found["ray"], found
    ratios = {name: [inline / own for inline, own in zip(times["inline"], times[name], strict=True)] for name in ("processes", "ray")}
    record = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(torch.device("cpu")),
        "cores": os.cpu_count(),
        "load_before": load,
        "workers": arguments.workers,
        "seconds_of_rounds": times,
        "speed_up": {
            name: {"median": statistics.median(found), "lowest": min(found), "highest": max(found)} for name, found in ratios.items()
        },
        "seconds_per_task": seconds_per_task(two),
    }
    print(json.dumps({name: record[name] for name in ("speed_up", "seconds_per_task")}, indent=2))
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
