"""How much faster do networks train in one stack than one by one?

    python benchmarks/stacked.py [--spaces mobilenetv3 nasvit darts] [--networks 1 5 20] [--device cuda] [--steps 30] [--repeats 3]

Random images of 32 pixels, ten classes, batches of 50, each space's default instance. Jobs: *fixed*, networks of one architecture (medium),
as in FedAvg and fine-tuning; *different*, a random architecture each; *supernet*, subnets drawn step by step. Ways: *alone*, one
network after the other as in reference mode; *stacked*, all of them in one step. They take turns within one process, and the
first turn warms up: on a GPU it captures the step. Milliseconds are those of a step of one client, medians; the ratio is alone to stacked.
On a CPU it is the process's own time. Peaks of GPU memory are in MB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from spaces import IMAGE, PIXELS, RESULTS

from fedloom import config
from fedloom.assemble.environment import environment
from fedloom.core.client_site import Examples
from fedloom.core.seeds import rng
from fedloom.spaces.base import SPACES
from fedloom.supernets.base import Supernet, make_supernet
from fedloom.training.local import NetworkJob, SupernetJob, Trainer, one_of
from fedloom.training.recipe import TrainingSettings

BATCH = 50
PLAIN = replace(TrainingSettings(), batch=BATCH, crop=0, flip=False, cutout=0)
WAYS = {"alone": "reference", "stacked": "masked"}  # their executions
JOBS = ("fixed", "different", "supernet")
Work = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spaces", nargs="+", default=list(SPACES))
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--networks", nargs="+", type=int, default=[1, 5, 20])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", choices=("auto", "full"), default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    device = torch.device(given.device)
    for name in given.spaces:
        supernet = make_supernet(name, config.load(None, [f"space={name}"]).components[name], IMAGE)
        counts = f"--networks {' '.join(map(str, given.networks))} --steps {given.steps} --repeats {given.repeats}"
        options = f"--jobs {' '.join(given.jobs)} --device {device.type} --precision {given.precision}"
        record: dict[str, Any] = {"command": f"python benchmarks/stacked.py --spaces {name} {options} {counts}"}
        for job in given.jobs:
            for networks in given.networks:
                ways = works(supernet, job, networks, device, given.steps, given.precision)
                found = measured(ways, device, networks * given.steps, given.repeats)
                print(f"{device.type:5} {name:12} {job:10} {networks:3} {json.dumps(found)}", flush=True)
                record.setdefault(job, {})[networks] = found
        record |= {"threads": torch.get_num_threads(), "environment": environment(device)}
        (given.out / f"stacked-{name}-{device.type}.json").write_text(json.dumps(record, indent=2) + "\n")


def works(supernet: Supernet[Any], job: str, networks: int, device: torch.device, steps: int, precision: str) -> dict[str, Work]:
    """What each way has to do: all networks, one pass over as many images as their steps need."""
    space, draw = supernet.space, rng("benchmark")
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (steps * BATCH, IMAGE.channels, IMAGE.size, IMAGE.size), generator=generator, dtype=torch.uint8)
    examples = Examples(images.to(device), torch.randint(0, IMAGE.classes, (len(images),), generator=generator).to(device))
    weights = {name: tensor.to(device) for name, tensor in supernet.initial(0).items()}
    architectures = [space.named["medium"] if job == "fixed" else space.sample(draw) for _ in range(networks)]
    plains = [supernet.plain(weights, architecture) for architecture in architectures]

    def of(way: str) -> Work:
        trainer = Trainer(supernet, replace(PLAIN, execution=WAYS[way], precision=precision), PIXELS)

        def work() -> object:
            if job == "supernet":
                subnets = one_of(architectures)
                return trainer._train_supernets([SupernetJob(weights, subnets, examples, [0.01], turns(n)) for n in range(networks)])
            return trainer.train_networks(
                [
                    NetworkJob(plain, one, examples, [0.01], turns(n))
                    for n, (plain, one) in enumerate(zip(plains, architectures, strict=True))
                ]
            )

        return work

    return {way: of(way) for way in WAYS}


def turns(network: int) -> np.random.Generator:
    return np.random.default_rng(network)


def measured(ways: dict[str, Work], device: torch.device, steps: int, repeats: int) -> dict[str, Any]:
    """steps: of all networks together."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, float] = {}
    for _ in range(1 + repeats):
        for way, work in ways.items():
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            start = clock()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
                peaks[way] = round(torch.cuda.max_memory_allocated() / 1e6)
            times[way].append(1000 * (clock() - start) / steps)
    medians = {way: statistics.median(values[1:]) for way, values in times.items()}
    return {
        "milliseconds": {way: round(value, 3) for way, value in medians.items()},
        "first": {way: round(values[0], 3) for way, values in times.items()},
        "ratio": round(medians["alone"] / medians["stacked"], 2),
        **({"peak_mb": peaks} if peaks else {}),
    }


if __name__ == "__main__":
    main()
