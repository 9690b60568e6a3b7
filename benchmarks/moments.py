"""How exact are means and variances of normalisation layers on a CPU, and what does exactness cost?

    python benchmarks/moments.py [--repeats 40] [--out FILE]

Alone: several ways to compute them from random activations with channels last, of means near zero and far from it. Errors against
float64 in roundings (2^-24), root mean square over channels: of the mean relative to the size of activations, of the variance relative
to itself. Times are processor times of one thread, which other work on the machine disturbs least; microseconds are medians.
Within networks: a training step and a score, with the library's moments (as they were before), with ours, and with ours in short sums of
a training step as well (`SHORT` = 0). All take turns within one process; medians in milliseconds, and of the ratio to the library's.
Gradients of the whole network: how far from those in float64, relative to their length; median over subnets.

Last result (two shared CPU cores, one thread, torch 2.13, 40 repeats, benchmarks/results/moments-cpu.json): the library's variances are
off by 2 to 350 roundings where channels lie last, ours by about half a rounding. A step of the quickstart takes 1.7 % (MobileNetV3),
2.0 % (DARTS) and 1.8 % (NASViT) longer, a score 1.0 % longer, 3.6 % less and 0.5 % longer, which is noise. Exact short sums as well
would cost 15, 6 and 8 % of a step, so they keep the library's moments.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom import config
from fedloom.assemble.environment import environment
from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples
from fedloom.core.seeds import rng
from fedloom.files import write_file
from fedloom.spaces.base import ImageShape
from fedloom.supernets import elastic
from fedloom.supernets.base import make_supernet
from fedloom.training.local import Trainer, one_of
from fedloom.training.pixels import Pixels
from fedloom.training.scoring import Scorer

RESULT = Path(__file__).parent / "results" / "moments-cpu.json"
SHAPES = [(16, 40, 2), (16, 40, 4), (16, 16, 8), (50, 200, 2), (500, 24, 2), (100, 48, 8), (50, 100, 16), (500, 24, 16), (50, 16, 32)]
ROUNDING = 2.0**-24
NUMBERS = 2e7  # seen by each way at each shape while it is timed
Moments = tuple[Tensor, Tensor]

QUICK = ["space=mobilenetv3"], ["space=darts"], ["space=nasvit"]
LARGE = ["mobilenetv3.width=1.0", "mobilenetv3.strides=[2,2,2,1,2]", "training.batch=50", "training.calibration=100"]
NETWORKS = {  # what is laid over quickstart, images, and how many of them a score is of
    **{f"quickstart {overrides[0]}": (overrides, ImageShape(1, 8, 10), 30) for overrides in QUICK},
    "32 pixels, mobilenetv3": (LARGE, ImageShape(3, 32, 10), 100),
}
SUBNETS = 4


def library(x: Tensor, mask: Tensor | None = None) -> Moments:
    """As training mode computes them, in whatever layout they come."""
    mean, variance = x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
    F.batch_norm(x, mean, variance, training=True, momentum=1.0)
    pixels = x.numel() // x.shape[1]
    return mean, variance * ((pixels - 1) / pixels)


def var_mean(x: Tensor) -> Moments:
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return mean, variance


def two_passes(x: Tensor) -> Moments:
    mean = x.mean((0, 2, 3))
    return mean, (x - mean[:, None, None]).square_().mean((0, 2, 3))


def matrix_product(x: Tensor) -> Moments:
    pixels = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    ones = torch.full((len(pixels),), 1 / len(pixels))
    mean = ones @ pixels
    return mean, ones @ (pixels - mean).square_()


def double(x: Tensor) -> Moments:
    mean, variance = torch.batch_norm_update_stats(x.double(), None, None, 0.0)
    return mean.float(), variance.float()


WAYS: dict[str, Callable[[Tensor], Moments]] = {
    "library": library,
    "library, contiguous": lambda x: library(x.contiguous()),
    "var_mean": var_mean,
    "two passes": two_passes,
    "matrix product": matrix_product,
    "double precision": double,
    "ours": elastic._moments,
}


@contextmanager
def arm(name: str) -> Iterator[None]:
    """The supernets' moments: library, ours, or ours everywhere."""
    if name == "library":
        with patch.object(elastic, "_moments", library), patch.object(elastic, "SHORT", math.inf):
            yield
    else:
        with patch.object(elastic, "SHORT", 0 if name == "everywhere" else elastic.SHORT):
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = {
        "command": f"python benchmarks/moments.py --repeats {arguments.repeats}",
        "alone": {"x".join(map(str, shape)): alone(shape) for shape in SHAPES},
        "networks": {name: within(name, arguments.repeats) for name in NETWORKS},
        "environment": environment(torch.device("cpu")),
    }
    write_file(arguments.out, (json.dumps(record, indent=1) + "\n").encode())


def alone(shape: tuple[int, int, int]) -> dict[str, dict[str, float]]:
    images, channels, side = shape
    generator = torch.Generator().manual_seed(0)
    near = torch.randn(images, side, side, channels, generator=generator).permute(0, 3, 1, 2)
    far = near + 3 * torch.randn(channels, 1, 1, generator=generator)
    found: dict[str, dict[str, float]] = {name: {} for name in WAYS}
    for place, x in (("near zero", near), ("far", far)):
        exact = x.double().permute(1, 0, 2, 3).flatten(1)
        mean, variance = exact.mean(1), exact.var(1, correction=0)
        for name, way in WAYS.items():
            ours = way(x)
            of_mean = (ours[0] - mean).square().mean() / (mean.square() + variance).mean()
            of_variance = ((ours[1] - variance) / variance).square().mean()
            for moment, error in (("mean", of_mean), ("variance", of_variance)):
                found[name][f"{moment}, {place}"] = round(float(error.sqrt()) / ROUNDING, 3)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(min(500, max(10, int(NUMBERS / far.numel())))):
        for name, way in WAYS.items():
            start = time.process_time()
            way(far)
            times[name].append(time.process_time() - start)
    for name, numbers in found.items():
        numbers["microseconds"] = round(1e6 * statistics.median(times[name]), 1)
        print(f"{shape!s:15} {name:20}", "  ".join(f"{what} {number:7.2f}" for what, number in numbers.items()), flush=True)
    return found


def within(network: str, repeats: int) -> dict[str, dict[str, Any]]:
    overrides, image, scored = NETWORKS[network]
    settings = config.load("quickstart", overrides)
    recipe, pixels = settings.training, Pixels((0.5,) * image.channels, (0.25,) * image.channels)
    supernet = make_supernet(settings.space, settings.components[settings.space], image)
    weights, draw = supernet.initial(0), rng("moments")
    subnets = [supernet.space.sample(draw) for _ in range(SUBNETS)]
    trainer, scorer = Trainer(supernet, recipe, pixels), Scorer(supernet, recipe, pixels)

    def some(count: int) -> Examples:
        generator = torch.Generator().manual_seed(count)
        shown = torch.randint(0, 256, (count, image.channels, image.size, image.size), generator=generator, dtype=torch.uint8)
        return Examples(shown, torch.randint(0, image.classes, (count,), generator=generator))

    trained, selecting, calibrating = some(SUBNETS * recipe.batch), some(scored), some(recipe.calibration)
    jobs: dict[str, Callable[[], Any]] = {
        "step": lambda: trainer.train_supernet(weights, one_of(subnets), trained, [0.01], np.random.default_rng(0)),
        "score": lambda: scorer.score_subnets(weights, subnets, selecting, calibrating),
    }
    arms = ["library", "ours", "everywhere"]
    times: dict[str, dict[str, list[float]]] = {job: {name: [] for name in arms} for job in jobs}
    for repeat in range(-1, repeats):  # the first warms up
        for name in np.random.default_rng(repeat + 1).permutation(arms).tolist():
            with arm(name):
                for job, work in jobs.items():
                    start = time.process_time()
                    work()
                    if repeat >= 0:
                        times[job][name].append(1000 * (time.process_time() - start) / SUBNETS)

    def gradients(subnet: Architecture, precision: torch.dtype) -> Tensor:
        shown = pixels.normalise(trained.images[: recipe.batch]).to(precision)
        own = {name: tensor.to(precision).requires_grad_() for name, tensor in supernet.take(weights, subnet).items()}
        loss = F.cross_entropy(supernet.forward(shown, own, subnet), trained.labels[: recipe.batch])
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(own.values()), materialize_grads=True)])

    found: dict[str, dict[str, Any]] = {"gradients": {name: [] for name in arms}}
    for subnet in subnets:
        exact = gradients(subnet, torch.float64)
        for name in arms:
            with arm(name):
                found["gradients"][name].append(float((gradients(subnet, torch.float32) - exact).norm() / exact.norm()))
    found["gradients"] = {name: statistics.median(far) for name, far in found["gradients"].items()}
    print(f"{network:28} gradients", "  ".join(f"{name} {far:.1e}" for name, far in found["gradients"].items()), flush=True)
    for job, by_arm in times.items():
        for name, own in by_arm.items():
            ratio = statistics.median(a / b for a, b in zip(own, by_arm["library"], strict=True))
            found[f"{job}, {name}"] = {"milliseconds": round(statistics.median(own), 3), "ratio": round(ratio, 4), "repeats": len(own)}
            print(f"{network:28} {job:6} {name:11} {statistics.median(own):9.2f} ms  {ratio:.3f}", flush=True)
    return found


if __name__ == "__main__":
    main()
