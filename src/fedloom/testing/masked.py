"""Masked execution equals sliced execution: outputs, gradients and normalisation statistics, for every supernet.

Weights, inputs and architectures are random. Tolerances, against the largest entry of what is compared: float32, sums in another
order through up to a hundred layers, 1e-4 for logits and moments. Gradients jump where a rectifier or a maximum sits within
rounding of its switch (sliced float32 differs from sliced float64 as much), so entry by entry they are compared in float64, to
1e-8, and in float32 as a whole, to 2 % of their length.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.supernets.base import Supernet
from fedloom.supernets.normalisation import Statistics
from fedloom.testing.nets import images_of, mask, weights_of
from fedloom.testing.spaces import Given, each, needs_masks

LOGITS, MOMENTS = 1e-4, 1e-4
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def architectures_of(supernet: Supernet[Any], seed: int, count: int = 4) -> list[Architecture]:
    draw = rng("masked", seed)
    return [*supernet.space.named.values(), *(supernet.space.sample(draw) for _ in range(count))]


def genes_of(architectures: list[Architecture]) -> Tensor:
    return torch.tensor([architecture.choices for architecture in architectures])


def check_close(one: Tensor, other: Tensor, tolerance: float, scale: float = 0.0) -> None:
    assert one.shape == other.shape
    difference = float((one - other).abs().max()) if one.numel() else 0.0
    assert difference <= tolerance * max(float(other.abs().max()), scale, 1e-3), (difference, float(other.abs().max()))


def gradients(supernet: Supernet[Any], seed: int, precision: torch.dtype, device: str = "cpu") -> list[tuple[Tensor, ...]]:
    """Masked and sliced, of the sum over all subnets, with statistics of the batch as in training."""
    architectures, images = architectures_of(supernet, seed, 2), images_of(supernet, 9, seed).to(device, precision)
    leaves = {name: tensor.to(device, precision).requires_grad_() for name, tensor in weights_of(supernet, seed).items()}
    generator = torch.Generator().manual_seed(seed)
    pull = torch.randn(len(architectures), 9, supernet.space.image.classes, generator=generator).to(device, precision)
    masked = (supernet.forward_many(images, leaves, genes_of(architectures).to(device)) * pull).sum()
    parts = [(supernet.forward(images, supernet.take(leaves, a), a) * p).sum() for a, p in zip(architectures, pull, strict=True)]
    return [torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True) for loss in (masked, torch.stack(parts).sum())]


def check_gradients(masked: tuple[Tensor, ...], sliced: tuple[Tensor, ...]) -> None:
    largest = max(float(gradient.abs().max()) for gradient in sliced)
    for one, other in zip(masked, sliced, strict=True):
        check_close(one, other, 1e-8, scale=largest)


class MaskedContract(Given):
    """For supernets that have ``masked``."""

    seed = each([0, 1])

    @needs_masks
    @torch.no_grad()
    def test_outputs_and_statistics(self, supernet: Supernet[Any], seed: int) -> None:
        weights, images, rows = weights_of(supernet, seed), images_of(supernet, 9, seed), 6
        architectures = architectures_of(supernet, seed)
        genes = genes_of(architectures)
        batch = supernet.forward_many(images, weights, genes)
        statistics = Statistics(rows=rows)
        calibrated = supernet.forward_many(images, weights, genes, statistics)
        given_back = supernet.forward_many(images, weights, genes, Statistics(statistics))
        for index, architecture in enumerate(architectures):
            own = supernet.take(weights, architecture)
            check_close(batch[index], supernet.forward(images, own, architecture), LOGITS)
            expected = Statistics(rows=rows)
            check_close(calibrated[index], supernet.forward(images, own, architecture, expected), LOGITS)
            check_close(given_back[index], supernet.forward(images, own, architecture, Statistics(expected)), LOGITS)
            mine = Statistics({name: (mean[index], variance[index]) for name, (mean, variance) in statistics.items()})
            taken = supernet.take_statistics(mine, architecture)
            assert set(taken) == set(expected)
            for name, moments in expected.items():
                for one, other in zip(taken[name], moments, strict=True):
                    check_close(one, other, MOMENTS, scale=1.0)

    @needs_masks
    def test_gradients(self, supernet: Supernet[Any], seed: int) -> None:
        check_gradients(*gradients(supernet, seed, torch.float64))

    @needs_masks
    @needs_gpu
    def test_gradients_on_a_gpu(self, supernet: Supernet[Any]) -> None:
        check_gradients(*gradients(supernet, 0, torch.float64, "cuda"))

    @needs_masks
    def test_gradients_in_single_precision(self, supernet: Supernet[Any], seed: int) -> None:
        """Nearly: where a rectifier or a maximum sits within rounding of its switch, a gradient jumps (3 % of all with two operations)."""
        one, other = (torch.cat([gradient.flatten() for gradient in side]) for side in gradients(supernet, seed, torch.float32))
        assert (one - other).norm() < 0.1 * other.norm()

    @needs_masks
    def test_nothing_outside_the_region_moves_or_matters(self, supernet: Supernet[Any]) -> None:
        """Gradients outside are exactly zero, and what is stored outside does not change the outputs."""
        images = images_of(supernet, 9)
        for architecture in architectures_of(supernet, 0):
            regions = supernet.regions(architecture)
            leaves = {name: tensor.requires_grad_() for name, tensor in weights_of(supernet).items()}
            logits = supernet.forward_many(images, leaves, genes_of([architecture]))
            gradients = torch.autograd.grad(logits.square().sum(), list(leaves.values()), materialize_grads=True)
            for (name, _), gradient in zip(leaves.items(), gradients, strict=True):
                assert not gradient[~mask(supernet.shapes[name], regions.get(name))].any(), name
            with torch.no_grad():
                other = weights_of(supernet, seed=1)
                changed = {n: torch.where(mask(supernet.shapes[n], regions.get(n)), leaves[n], 5 * other[n]) for n in leaves}
                check_close(supernet.forward_many(images, changed, genes_of([architecture])), logits, LOGITS)

    @needs_masks
    @torch.no_grad()
    def test_missing_channels_leave_no_statistics(self, supernet: Supernet[Any]) -> None:
        architectures = architectures_of(supernet, 0)
        statistics = Statistics(rows=9)
        supernet.forward_many(images_of(supernet, 9), weights_of(supernet), genes_of(architectures), statistics)
        for index, architecture in enumerate(architectures):
            for name, parts in supernet.regions(architecture).items():
                layer = name.removesuffix(".weight")
                if layer in statistics:
                    missing = ~mask(supernet.shapes[name], parts)
                    assert not statistics[layer][0][index][missing].any() and (statistics[layer][1][index][missing] == 1).all(), layer

    @needs_masks
    @torch.no_grad()
    def test_pieces_equal_the_whole(self, supernet: Supernet[Any]) -> None:
        weights, images = weights_of(supernet), images_of(supernet, 9)
        genes = genes_of(architectures_of(supernet, 0))
        whole = supernet.forward_many(images, weights, genes)
        check_close(supernet.forward_many(images, weights, genes, chunk=3), whole, LOGITS)
        for index in range(len(genes)):
            check_close(supernet.forward_many(images, weights, genes[index : index + 1])[0], whole[index], LOGITS)

    @needs_masks
    @needs_gpu
    @torch.no_grad()
    def test_nothing_is_read_back_from_the_device(self, supernet: Supernet[Any]) -> None:
        weights = {name: tensor.cuda() for name, tensor in weights_of(supernet).items()}
        architectures = architectures_of(supernet, 0)
        images, genes = images_of(supernet, 9).cuda(), genes_of(architectures).cuda()
        sizes = supernet.space.input_sizes([architecture.choices for architecture in architectures])
        expected = supernet.forward_many(images, weights, genes, Statistics(rows=5), sizes)
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = supernet.forward_many(images, weights, genes, Statistics(rows=5), sizes)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        check_close(again, expected, LOGITS)
