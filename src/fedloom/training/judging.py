"""A personal model judged where it was made: temperature and threshold from validation images, the rest from test images."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientData, Examples, PersonalModel
from fedloom.core.judgement import Judgement
from fedloom.core.seeds import rng
from fedloom.maths.judging import Numbers, calibrated, judge
from fedloom.training.tools import Tools

NOISE = 64  # images of noise
AT_ONCE = 256  # images


def noise_images(channels: int, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """(NOISE, channels, size, size): every pixel by chance. What is a model without a threshold so sure of?"""
    return rng("noise").integers(0, 256, (NOISE, channels, size, size), np.uint8)


def judge_model(tools: Tools, model: PersonalModel, data: ClientData) -> Judgement:
    """The network of a personal model, as its file will hold it. Where validation images were trained on, they can calibrate nothing."""
    plain = {name: torch.tensor(array) for name, array in model.arrays.items()}
    with torch.random.fork_rng(devices=()):  # torch draws weights for a new module, which these replace
        network = tools.supernet.load(Architecture.parse(model.architecture), plain).to(tools.device)
    image = tools.supernet.space.image

    def logits(images: Tensor) -> Numbers:
        return logits_of(lambda part: network(tools.pixels.normalise(part)), images)

    temperature, threshold = 1.0, 0.0
    if not tools.training.rejoin:
        temperature, threshold = calibrated(logits(data.validation.images), _labels(data.validation))
    noise = logits(torch.from_numpy(noise_images(image.channels, image.size)).to(tools.device))
    return judge(logits(data.test.images), _labels(data.test), noise, temperature, threshold)


@torch.no_grad()
def logits_of(network: Callable[[Tensor], Tensor], images: Tensor, at_once: int = AT_ONCE) -> Numbers:
    """(n, classes) of images (n, channels, size, size)."""
    parts = [network(images[start : start + at_once]) for start in range(0, len(images), at_once)]
    return torch.cat(parts).cpu().double().numpy()


def _labels(examples: Examples) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    found: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = examples.labels.cpu().numpy()
    return found
