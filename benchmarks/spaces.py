"""How long do a training step and the scoring of an architecture take, sliced and masked, in every search space?

    python benchmarks/spaces.py [--spaces darts nasvit] [--devices cpu cuda] [--repeats 5]

Random images of 32 pixels, ten classes, each space's default instance, through the trainer and the scorer that methods use. A
training step is 50 images through one random subnet, forward, backward and update; a score is 100 images after calibration on
another 100. Sliced and masked take turns within one process. Masked steps on a GPU replay a captured CUDA graph, as in a long run;
the first call, with the capture, is timed apart. Medians in milliseconds.
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

from fedloom import config
from fedloom.assemble.environment import environment
from fedloom.core.client_site import Examples
from fedloom.core.seeds import rng
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import make_supernet
from fedloom.training import graphs
from fedloom.training.local import Trainer, one_of
from fedloom.training.pixels import Pixels
from fedloom.training.recipe import TrainingSettings
from fedloom.training.scoring import Scorer

RESULTS = Path(__file__).parent / "results"
IMAGE = ImageShape(3, 32, 10)
PIXELS = Pixels((0.5,) * 3, (0.25,) * 3)
BATCH, SCORED = 50, 100  # images
WORK = {"cpu": (2, 2), "cuda": (20, 40)}  # training steps, architectures scored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spaces", nargs="+", default=list(SPACES))
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for device in arguments.devices:
        for name in arguments.spaces:
            record = {
                "command": f"python benchmarks/spaces.py --spaces {name} --devices {device} --repeats {arguments.repeats}",
                "milliseconds": measured(name, torch.device(device), arguments.repeats),
                "environment": environment(torch.device(device)),
            }
            (arguments.out / f"spaces-{name}-{device}.json").write_text(json.dumps(record, indent=2) + "\n")


def measured(name: str, device: torch.device, repeats: int) -> dict[str, dict[str, float]]:
    supernet = make_supernet(name, config.load(None, [f"space={name}"]).components[name], IMAGE)
    weights = {key: tensor.to(device) for key, tensor in supernet.initial(0).items()}
    steps, count = WORK[device.type]
    draw = rng("benchmark")
    architectures = [supernet.space.sample(draw) for _ in range(count)]
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (max(steps * BATCH, SCORED), 3, IMAGE.size, IMAGE.size), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, IMAGE.classes, (len(images),), generator=generator)
    examples = Examples(images.to(device), labels.to(device))
    few = Examples(examples.images[:SCORED], examples.labels[:SCORED])
    graphs.WORTH_A_GRAPH = 1
    jobs: dict[str, Callable[[], Any]] = {}
    for execution in ("sliced", "masked"):
        settings = replace(TrainingSettings(), batch=BATCH, calibration=SCORED, execution=execution)
        trainer, scorer = Trainer(supernet, settings, PIXELS), Scorer(supernet, settings, PIXELS)
        jobs[f"step {execution}"] = (
            lambda trainer=trainer: trainer.train_supernet(  # type: ignore[misc]
                weights, one_of(architectures[:10]), examples, [0.01], np.random.default_rng(0)
            )
        )
        jobs[f"score {execution}"] = lambda scorer=scorer: scorer.score_subnets(weights, architectures, few, few)  # type: ignore[misc]
    times: dict[str, list[float]] = {job: [] for job in jobs}
    for _ in range(repeats + 1):  # the first warms up and captures
        for job, work in jobs.items():
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[job].append(1000 * (time.perf_counter() - start) / (steps if job.startswith("step") else count))
    found = {job: {"first": values[0], "median": statistics.median(values[1:])} for job, values in times.items()}
    for job, value in found.items():
        print(f"{device.type:5} {name:12} {job:13} {value['median']:9.2f} ms (first call {value['first']:.1f} ms each)", flush=True)
    return found


if __name__ == "__main__":
    main()
