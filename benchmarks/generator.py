"""How long do 100 guided architectures take: with the fast sampler, with 1000 steps of the same network, with 1000 of the papers'?

    python benchmarks/generator.py [mobilenetv3] [--devices cpu cuda] [--threads 1 2] [--repeats 5] [--papers-steps 20]

All take turns within one process. The images are random, 20 of each of ten classes; the condition is what they are turned into, once
per client and participation, and is timed alone and together with a draw. The fast model is the shipped one; the papers' network has
its published size and random weights, which take as long as trained ones. Of its 1000 steps 20 are timed on a CPU and multiplied
("extrapolated"; before its first step nothing takes long), all of them on a GPU. Medians in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom import config
from fedloom.assemble.environment import environment
from fedloom.core.seeds import rng
from fedloom.generator.files import load_generator
from fedloom.generator.generator import REFERENCE_STEPS, STEPS, AnyGenerator
from fedloom.generator.paper.generator import PaperGenerator
from fedloom.spaces.base import ImageShape
from fedloom.supernets.base import make_supernet

RESULTS = Path(__file__).parent / "results"
COUNT = 100  # architectures
CLASSES, IMAGES, SIDE = 10, 20, 32  # of the random data set
FAST, SAME, PAPERS = "fast sampler", "1000 steps of the same network", "1000 steps of the papers' network"
TIMED = {"cpu": 20, "cuda": REFERENCE_STEPS}  # steps of the papers' network
LONG_REPEATS = {"cpu": {SAME: 1, PAPERS: 3}, "cuda": {SAME: 3, PAPERS: 3}}  # of what takes long; 1 is without a first one to warm up


def random_images(device: torch.device) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (CLASSES * IMAGES, 3, SIDE, SIDE), generator=draw, dtype=torch.uint8)
    return images.to(device), torch.arange(CLASSES, device=device).repeat(IMAGES)


def papers_network(fast: AnyGenerator, features: int) -> PaperGenerator:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        networks = PaperGenerator.networks(fast.tokens, {"paper": {}}, features)
    score, predictor = (network.to(fast.device).eval().requires_grad_(False) for network in networks if network is not None)
    return PaperGenerator(fast.tokens, score, predictor, fast.extractor)


def measured(space_name: str, device: torch.device, repeats: int, timed: int) -> dict[str, Any]:
    space = make_supernet(space_name, config.load(None, [f"space={space_name}"]).components[space_name], ImageShape(3, 32, 10)).space
    fast = load_generator(space, "", "", device)
    assert fast.extractor is not None, "this space has no predictor, so there is nothing to guide with"
    same, papers = fast.sampled_by("sde"), papers_network(fast, fast.extractor.size).sampled_by("sde", timed)
    images, labels = random_images(device)
    task, papers_task = fast.task(images, labels), papers.task(images, labels)
    jobs: dict[str, Callable[[], Any]] = {
        FAST: lambda: fast.draw(COUNT, rng("time"), task),
        "condition": lambda: fast.task(images, labels),
        "condition and fast sampler": lambda: fast.draw(COUNT, rng("time"), fast.task(images, labels)),
        SAME: lambda: same.draw(COUNT, rng("time"), task),
        PAPERS: lambda: papers.draw(COUNT, rng("time"), papers_task),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    most = LONG_REPEATS[device.type]
    for repeat in range(repeats + 1):  # the first warms up
        for name, job in jobs.items():
            if repeat > most.get(name, repeats) or (repeat == 0 and most.get(name) == 1):
                continue
            finished(device)
            start = time.perf_counter()
            job()
            finished(device)
            if repeat:
                times[name].append(time.perf_counter() - start)
    found: dict[str, Any] = {}
    for name, values in times.items():
        factor = REFERENCE_STEPS / timed if name == PAPERS else 1
        found[name] = {"median": factor * statistics.median(values), "shortest": factor * min(values), "repeats": len(values)}
    found[PAPERS] |= {"steps_timed": timed, "extrapolated": timed != REFERENCE_STEPS}
    found["times faster than"] = {name: found[name]["median"] / found[FAST]["median"] for name in (SAME, PAPERS)}
    return found


def finished(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("space", nargs="?", default="mobilenetv3")
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="of the CPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--papers-steps", type=int, default=0, help="how many of the 1000 steps of the papers' network to time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for name in arguments.devices:
        device, timed, seconds = torch.device(name), arguments.papers_steps or TIMED[name], {}
        load, made_by = os.getloadavg()[0], environment(device)  # of the code that is loaded now
        for threads in arguments.threads if name == "cpu" else arguments.threads[-1:]:
            torch.set_num_threads(threads)
            key = f"{threads} threads" if name == "cpu" else torch.cuda.get_device_name(device)
            seconds[key] = measured(arguments.space, device, arguments.repeats, timed)
            print(key, json.dumps(seconds[key], indent=2), flush=True)
        record = {
            "command": f"python benchmarks/generator.py {arguments.space} --devices {name} --repeats {arguments.repeats}",
            "architectures": COUNT,
            "steps_of_the_fast_sampler": STEPS,
            "seconds": seconds,
            "load_average_at_start": load,
            "cores": os.cpu_count(),
            "environment": made_by,
        }
        (arguments.out / f"generator-{arguments.space}-{name}.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
