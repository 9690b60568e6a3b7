"""Gradients behind a step of one's own, by hand: on a parabola, and on a network in both executions."""

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
from fedloom.training.adaptation import Adaptation, adapted, images_run, pieces
from fedloom.training.local import NetworkJob, Trainer
from fedloom.training.recipe import TrainingSettings


def test_on_a_parabola() -> None:
    """f = w' A w / 2 - b_k w with a b for each piece: grad = A w - b_k, and the Hessian is A."""
    hessian = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    targets = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 3.0]], dtype=torch.float64)
    weights = torch.tensor([0.3, -0.7], dtype=torch.float64)

    def gradient(at: Tensor, number: int) -> Tensor:
        return hessian @ at - targets[number]

    inner = weights - 0.1 * (hessian @ weights - targets[0])
    after = hessian @ inner - targets[1]
    assert torch.allclose(adapted(gradient, weights, None), gradient(weights, 0))
    assert torch.allclose(adapted(gradient, weights, Adaptation(0.1)), after)
    assert torch.allclose(adapted(gradient, weights, Adaptation(0.1, 1e-3)), after - 0.1 * hessian @ after)


@pytest.mark.parametrize(
    ("adaptation", "sizes", "images"), [(None, [8], 8), (Adaptation(0.1), [4, 4], 8), (Adaptation(0.1, 1.0), [2] * 3, 8)]
)
def test_a_batch_is_cut_into_equal_parts(adaptation: Adaptation | None, sizes: list[int], images: int) -> None:
    row = torch.arange(8)
    parts = [row[piece] for piece in pieces(adaptation, 8)]
    assert [len(part) for part in parts] == sizes and images_run(adaptation, 8) == images
    assert len(set(torch.cat(parts).tolist())) == sum(sizes)
    assert images_run(adaptation, 9) == {1: 9, 2: 8, 3: 12}[len(sizes)]


@pytest.mark.parametrize("execution", ["sliced", "masked"])
@pytest.mark.parametrize("probe", [0.0, 1e-4])
def test_a_network_trains_behind_its_step(execution: str, probe: float) -> None:
    """Two clients, one batch of six each: against gradients of the loss at w - rate grad, differentiated through."""
    supernet = MobileNetV3Supernet(MobileNetV3(MobileNetV3Settings(width=0.1, strides=(2, 1, 1, 1, 1)), ImageShape(1, 8, 3)))
    architecture, pixels = supernet.space.named["smallest"], InPrecision(precision=torch.float64)
    settings = TrainingSettings(batch=6, crop=0, flip=False, cutout=0, weight_decay=0.0, label_smoothing=0.0, execution=execution)
    plain = {name: tensor.double() for name, tensor in supernet.plain(supernet.initial(0), architecture).items()}

    def examples(seed: int) -> Examples:
        draw = torch.Generator().manual_seed(seed)
        return Examples(torch.randint(0, 256, (6, 1, 8, 8), generator=draw, dtype=torch.uint8), torch.arange(6) % 3)

    def job(seed: int) -> NetworkJob:
        return NetworkJob(plain, architecture, examples(seed), [0.1], np.random.default_rng(seed), adaptation=Adaptation(0.3, probe))

    def gradients(weights: Weights, some: Examples, rows: Tensor) -> Weights:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
        loss = F.cross_entropy(supernet.forward(pixels.normalise(some.images[rows]), leaves, architecture), some.labels[rows])
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def along(weights: Weights, way: Weights, length: float) -> Weights:
        return {name: tensor + length * way[name] for name, tensor in weights.items()}

    trained = Trainer(supernet, settings, pixels).train_networks([job(0), job(1)])
    for seed, found in enumerate(trained):
        rows = torch.as_tensor(np.random.default_rng(seed).permutation(6)).chunk(3 if probe else 2)
        some = examples(seed)
        after = gradients(along(plain, gradients(plain, some, rows[0]), -0.3), some, rows[1])
        expected = after
        if probe:
            sides = [gradients(along(plain, after, side * probe), some, rows[2]) for side in (1, -1)]
            expected = {name: array - 0.3 * (sides[0][name] - sides[1][name]) / (2 * probe) for name, array in after.items()}
            assert any(not torch.allclose(expected[name], after[name], rtol=1e-3) for name in after)
        for name, tensor in expected.items():
            assert torch.allclose(found.weights[name], plain[name] - 0.1 * tensor, rtol=0, atol=1e-7), name
        assert found.macs == supernet.space.cost(architecture).macs * (8 if probe else 6)
    plainly = Trainer(supernet, settings, pixels).train_networks([replace(job(0), adaptation=None)])[0]
    assert any(not torch.equal(plainly.weights[name], trained[0].weights[name]) for name in plain)
