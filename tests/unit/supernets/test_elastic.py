"""Moments of batch normalisation on a CPU: as exact as the library's own in the layout that it sums in double precision. And means of
pixels with the library's gradients, by another way on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.supernets.elastic import batch_norm, mean_pool, mean_pool_of_padded, pointwise
from fedloom.supernets.normalisation import EPS, FEW, SHORT, Statistics

SHAPES = [  # images, channels, side; 7 and 499 are prime: little to split a sum by
    (50, 8, 2),
    (50, 200, 2),
    (499, 24, 2),
    (200, 64, 4),
    (16, 16, 8),
    (7, 40, 7),
    (100, 48, 8),
    (499, 8, 7),
    (50, 96, 16),
    (50, 16, 32),
    (500, 8, 32),
]
LONG = [shape for shape in SHAPES if shape[0] * shape[2] ** 2 > SHORT]
ROUNDING = 2.0**-24  # of a number of order one in single precision
Moments = tuple[Tensor, Tensor]


def channels_last(shape: tuple[int, int, int], offset: float) -> Tensor:
    """Activations of standard deviation one, with means about ``offset`` apart, in the layout that ``pointwise`` leaves."""
    images, channels, side = shape
    generator = torch.Generator().manual_seed(images + channels + side)
    x = torch.randn(images, channels, side, side, generator=generator) + offset * torch.randn(channels, 1, 1, generator=generator)
    x = pointwise(x, torch.eye(channels)[:, :, None, None])
    assert x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return x


def sliced(x: Tensor) -> Moments:
    statistics = Statistics(rows=len(x))
    batch_norm(x, torch.ones(x.shape[1]), torch.zeros(x.shape[1]), "here", statistics)
    return statistics["here"]


def masked(x: Tensor) -> Moments:
    statistics = Statistics(rows=len(x))
    batch_norm(x, None, None, "here", statistics, torch.ones(x.shape[1], dtype=torch.bool))
    return statistics["here"]


def side_by_side(x: Tensor) -> Moments:
    """Two architectures at once, in a layer that both have whole."""
    mean, variance = torch.vmap(sliced)(torch.stack([x, 2 * x]))
    return mean[0], variance[0]


def library(x: Tensor) -> Moments:
    mean, variance = torch.zeros(x.shape[1]), torch.zeros(x.shape[1])
    F.batch_norm(x.contiguous(), mean, variance, training=True, momentum=1.0)
    pixels = x.numel() // x.shape[1]
    return mean, variance * ((pixels - 1) / pixels)


def errors(moments: Moments, x: Tensor) -> tuple[float, float]:
    """In roundings, root mean square over channels: of means against the size of activations, of variances against themselves."""
    exact = x.double().transpose(0, 1).flatten(1)
    mean, variance = exact.mean(1), exact.var(1, correction=0)
    of_mean = (moments[0] - mean).square().mean() / (mean.square() + variance).mean()
    of_variance = ((moments[1] - variance) / variance).square().mean()
    return float(of_mean.sqrt()) / ROUNDING, float(of_variance.sqrt()) / ROUNDING


@pytest.mark.parametrize("measure", [sliced, masked, side_by_side])
@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moments_are_exact(shape: tuple[int, int, int], offset: float, measure: Callable[[Tensor], Moments]) -> None:
    x = channels_last(shape, offset)
    for ours, theirs in zip(errors(measure(x), x), errors(library(x), x), strict=True):
        assert ours <= 2 * max(theirs, 0.5)


@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize("shape", LONG, ids=str)
def test_training_normalises_by_exact_moments(shape: tuple[int, int, int], offset: float) -> None:
    x, weight, bias = channels_last(shape, offset), torch.full((shape[1],), 2.0), torch.full((shape[1],), 0.5)

    def normalised(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, weight.to(x.dtype), bias.to(x.dtype), training=True, eps=EPS)

    exact = normalised(x.double())
    ours = [
        batch_norm(x, weight, bias, "here", None),
        batch_norm(x, weight, bias, "here", None, torch.ones(shape[1], dtype=torch.bool)),
        torch.vmap(lambda x: batch_norm(x, weight, bias, "here", None))(torch.stack([x, 2 * x]))[0],
    ]
    theirs = float((normalised(x.contiguous()) - exact).square().mean())
    for y in ours:
        assert float((y - exact).square().mean()) <= 4 * theirs


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(8, 3, 6), (64, FEW // 4096, 8)], ids=str)
def test_gradients_of_normalisation(shape: tuple[int, int, int], affine: bool) -> None:
    assert shape[0] * shape[2] ** 2 > SHORT
    x = channels_last(shape, 1.0).double()
    pull = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaves = [x, *(torch.linspace(0.5, 2, shape[1], dtype=torch.float64) for _ in range(2 if affine else 0))]
    found = []
    for normalise in (
        lambda x, weight=None, bias=None: batch_norm(x, weight, bias, "here", None),
        lambda x, weight=None, bias=None: F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS),
    ):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        found.append(torch.autograd.grad((normalise(*own) * pull).sum(), own))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


POOLS = [(3, 1, False), (3, 2, False), (2, 2, True)]  # kernel, stride, whether padding counts: of DARTS, and of NASViT on odd sides


def pooled_with_gradient(pool: Callable[..., Tensor], x: Tensor, *settings: int) -> Moments:
    x = x.detach().requires_grad_()
    y = pool(x, *settings)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
    return y, torch.autograd.grad(y, x, upstream)[0]


@pytest.mark.parametrize("side", [1, 4, 5])
@pytest.mark.parametrize("kernel, stride, counted", POOLS)
def test_zeros_put_around_a_map_before_it_is_pooled(kernel: int, stride: int, counted: bool, side: int) -> None:
    x = torch.randn(3, 8, side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, expected = (pooled_with_gradient(pool, x, kernel, stride, 1, counted) for pool in (mean_pool_of_padded, mean_pool))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel, stride, counted", POOLS)
def test_gradients_of_pools_on_a_gpu_where_channels_lie_last(kernel: int, stride: int, counted: bool) -> None:
    x = torch.randn(3, 8, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = pooled_with_gradient(mean_pool, x, kernel, stride, 1, counted)
    found = pooled_with_gradient(mean_pool, x.cuda().contiguous(memory_format=torch.channels_last), kernel, stride, 1, counted)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)
