"""Compiled kernels: on a GPU against torch in float64 (`pytest -m gpu`), and for an H200 without one (`make slow`)."""

from __future__ import annotations

import importlib.util
from functools import partial

import fused as benchmark
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.supernets import fused
from fedloom.supernets.darts_parts import add_rows, pick_rows, pooled
from fedloom.supernets.joint_norm import joint_norm
from support.fused import compare, error, exact_joint_norm, exact_norm, exactly_squeezed, images, layers, random, squeezed_by, vectors

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
# Channels, side, kernel, stride, dilation, images: layers of MobileNetV3, NASViT and DARTS.
LAYERS = [
    (16, 32, 3, 1, 1, 50),
    (144, 32, 7, 1, 1, 50),
    (144, 32, 7, 2, 1, 50),
    (240, 16, 7, 1, 1, 50),
    (672, 8, 7, 2, 1, 50),
    (960, 4, 7, 1, 1, 250),
    (72, 28, 5, 2, 1, 20),
    (200, 2, 3, 1, 1, 50),
    (24, 16, 5, 1, 2, 50),
    (40, 15, 3, 2, 2, 20),
]
SUMS = 2e-5  # of the largest number: how far sums over all pixels of a batch may be off in float32


def on_gpu(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [tensor.cuda().to(dtype) for tensor in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels, side, kernel, stride, dilation, count", LAYERS)
def test_depthwise_convolutions(channels: int, side: int, kernel: int, stride: int, dilation: int, count: int, dtype: torch.dtype) -> None:
    x, weight = images(count, channels, side, side, device="cuda", dtype=dtype), random(channels, 1, kernel, kernel, seed=1, device="cuda")
    errors = compare(
        lambda x, w: fused.depthwise(x, w, stride, dilation),
        lambda x, w: F.conv2d(x, w, None, stride, dilation * (kernel // 2), dilation, channels),
        [x, weight],
        SUMS if dtype == torch.float32 else None,
    )
    print(errors)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_weighed_by_what_the_map_shows(dtype: torch.dtype) -> None:
    for channels, side in ((72, 16), (480, 8), (960, 4)):
        own = [tensor.cuda() for tensor in layers(channels, (3,), dtype)]
        compare(
            torch.vmap(squeezed_by),
            lambda x, *own: torch.stack([exactly_squeezed(*one) for one in zip(x, *own, strict=True)]),
            [images(3, 50, channels, side, side, device="cuda", dtype=dtype), *own],
            SUMS if dtype == torch.float32 else 0.05,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_depthwise_convolutions_of_several_groups(shared: bool, stride: int) -> None:
    groups, reach, active = 4, torch.tensor([1, 3, 2, 3]).cuda(), torch.tensor([144, 96, 40, 0]).cuda()
    x, weight = images(groups, 20, 144, 16, 16).cuda(), random(*([] if shared else [groups]), 144, 1, 7, 7, seed=1).cuda()
    axis = None if shared else 0

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return torch.vmap(lambda x, w, r, a: fused.depthwise(x, w, stride, 1, r, a), (0, axis, 0, 0))(x, w, reach, active)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        own = [(x[g], w if shared else w[g], stride, 1, reach[g], active[g]) for g in range(groups)]
        return torch.stack([fused.plain_depthwise(*each) for each in own])

    compare(ours, plain, [x, weight], SUMS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", ["none", "silu"])  # the others have switches, where rounding decides
@pytest.mark.parametrize("channels, side, count", [(16, 32, 250), (144, 32, 50), (240, 16, 50), (960, 4, 50), (24, 28, 20), (1000, 2, 50)])
def test_normalisation(channels: int, side: int, count: int, act: str, dtype: torch.dtype) -> None:
    x, mask = images(count, channels, side, side, device="cuda", dtype=dtype) + 3, (torch.arange(channels) < channels * 2 // 3).cuda()
    for chosen in (None, mask):
        compare(
            lambda *all, chosen=chosen: fused.norm_act(*all, chosen, act),
            lambda *all, chosen=chosen: exact_norm(*all, chosen, act),
            [x, *on_gpu(vectors(channels))],
            SUMS if dtype == torch.float32 else None,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("act", list(fused.ACTIVATIONS))
def test_normalisation_of_several_groups_by_the_first_rows(act: str) -> None:
    x, masks = images(5, 30, 144, 16, 16).cuda() + 100, (torch.arange(144) < torch.tensor([[144], [96], [64], [8], [72]])).cuda()
    weight, bias = on_gpu(vectors(144))
    y, mean, variance = torch.vmap(lambda x, m: fused.norm_act_rows(x, weight, bias, 10, m, act))(x, masks)
    for group in range(5):
        right, middle = torch.var_mean(x[group, :10].double(), (0, 2, 3), correction=0)
        torch.testing.assert_close(mean[group].double(), middle * masks[group], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(variance[group].double(), torch.where(masks[group], right, 1.0), rtol=1e-6, atol=1e-6)
        expected = exact_norm(x[group].double(), weight, bias, masks[group], act, 10)
        torch.testing.assert_close(y[group].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, channels, widths", [(64, 72, (64, 72)), (25, 184, (160, 184)), (4, 224, (208, 224))])
def test_joint_normalisation(tokens: int, channels: int, widths: tuple[int, int], dtype: torch.dtype) -> None:
    width = torch.tensor(widths, device="cuda")
    x = torch.where(
        torch.arange(channels, device="cuda") < width[:, None, None, None], random(2, 50, tokens, channels, device="cuda") + 1, 0.0
    )

    given, exactly = [part.to(dtype) for part in (x, *on_gpu(vectors(2, channels)))], partial(exact_joint_norm, widths=widths)
    compare(lambda *all: torch.vmap(joint_norm)(*all, width), exactly, given, SUMS if dtype == torch.float32 else 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("channels, side", [(16, 32), (64, 8), (20, 7)])
@torch.no_grad()
def test_cells(channels: int, side: int) -> None:
    x = images(3, 20, channels, side, side, device="cuda", dtype=torch.bfloat16)
    for maximum, stride in ((True, 1), (True, 2), (False, 1), (False, 2)):
        right = torch.stack([pooled(one.double(), maximum, stride) for one in x])
        assert error(pooled(x, maximum, stride), right) <= (0 if maximum else 1e-2)
    rows = x.movedim(2, -1).contiguous()
    index = torch.tensor([2, 0, 1, 1], device="cuda")
    assert torch.equal(pick_rows(rows, index, 2, rectify=True), F.relu(torch.cat([rows[index[0::2]], rows[index[1::2]]], -1)))
    expected = rows[1].double() + rows[2].double()
    add_rows(rows, torch.tensor([1, 2], device="cuda"), torch.tensor([0], device="cuda"), 0)
    assert error(rows[0], expected) < 1e-2


@pytest.mark.gpu
def test_captured_steps_give_the_same_numbers_again() -> None:
    x, weight = images(3, 20, 96, 16, 16).cuda().requires_grad_(), random(3, 96, 1, 7, 7, seed=1).cuda().requires_grad_()
    (scale, shift), reach = (part.requires_grad_() for part in on_gpu(vectors(96))), torch.tensor([1, 2, 3]).cuda()
    leaves = [x, weight, scale, shift]

    def one(x: Tensor, weight: Tensor, reach: Tensor) -> Tensor:
        return fused.norm_act(fused.depthwise(x, weight, 1, 1, reach), scale, shift, None, "hardswish")

    def step() -> list[Tensor]:
        y = torch.vmap(one)(x, weight, reach)
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = [step() for _ in range(3)][-1]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(eager, captured, strict=True))


@pytest.mark.gpu
def test_maps_of_more_than_two_to_the_31_numbers() -> None:
    count = 2**31 // (32 * 32 * 512) + 3
    x = torch.zeros(count, 32, 32, 512, device="cuda", dtype=torch.bfloat16).permute(0, 3, 1, 2)
    x[-2:] = images(2, 512, 32, 32, device="cuda", dtype=torch.bfloat16)
    weight = random(512, 1, 3, 3, seed=1, device="cuda").requires_grad_()
    last = x[-2:].clone(memory_format=torch.channels_last)
    y = fused.depthwise(x, weight)
    assert torch.equal(y[-2:], fused.depthwise(last, weight)) and not y[0].any()
    (gradient,) = torch.autograd.grad(y, weight, x)  # x is as good as any: only the last two images count
    (expected,) = torch.autograd.grad(fused.depthwise(last, weight), weight, last)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-2)
    del y
    scale, shift = torch.full((512,), 2.0, device="cuda"), torch.ones(512, device="cuda")
    assert torch.equal(fused.affine_act(x, scale, shift)[-2:], fused.affine_act(last, scale, shift))


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h200_and_spills_next_to_nothing() -> None:
    """The assembler gives up four registers where another block of threads fits for it."""
    assert [one for one in benchmark.compile_all() if one["stack"] > 16 or one["local"]] == []
