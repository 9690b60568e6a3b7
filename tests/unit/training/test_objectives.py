"""Objectives of training, by hand, in both executions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedloom.core.client_site import Examples
from fedloom.spaces.base import ImageShape
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from fedloom.supernets.mobilenetv3 import MobileNetV3Supernet
from fedloom.testing.nets import InPrecision
from fedloom.training.local import NetworkJob, Trainer
from fedloom.training.objectives import PLAIN, Modules, NearMean, precise
from fedloom.training.recipe import TrainingSettings

SHIFT, MEAN = NearMean.SHIFT, NearMean.MEAN
SETTINGS = TrainingSettings(batch=6, crop=0, flip=False, cutout=0, momentum=0.9, weight_decay=0.1, label_smoothing=0.0)


@pytest.mark.parametrize("execution", ["sliced", "masked"])
def test_features_are_shifted_and_their_mean_is_held(execution: str) -> None:
    """Three clients with shifts and means of their own, one of them held more; two steps with momentum, and what stays."""
    supernet = MobileNetV3Supernet(MobileNetV3(MobileNetV3Settings(width=0.1, strides=(2, 1, 1, 1, 1)), ImageShape(1, 8, 3)))
    architecture, pixels = supernet.space.named["smallest"], InPrecision(precision=torch.float64)
    plain = {name: tensor.double() for name, tensor in supernet.plain(supernet.initial(0), architecture).items()}
    size = plain["classifier.weight"].shape[1]

    def job(seed: int, strength: float) -> NetworkJob:
        draw = torch.Generator().manual_seed(seed)
        examples = Examples(torch.randint(0, 256, (6, 1, 8, 8), generator=draw, dtype=torch.uint8), torch.arange(6) % 3)
        beside = {name: torch.randn(size, generator=draw, dtype=torch.float64) for name in (SHIFT, MEAN)}
        rates, rng = [0.1, 0.05], np.random.default_rng(seed)
        return NetworkJob({**plain, **beside}, architecture, examples, rates, rng, objective=NearMean(strength))

    strengths = [2.0, 2.0, 9.0]
    trained = Trainer(supernet, replace(SETTINGS, execution=execution), pixels).train_networks([*map(job, range(3), strengths)])
    for seed, (strength, found) in enumerate(zip(strengths, trained, strict=True)):
        one = job(seed, strength)
        weights = {name: tensor.clone().requires_grad_(name != MEAN) for name, tensor in one.plain.items()}
        momenta = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for rate in one.rates:
            same = {"classifier.weight": torch.eye(size, dtype=torch.float64), "classifier.bias": torch.zeros(size, dtype=torch.float64)}
            features = supernet.forward(pixels.normalise(one.examples.images), {**weights, **same}, architecture)
            logits = (features + weights[SHIFT]) @ weights["classifier.weight"].T + weights["classifier.bias"]
            apart = (features.mean(0) - weights[MEAN]).square().mean()
            (F.cross_entropy(logits, one.examples.labels) + strength / 2 * apart).backward()
            with torch.no_grad():
                for name, tensor in weights.items():
                    if tensor.grad is not None:
                        momenta[name] = 0.9 * momenta[name] + tensor.grad + (0.1 if tensor.ndim > 1 else 0.0) * tensor
                        tensor -= rate * momenta[name]
                        tensor.grad = None
        for name, tensor in weights.items():
            assert torch.allclose(found.weights[name], tensor, rtol=0, atol=1e-5), name
        assert torch.equal(found.weights[MEAN], one.plain[MEAN]) and not torch.equal(found.weights[SHIFT], one.plain[SHIFT])


def test_half_precision_ends_before_sums() -> None:
    assert precise(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert precise(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
    assert PLAIN.still == frozenset() and PLAIN == (None, None)


def test_gates_open_modules_above_zero_and_the_highest_in_any_case() -> None:
    modules = Modules(3)
    for gates, active in (([0.2, -0.1, 0.0], [1, 0, 1]), ([-3.0, -1.0, -2.0], [0, 1, 0]), ([-1.0, -1.0, -2.0], [1, 1, 0])):
        assert modules.opened(torch.tensor(gates)).tolist() == active
    leaf = torch.tensor([0.2, -0.1, 0.0], requires_grad=True)
    (modules.opened(leaf) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    logistic = torch.tensor([0.2, -0.1, 0.0]).sigmoid()
    assert leaf.grad is not None and torch.allclose(leaf.grad, logistic * (1 - logistic) * torch.tensor([1.0, 2.0, 3.0]))


def test_the_classifier_is_the_mean_of_open_modules() -> None:
    weights = {f"module{number}/classifier.bias": torch.tensor([float(number), 10.0]) for number in range(3)}
    network = Modules(3).assembled({**weights, "stem": torch.zeros(1), "gates": torch.tensor([1.0, -1.0, 1.0])})
    assert set(network) == {"stem", "classifier.bias"} and network["classifier.bias"].tolist() == [1.0, 10.0]


@pytest.mark.parametrize("execution", ["sliced", "masked"])
def test_modules_and_gates_learn_together(execution: str) -> None:
    """Two clients with gates of their own, one step: closed modules stay, and all gates move by straight-through gradients."""
    supernet = MobileNetV3Supernet(MobileNetV3(MobileNetV3Settings(width=0.1, strides=(2, 1, 1, 1, 1)), ImageShape(1, 8, 3)))
    architecture, pixels, modules = supernet.space.named["smallest"], InPrecision(precision=torch.float64), Modules(3)
    settings = replace(SETTINGS, weight_decay=0.0, execution=execution)
    initial = [
        {name: tensor.double() for name, tensor in supernet.plain(supernet.initial(seed), architecture).items()} for seed in range(3)
    ]
    heads = {f"module{number}/{name}": own[name] for number, own in enumerate(initial) for name in own if supernet.in_head(name)}
    body = {name: tensor for name, tensor in initial[0].items() if not supernet.in_head(name)}
    draw = torch.Generator().manual_seed(0)
    examples = Examples(torch.randint(0, 256, (6, 1, 8, 8), generator=draw, dtype=torch.uint8), torch.arange(6) % 3)

    def job(gates: list[float]) -> NetworkJob:
        plain = {**body, **heads, "gates": torch.tensor(gates, dtype=torch.float64)}
        return NetworkJob(plain, architecture, examples, [0.1], np.random.default_rng(0), objective=modules)

    choices = [[0.3, -0.2, 0.1], [-0.5, 0.4, -0.1]]
    for gates, found in zip(choices, Trainer(supernet, settings, pixels).train_networks([*map(job, choices)]), strict=True):
        active = [number for number, gate in enumerate(gates) if gate >= 0]
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in {**body, **heads}.items()}
        shares = torch.tensor([float(number in active) for number in range(3)], dtype=torch.float64, requires_grad=True)
        mean = {
            name: sum(shares[number] / shares.sum() * leaves[f"module{number}/{name}"] for number in range(3))
            for name in ("classifier.weight", "classifier.bias")
        }
        F.cross_entropy(supernet.forward(pixels.normalise(examples.images), {**leaves, **mean}, architecture), examples.labels).backward()
        for name, tensor in leaves.items():
            assert tensor.grad is not None
            assert torch.allclose(found.weights[name], tensor.detach() - 0.1 * tensor.grad, rtol=0, atol=1e-7), name
            if "/" in name:
                assert torch.equal(found.weights[name], tensor.detach()) == (int(name[6]) not in active), name
        logistic = torch.tensor(gates, dtype=torch.float64).sigmoid()
        assert shares.grad is not None
        step = 0.1 * shares.grad * logistic * (1 - logistic)
        assert torch.allclose(found.weights["gates"], torch.tensor(gates, dtype=torch.float64) - step, rtol=0, atol=1e-9)
        assert (step != 0).sum() >= 2  # one that is active alone has nothing to be compared with
