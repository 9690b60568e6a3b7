"""Optimisers are torch's, in float64; under masks each entry goes its own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.core.client_site import Examples
from fedloom.core.seeds import rng
from fedloom.spaces.base import ImageShape
from fedloom.spaces.budget import training_memory_mb
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from fedloom.supernets.mobilenetv3 import MobileNetV3Supernet
from fedloom.testing.nets import InPrecision
from fedloom.training.local import NetworkJob, Trainer, one_of
from fedloom.training.optimisers import AdamW, Nesterov, Optimiser, Sgd
from fedloom.training.packed import flattened
from fedloom.training.recipe import TrainingSettings, falling, optimiser_of, rate_of

SETTINGS = TrainingSettings(batch=6, crop=0, flip=False, cutout=0, momentum=0.8, weight_decay=0.3, execution="sliced")
PIXELS = InPrecision(precision=torch.float64)
EACH = pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw"])
TORCHS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda given, decay: torch.optim.SGD(given, lr=1.0, momentum=0.8, weight_decay=decay),
    "nesterov": lambda given, decay: torch.optim.SGD(given, lr=1.0, momentum=0.8, weight_decay=decay, nesterov=True),
    "adamw": lambda given, decay: torch.optim.AdamW(given, lr=1.0, betas=(0.8, 0.999), eps=1e-8, weight_decay=decay),
}


def ours(name: str) -> Optimiser:
    return optimiser_of(replace(SETTINGS, optimiser=name))


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_torch(name: str, start: Tensor, gradients: list[Tensor], decay: float, rates: list[float]) -> Tensor:
    weights = start.clone().requires_grad_()
    optimiser = TORCHS[name]([weights], decay)
    for gradient, rate in zip(gradients, rates, strict=True):
        optimiser.param_groups[0]["lr"] = rate
        weights.grad = gradient.clone()
        optimiser.step()
    return weights.detach()


RATES = [0.1, 0.02, 0.05, 0.01]


@EACH
def test_steps_are_torchs(name: str) -> None:
    start, gradients = numbers(7, seed=0), [numbers(7, seed=1 + step) for step in range(4)]
    weights, decay = start.clone(), torch.full((7,), 0.3, dtype=torch.float64)
    moments = ours(name).start(weights)
    for gradient, rate in zip(gradients, RATES, strict=True):
        ours(name).step(weights, moments, gradient, decay, rate, None)
    assert torch.allclose(weights, by_torch(name, start, gradients, 0.3, RATES), rtol=0, atol=1e-14)


@EACH
def test_an_entry_knows_only_the_steps_that_trained_it(name: str) -> None:
    """Every entry of a masked stack is what torch makes of the steps that trained it, as if there were no others."""
    start, gradients = numbers(2, 5, seed=0), [numbers(2, 5, seed=1 + step) for step in range(4)]
    masks = [torch.rand(2, 5, generator=torch.Generator().manual_seed(step)) < 0.6 for step in range(4)]
    rates = [torch.tensor([[rate], [3 * rate]], dtype=torch.float64) for rate in RATES]  # rows have rates of their own
    weights, decay, moments = start.clone(), torch.full((5,), 0.3, dtype=torch.float64), ours(name).start(start)
    for gradient, rate, mask in zip(gradients, rates, masks, strict=True):
        before, known = weights.clone(), moments.clone()
        ours(name).step(weights, moments, gradient, decay, rate, mask)
        assert torch.equal(weights[~mask], before[~mask])
        still = ~mask if moments.ndim == 2 else (~mask).unsqueeze(-2).expand(moments.shape)
        assert torch.equal(moments[still], known[still])
    for row in range(2):
        for entry in range(5):
            turns = [step for step in range(4) if masks[step][row, entry]]
            one, own = [gradients[step][row, entry][None] for step in turns], [float(rates[step][row]) for step in turns]
            expected = by_torch(name, start[row, entry][None], one, 0.3, own)
            assert torch.allclose(weights[row, entry], expected, rtol=0, atol=1e-14), (row, entry)


def test_the_first_steps_are_exact_in_single_precision() -> None:
    """1 - 0.999 has four digits in float32; a first step of AdamW is the rate, whatever the gradient."""
    weights, moments = torch.zeros(3), AdamW(0.9).start(torch.zeros(3))
    AdamW(0.9).step(weights, moments, torch.tensor([1e-2, -3.0, 7.0]), torch.zeros(3), 0.01, None)
    assert torch.allclose(weights, torch.tensor([-0.01, 0.01, -0.01]), rtol=3e-6, atol=0)


def test_names_stand_for_optimisers() -> None:
    assert [type(ours(name)) for name in ("sgd", "nesterov", "adamw")] == [Sgd, Nesterov, AdamW]
    assert optimiser_of(TrainingSettings()) == Sgd(0.9)


# -- in training ---------------------------------------------------------------
@pytest.fixture(scope="module")
def supernet() -> MobileNetV3Supernet:
    return MobileNetV3Supernet(MobileNetV3(MobileNetV3Settings(width=0.1, strides=(2, 1, 1, 1, 1)), ImageShape(1, 8, 3)))


def examples_of(count: int = 12) -> Examples:
    images = torch.randint(0, 256, (count, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Examples(images, torch.arange(count) % 3)


def trainer_of(supernet: MobileNetV3Supernet, **given: Any) -> Trainer:
    return Trainer(supernet, replace(SETTINGS, **given), PIXELS)


@EACH
@pytest.mark.parametrize("execution", ["sliced", "masked"])
def test_networks_train_by_the_chosen_optimiser(supernet: MobileNetV3Supernet, name: str, execution: str) -> None:
    """Alone and in a stack, embedded in the supernet and not: as torch's optimiser trains them. The classifier alone moves in one."""
    examples, rates, jobs = examples_of(6), [0.01, 0.003], []
    for seed, which in enumerate(["smallest", "medium", "smallest"]):
        architecture = supernet.space.named[which]
        plain = {key: tensor.double() for key, tensor in supernet.plain(supernet.initial(seed), architecture).items()}
        jobs.append(NetworkJob(plain, architecture, examples, rates, np.random.default_rng(0), "head" if seed == 2 else "whole"))
    trained = trainer_of(supernet, optimiser=name, execution=execution).train_networks(jobs)
    for job, got in zip(jobs, trained, strict=True):
        leaves = {key: tensor.clone().requires_grad_() for key, tensor in job.plain.items()}
        moving = {key: leaf for key, leaf in leaves.items() if job.part == "whole" or supernet.in_head(key)}
        groups = [[leaf for leaf in moving.values() if (leaf.ndim > 1) == wanted] for wanted in (True, False)]
        optimisers = [TORCHS[name](group, decay) for group, decay in zip(groups, (0.3, 0.0), strict=True)]
        for rate in rates:
            logits = supernet.forward(PIXELS.normalise(examples.images), leaves, job.architecture)
            torch.nn.functional.cross_entropy(logits, examples.labels, label_smoothing=0.1).backward()
            for optimiser in optimisers:
                optimiser.param_groups[0]["lr"] = rate
                optimiser.step()
                optimiser.zero_grad()
        assert all(torch.equal(got.weights[key], job.plain[key]) for key in leaves if key not in moving)
        found, start, wanted = (flattened(own[key] for key in moving) for own in (got.weights, job.plain, leaves))
        # Adam divides by the size of a gradient: one that is only rounding still moves its weight by the rate.
        assert (found - wanted).norm() < (0.02 if name == "adamw" else 1e-6) * (wanted - start).norm(), job.part


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_subnets_train_alike_in_both_executions_and_go_on_with_their_moments(supernet: MobileNetV3Supernet, name: str) -> None:
    weights = {key: tensor.double() for key, tensor in supernet.initial(1).items()}
    draw = one_of([*supernet.space.named.values(), supernet.space.sample(rng("another"))])
    ends, start = [], flattened(weights.values())
    for execution in ("sliced", "masked"):
        trainer, turns = trainer_of(supernet, optimiser=name, execution=execution), [np.random.default_rng(0) for _ in range(2)]
        whole = trainer.train_supernet(weights, draw, examples_of(), [0.01, 0.01], turns[0])
        first = trainer.train_supernet(weights, draw, examples_of(), [0.01], turns[1])
        second = trainer.train_supernet(first.weights, draw, examples_of(), [0.01], turns[1], momenta=first.momenta)
        assert all(torch.equal(whole.weights[key], second.weights[key]) for key in weights)
        covered = supernet.coverage(whole.steps)
        for key, tensor in whole.weights.items():
            still = (covered[key] == 0).expand(tensor.shape)
            assert torch.equal(tensor[still], weights[key][still]), key  # moments and decay rest with them
        ends.append(flattened(whole.weights[key] for key in weights))
    assert (ends[0] - ends[1]).norm() < 0.02 * (ends[0] - start).norm()


# -- rates and memory ------------------------------------------------------------
def test_warm_up_rises_epoch_by_epoch() -> None:
    constant = TrainingSettings(rate=0.4, schedule="constant", warmup=0.4)
    assert [rate_of(constant, epoch, 10) for epoch in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert rate_of(constant, 0, 10, start=2.0) == pytest.approx(0.5)
    cosine = replace(constant, schedule="cosine")
    assert rate_of(cosine, 1, 10) == pytest.approx(falling(0.4, 0.1, "cosine") / 2)
    assert rate_of(cosine, 7, 10) == falling(0.4, 0.7, "cosine") == rate_of(replace(cosine, warmup=0.0), 7, 10)
    assert rate_of(replace(constant, warmup=0.01), 0, 10) == 0.4  # less than an epoch


def test_memory_counts_the_moments(supernet: MobileNetV3Supernet) -> None:
    cost = supernet.space.cost(supernet.space.named["smallest"])
    more = training_memory_mb(cost, 1000, 6, ours("adamw").moments) - training_memory_mb(cost, 1000, 6, ours("sgd").moments)
    assert more == pytest.approx(4 * 2 * 1000 / 1e6)
