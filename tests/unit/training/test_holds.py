"""A part of a network that stays as it is, a pull towards given weights and a slope, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.client_site import Examples
from fedloom.spaces.base import ImageShape
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from fedloom.supernets.base import Weights
from fedloom.supernets.mobilenetv3 import MobileNetV3Supernet
from fedloom.testing.nets import InPrecision
from fedloom.training.holds import Part, Pull
from fedloom.training.local import NetworkJob, Trainer
from fedloom.training.recipe import TrainingSettings

SETTINGS = TrainingSettings(batch=6, crop=0, flip=False, cutout=0, momentum=0.9, weight_decay=0.1, label_smoothing=0.0)
PIXELS = InPrecision(precision=torch.float64)
RATES = [0.1, 0.05]


@pytest.fixture(scope="module")
def supernet() -> MobileNetV3Supernet:
    return MobileNetV3Supernet(MobileNetV3(MobileNetV3Settings(width=0.1, strides=(2, 1, 1, 1, 1)), ImageShape(1, 8, 3)))


def plain_of(supernet: MobileNetV3Supernet, seed: int) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in supernet.plain(supernet.initial(seed), supernet.space.named["smallest"]).items()}


def by_hand(supernet: MobileNetV3Supernet, job: NetworkJob, strength: float) -> Weights:
    """SGD with momentum on the loss, its decay and the proximal term; one batch is an epoch, in any order."""
    weights = {name: tensor.clone().requires_grad_() for name, tensor in job.plain.items()}
    momenta = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    towards = job.pull.towards if job.pull else job.plain
    slope = (job.pull and job.pull.slope) or {name: torch.zeros_like(tensor) for name, tensor in job.plain.items()}
    for rate in job.rates:
        logits = supernet.forward(PIXELS.normalise(job.examples.images), weights, job.architecture)
        F.cross_entropy(logits, job.examples.labels).backward()
        with torch.no_grad():
            for name, tensor in weights.items():
                if job.part == "whole" or supernet.in_head(name) == (job.part == "head"):
                    decay = SETTINGS.weight_decay if tensor.ndim > 1 else 0.0
                    assert tensor.grad is not None
                    found = tensor.grad + decay * tensor + strength * (tensor - towards[name]) + slope[name]
                    momenta[name] = 0.9 * momenta[name] + found
                    tensor -= rate * momenta[name]
                tensor.grad = None
    return {name: tensor.detach() for name, tensor in weights.items()}


@pytest.mark.parametrize("execution", ["sliced", "masked"])
@pytest.mark.parametrize(("part", "strength"), [("whole", 0.0), ("head", 0.0), ("body", 0.0), ("whole", 0.7), ("body", 0.7)])
def test_steps_of_a_network_that_is_held_back(supernet: MobileNetV3Supernet, execution: str, part: Part, strength: float) -> None:
    draw = torch.Generator().manual_seed(0)
    examples = Examples(torch.randint(0, 256, (6, 1, 8, 8), generator=draw, dtype=torch.uint8), torch.arange(6) % 3)
    pull = Pull(plain_of(supernet, 1), strength) if strength else None
    job = NetworkJob(plain_of(supernet, 0), supernet.space.named["smallest"], examples, RATES, np.random.default_rng(0), part, pull)
    expected = by_hand(supernet, job, strength)
    trainer = Trainer(supernet, replace(SETTINGS, execution=execution), PIXELS)
    for _ in range(2):  # the second finds what the first left
        (trained,) = trainer.train_networks([job])
        for name, tensor in expected.items():
            assert torch.allclose(trained.weights[name], tensor, rtol=0, atol=1e-5), name
            stays = part != "whole" and supernet.in_head(name) != (part == "head")
            assert torch.equal(trained.weights[name], job.plain[name]) if stays else True
    assert any(not torch.equal(expected[name], job.plain[name]) for name in expected)


def test_rows_of_a_stack_have_pulls_of_their_own(supernet: MobileNetV3Supernet) -> None:
    """Two of one architecture in one stack, each towards its own weights; two more on slopes of their own; one without."""
    images = torch.randint(0, 256, (6, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    examples, start = Examples(images, torch.arange(6) % 3), plain_of(supernet, 0)

    def jobs() -> list[NetworkJob]:
        towards, other = plain_of(supernet, 1), plain_of(supernet, 2)
        pulls = [Pull(towards, 0.5), Pull(other, 5.0), Pull(towards, 0.0, other), Pull(towards, 0.5, towards), None]
        named = supernet.space.named["smallest"]
        return [NetworkJob(start, named, examples, RATES, np.random.default_rng(0), pull=pull) for pull in pulls]

    for execution in ("masked", "sliced"):
        trained = Trainer(supernet, replace(SETTINGS, execution=execution), PIXELS).train_networks(jobs())
        for job, found in zip(jobs(), trained, strict=True):
            expected = by_hand(supernet, job, job.pull.strength if job.pull else 0.0)
            assert all(torch.allclose(found.weights[name], tensor, rtol=0, atol=1e-5) for name, tensor in expected.items())
