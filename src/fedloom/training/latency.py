"""Latency as the clock shows it: one image through the network that a client would deploy."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from fedloom.core.architecture import Architecture
from fedloom.supernets.base import Supernet

WARM_UP, RUNS = 3, 11


def measure_latency(supernet: Supernet[Any], architecture: Architecture, device: torch.device) -> float:
    """Milliseconds for one image: the stand-alone network in evaluation mode, the median of several runs after a few to warm up.

    Weights are fresh ones; how long they take does not depend on their values. Other work on the machine shows in the number.
    """
    image = supernet.space.image
    with torch.random.fork_rng(devices=[]), torch.inference_mode():  # fresh weights are drawn from the global generator
        network = supernet.network(architecture).eval().to(device)
        pixels = torch.zeros(1, image.channels, image.size, image.size, device=device).contiguous(memory_format=torch.channels_last)
        seconds = []
        for _ in range(WARM_UP + RUNS):
            began = time.perf_counter()
            network(pixels)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elif device.type == "mps":
                torch.mps.synchronize()
            seconds.append(time.perf_counter() - began)
    return 1000 * median(seconds[WARM_UP:])
