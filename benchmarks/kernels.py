"""Where do a training step and a score spend their time? The kernels that take most of it, in a preset's own network.

    python benchmarks/kernels.py [cifar10-paper] [key=value…] [--device cuda] [--top 12] [--out FILE]

Random images of 32 pixels; a step is a batch of the preset through a random subnet of an archive of ten, forward, backward and update; a
score is 100 images after calibration. Both run as in a long run (`training.execution`), captured steps included. Milliseconds a step or
score: of the clock, of all kernels together, and of the kernels that took most. On a GPU the clock above the kernels' sum is the time in
which the GPU waits for Python.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from fedloom import config
from fedloom.assemble.environment import environment, usable_device
from fedloom.core.client_site import Examples
from fedloom.core.seeds import rng
from fedloom.files import write_file
from fedloom.spaces.base import ImageShape
from fedloom.supernets.base import make_supernet
from fedloom.training.graphs import WORTH_A_GRAPH
from fedloom.training.local import Trainer, one_of
from fedloom.training.pixels import Pixels
from fedloom.training.scoring import Scorer

IMAGE = ImageShape(3, 32, 10)
PIXELS = Pixels((0.5,) * 3, (0.25,) * 3)
STEPS, SCORED, IMAGES = {"cpu": 2, "cuda": 40}, {"cpu": 2, "cuda": 20}, 100
LONGEST = 100  # characters of a kernel's name
ARCHIVE = 10  # architectures that steps draw from


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="cifar10-paper")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--top", type=int, default=12)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = usable_device(arguments.device, "--device")
    settings = config.load(arguments.preset, arguments.overrides)
    supernet = make_supernet(settings.space, settings.components[settings.space], IMAGE)
    weights = {name: tensor.to(device) for name, tensor in supernet.initial(0).items()}
    recipe, draw = settings.training, rng("benchmark")
    steps, count = STEPS[device.type], SCORED[device.type]
    subnets = [supernet.space.sample(draw) for _ in range(max(count, ARCHIVE))]
    trainer, scorer = Trainer(supernet, recipe, PIXELS), Scorer(supernet, recipe, PIXELS)

    def some(images: int) -> Examples:
        generator = torch.Generator().manual_seed(images)
        pixels = torch.randint(0, 256, (images, IMAGE.channels, IMAGE.size, IMAGE.size), generator=generator, dtype=torch.uint8)
        return Examples(pixels.to(device), torch.randint(0, IMAGE.classes, (images,), generator=generator).to(device))

    trained, scored, calibrating = some(steps * recipe.batch), some(IMAGES), some(recipe.calibration)

    def train() -> None:
        trainer.train_supernet(weights, one_of(subnets[:ARCHIVE]), trained, [0.01], np.random.default_rng(0))

    def score() -> None:
        scorer.score_subnets(weights, subnets[:count], scored, calibrating)

    record: dict[str, Any] = {
        "command": " ".join(["python benchmarks/kernels.py", arguments.preset, *arguments.overrides]),
        "step": spent(train, steps, device, arguments.top),
        "score": spent(score, count, device, arguments.top),
        "environment": environment(device),
    }
    for job in ("step", "score"):
        found = record[job]
        print(f"{job}: {found['clock']:.2f} ms by the clock, {found['kernels']:.2f} ms in kernels")
        for name, (milliseconds, calls) in found["most"].items():
            print(f"  {milliseconds:8.3f} ms  {calls:7.1f} calls  {name}")
    if arguments.out:
        write_file(arguments.out, (json.dumps(record, indent=1) + "\n").encode())


def spent(work: Callable[[], None], parts: int, device: torch.device, top: int) -> dict[str, Any]:
    """Milliseconds of each of ``parts`` equal parts of the work: by the clock, in kernels, and {kernel: (milliseconds, calls)}."""

    def finished() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(-(-WORTH_A_GRAPH // parts) + 1):  # warm, and captured where that is worth it
        finished()
    start = time.perf_counter()
    finished()
    clock = 1000 * (time.perf_counter() - start) / parts
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        finished()
    took: dict[str, np.ndarray] = {}
    for row in seen.key_averages():
        used = (row.self_device_time_total if on_gpu else row.self_cpu_time_total) / 1000
        took[short(row.key)] = took.get(short(row.key), np.zeros(2)) + np.array([used, row.count]) / parts
    most = sorted(took.items(), key=lambda entry: -entry[1][0])[:top]
    total = float(sum(milliseconds for milliseconds, _ in took.values()))
    return {"clock": clock, "kernels": total, "most": {name: both.tolist() for name, both in most}}


def short(kernel: str) -> str:
    """A kernel's name without its namespaces and the types of its arguments, which can take a thousand characters."""
    plain = kernel.removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    return plain.partition("(")[0][:LONGEST]


if __name__ == "__main__":
    main()
