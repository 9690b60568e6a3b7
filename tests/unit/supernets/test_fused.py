"""Fused operations against torch in float64. Their kernels run in Triton's interpreter; compiled ones: test_kernels.py."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.supernets import fused
from fedloom.supernets.darts_parts import add_rows, pick_rows, pooled
from fedloom.supernets.joint_norm import joint_norm
from fedloom.supernets.normalisation import EPS
from support.fused import (
    UNITS,
    compare,
    error,
    exact_joint_norm,
    exact_norm,
    exactly_squeezed,
    images,
    layers,
    random,
    squeezed_by,
    vectors,
)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
interpreted = pytest.mark.usefixtures("interpreter")
KERNELS = "fedloom.supernets.kernels"
ACTS = ["none", "relu", "hardswish", "silu"]
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """The kernels run on the CPU in numpy. Triton decides that when it is imported, so it is imported anew."""

    def of_triton() -> list[str]:
        return [name for name in sys.modules if f"{name}.".startswith((f"{KERNELS}.", "triton.")) and "._C" not in name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in of_triton():
            patch.delitem(sys.modules, name)
        interpreter = importlib.import_module("triton.runtime.interpreter")
        original = interpreter._patch_lang_tensor

        def with_new_numpy(tensor: Any, scope: Any) -> None:
            """numpy 2.4 makes no number of an array of one number, as Triton (3.6, 3.7) expects it to."""
            original(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        patch.setattr(interpreter, "_patch_lang_tensor", with_new_numpy)
        patch.setattr(fused, "INTERPRETED", True)
        yield
        for name in of_triton():
            del sys.modules[name]


# -- depth-wise convolution ----------------------------------------------------------------------------------------------
@interpreted
@pytest.mark.parametrize(
    "kernel, stride, dilation, side", [(3, 1, 1, 4), (5, 2, 1, 5), (7, 1, 1, 5), (7, 2, 1, 6), (3, 1, 2, 5), (5, 2, 2, 7)]
)
def test_depthwise_convolutions_and_their_gradients(kernel: int, stride: int, dilation: int, side: int) -> None:
    x, weight = images(2, 8, side, side), random(8, 1, kernel, kernel, seed=1)
    compare(
        lambda x, w: fused.depthwise(x, w, stride, dilation),
        lambda x, w: F.conv2d(x, w, None, stride, dilation * (kernel // 2), dilation, 8),
        [x, weight],
    )


@interpreted
@pytest.mark.parametrize(
    "kernel, stride, dilation, height, width",
    [
        (3, 1, 1, 2, 8),
        (5, 1, 1, 5, 4),
        (7, 1, 1, 3, 4),
        (3, 2, 1, 5, 8),
        (5, 2, 1, 4, 7),
        (7, 2, 1, 5, 15),
        (3, 1, 2, 6, 4),
        (5, 2, 2, 7, 7),
    ],
)
def test_columns_side_by_side(kernel: int, stride: int, dilation: int, height: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a thread has where there is enough to do; also where the last one of an odd width has no neighbour in the gradient."""
    monkeypatch.setattr(importlib.import_module(f"{KERNELS}.depthwise"), "PROGRAMS", 2)
    x, weight = images(5, 24, height, width), random(24, 1, kernel, kernel, seed=1)
    compare(
        lambda x, w: fused.depthwise(x, w, stride, dilation),
        lambda x, w: F.conv2d(x, w, None, stride, dilation * (kernel // 2), dilation, 24),
        [x, weight],
    )
    if kernel == 7:
        for reach in (1, 2):
            bounds = torch.tensor(reach), torch.tensor(12)
            compare(
                lambda x, w, bounds=bounds: fused.depthwise(x, w, stride, 1, *bounds),  # type: ignore[misc]
                lambda x, w, bounds=bounds: fused.plain_depthwise(x, w, stride, 1, *bounds),  # type: ignore[misc]
                [x, weight],
            )


@interpreted
def test_maps_that_are_not_square_nor_channels_last_and_odd_numbers_of_channels() -> None:
    x, weight = random(2, 20, 2, 5), random(20, 1, 5, 5, seed=1)
    assert x.is_contiguous()
    y = fused.depthwise(x, weight)
    assert y.is_contiguous(memory_format=torch.channels_last)
    compare(fused.depthwise, lambda x, w: F.conv2d(x, w, None, 1, 2, 1, 20), [x, weight])
    compare(lambda x, w: fused.depthwise(x[:, 1:], w), lambda x, w: F.conv2d(x[:, 1:], w, None, 1, 2, 1, 19), [x, weight[1:]])


@interpreted
@pytest.mark.parametrize(
    ("stride", "reach"),
    [(1, 1), (2, 2), (1, 3), *(pytest.param(*other, marks=pytest.mark.slow) for other in ((2, 1), (1, 2), (2, 3)))],
)
def test_taps_out_of_reach_and_inactive_channels_count_as_zero(stride: int, reach: int) -> None:
    x, weight = images(1, 24, 4, 4), random(24, 1, 7, 7, seed=1)  # the weight is not zero out of reach: it must not be looked at
    bounds = torch.tensor(reach), torch.tensor(12)  # 12: the middle of a block of channels; the third block does nothing

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return fused.depthwise(x, w, stride, 1, *bounds)

    compare(ours, lambda x, w: fused.plain_depthwise(x, w, stride, 1, *bounds), [x, weight])
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = ours(*leaves)
    dx, dw = torch.autograd.grad(y.sum(), leaves)
    assert not y[:, 12:].any() and not dx[:, 12:].any() and not dw[12:].any()
    edge = 3 - reach
    assert dw.count_nonzero() == dw[:12, :, edge : 7 - edge, edge : 7 - edge].count_nonzero() > 0


@interpreted
def test_inactive_channels_may_hold_anything() -> None:
    x = images(2, 8, 4, 4)
    x[:, 6:] = torch.nan
    assert fused.depthwise(x, random(8, 1, 3, 3), active=torch.tensor(6)).isfinite().all()


@interpreted
@pytest.mark.parametrize("shared", ["nothing", "weight", "images"])
def test_depthwise_convolutions_of_several_groups(shared: str) -> None:
    groups, reach, active = 3, torch.tensor([1, 3, 2]), torch.tensor([8, 5, 0])
    axes = (None if shared == "images" else 0, None if shared == "weight" else 0)
    x = images(2, 8, 4, 4) if shared == "images" else images(groups, 2, 8, 4, 4)
    weight = random(8, 1, 7, 7, seed=1) if shared == "weight" else random(groups, 8, 1, 7, 7, seed=1)

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return torch.vmap(lambda x, w, r, a: fused.depthwise(x, w, 1, 1, r, a), (*axes, 0, 0))(x, w, reach, active)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        own = [(x if axes[0] is None else x[g], w if axes[1] is None else w[g], 1, 1, reach[g], active[g]) for g in range(groups)]
        return torch.stack([fused.plain_depthwise(*each) for each in own])

    compare(ours, plain, [x, weight])


@interpreted
def test_groups_that_do_not_lie_first_and_groups_of_groups() -> None:
    x, weight = random(2, 8, 3, 4, 4), random(3, 8, 1, 3, 3, seed=1)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return torch.stack([F.conv2d(x[:, :, g], w[g], None, 1, 1, 1, 8) for g in range(3)])

    compare(torch.vmap(fused.depthwise, (2, 0)), plain, [x, weight])
    twice = random(2, 3, 2, 8, 4, 4)
    y = torch.vmap(torch.vmap(fused.depthwise), (0, None))(twice, weight)
    expected = torch.stack([torch.stack([F.conv2d(twice[a, b], weight[b], None, 1, 1, 1, 8) for b in range(3)]) for a in range(2)])
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("dtype", HALVES)
def test_depthwise_convolutions_in_half_precision(dtype: torch.dtype) -> None:
    compare(fused.depthwise, lambda x, w: F.conv2d(x, w, None, 1, 2, 1, 8), [images(2, 8, 5, 5, dtype=dtype), random(8, 1, 5, 5, seed=1)])


@interpreted
def test_a_weight_gradient_of_several_chunks_is_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(f"{KERNELS}.depthwise_gradients"), "PROGRAMS", 3)
    x, weight = images(25, 8, 2, 8), random(8, 1, 3, 3, seed=1)  # four blocks of 32 pairs of columns, the last one shorter, in two chunks
    compare(fused.depthwise, lambda x, w: F.conv2d(x, w, None, 1, 1, 1, 8), [x, weight])


# -- normalisation -------------------------------------------------------------------------------------------------------
@interpreted
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_normalisation_activation_and_their_gradients(act: str, masked: bool) -> None:
    mask = torch.arange(24) % 5 < 3 if masked else None
    x = 2 * images(3, 24, 5, 5) + 1
    compare(lambda *all: fused.norm_act(*all, mask, act), lambda *all: exact_norm(*all, mask, act), [x, *vectors(24)], 5e-6)


@interpreted
def test_normalisation_without_weights_and_with_a_residual() -> None:
    x, mask = random(3, 20, 3, 2), torch.arange(20) < 12
    compare(lambda x: fused.norm_act(x, None, None), lambda x: exact_norm(x, None, None, None, "none"), [x], 5e-6)
    compare(lambda x: fused.norm_act(x, None, None, mask, "relu"), lambda x: exact_norm(x, None, None, mask, "relu"), [x], 5e-6)
    weight, bias = vectors(20)
    compare(lambda x, w: fused.norm_act(x, w, None), lambda x, w: exact_norm(x, w, None, None, "none"), [x, weight], 5e-6)
    compare(lambda x, b: fused.norm_act(x, None, b), lambda x, b: exact_norm(x, None, b, None, "none"), [x, bias], 5e-6)
    compare(
        lambda x, w, b, r: fused.norm_act(x, w, b, mask, "silu", r),
        lambda x, w, b, r: exact_norm(x, w, b, mask, "silu") + r,
        [x, weight, bias, random(3, 20, 3, 2, seed=7)],
        5e-6,
    )


@interpreted
@pytest.mark.parametrize("shared", ["nothing", "weights", "images"])
def test_normalisation_of_several_groups(shared: str) -> None:
    groups, masks = 3, torch.arange(8) < torch.tensor([[8], [3], [0]])
    axes = (None if shared == "images" else 0, *(None if shared == "weights" else 0,) * 2)
    x = images(2, 8, 4, 4) if shared == "images" else images(groups, 2, 8, 4, 4)
    both = vectors(8) if shared == "weights" else vectors(groups, 8)

    def ours(*all: Tensor) -> Tensor:
        return torch.vmap(lambda x, w, b, m: fused.norm_act(x, w, b, m, "hardswish"), (*axes, 0))(*all, masks)

    def plain(*all: Tensor) -> Tensor:
        own = [[part if axis is None else part[g] for part, axis in zip(all, axes, strict=True)] for g in range(groups)]
        return torch.stack([exact_norm(*each, masks[g], "hardswish") for g, each in enumerate(own)])

    compare(ours, plain, [x, *both], 5e-6)


@interpreted
@pytest.mark.parametrize("dtype", HALVES)
def test_normalisation_in_half_precision(dtype: torch.dtype) -> None:
    x = images(3, 8, 5, 5, dtype=dtype)
    compare(lambda *all: fused.norm_act(*all, None, "silu"), lambda *all: exact_norm(*all, None, "silu"), [x, *vectors(8)])


@interpreted
def test_moments_are_exact_where_means_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module(f"{KERNELS}.normalisation")
    monkeypatch.setattr(kernels, "TILE", 64)  # many tiles, and
    monkeypatch.setattr(kernels, "SUMMING", 10)  # several chunks of them, the last one shorter
    x = images(7, 8, 5, 9) + 1000 * torch.arange(8)[:, None, None]
    x[:1, 1] += 50  # the first tile is unlike the others
    _, mean, variance = fused.norm_act_rows(x, None, None, len(x))
    right, middle = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert ((mean - middle).abs() / middle.abs().clamp(min=1)).max() < 1e-6
    assert ((variance - right).abs() / right).max() < 1e-6


@interpreted
def test_moments_of_the_first_rows_normalise_all() -> None:
    x, (weight, bias), mask = images(5, 24, 3, 3) + 4, vectors(24), torch.arange(24) < 10
    y, mean, variance = fused.norm_act_rows(x, weight, bias, 2, mask, "hardswish")
    torch.testing.assert_close(y.double(), exact_norm(x.double(), weight, bias, mask, "hardswish", 2), rtol=1e-5, atol=5e-6)
    right, middle = torch.var_mean(x[:2].double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(mean.double(), middle * mask, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(variance.double(), torch.where(mask, right, 1.0), rtol=1e-6, atol=1e-6)
    for one, other in zip((y, mean, variance), fused.plain_norm_act_rows(x, weight, bias, 2, mask, "hardswish"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-6)
    scale = torch.rsqrt(variance + EPS) * weight * mask
    torch.testing.assert_close(fused.affine_act(x, scale, bias * mask - mean * scale, "hardswish"), y, rtol=1e-5, atol=5e-6)


@interpreted
def test_moments_of_the_first_rows_of_several_groups() -> None:
    x, (weight, bias), masks = images(3, 4, 8, 3, 3), vectors(8), torch.arange(8) < torch.tensor([[8], [3], [5]])
    axes, several = (0, None, None, None, 0), (x, weight, bias, 2, masks)
    ours = torch.vmap(lambda *all: fused.norm_act_rows(*all, act="silu"), axes)(*several)
    plain = torch.vmap(lambda *all: fused.plain_norm_act_rows(*all, act="silu"), axes)(*several)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-6)
    scales = random(3, 8)
    affine = torch.vmap(fused.affine_act, (0, 0, None))(x, scales, bias)
    torch.testing.assert_close(affine, x * scales[:, None, :, None, None] + bias[:, None, None], rtol=1e-5, atol=5e-6)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels, side", [(24, 9), (8, 1)])
def test_channels_are_weighed_while_they_are_normalised(channels: int, side: int, dtype: torch.dtype) -> None:
    x, masks = images(3, 4, channels, side, side, dtype=dtype), torch.arange(channels) < torch.tensor([[channels], [3], [5]])
    x = x.movedim(2, -1).contiguous().movedim(-1, 2)
    (weight, bias), residual, matrices = (
        vectors(channels),
        images(3, 4, channels, side, side, seed=5, dtype=dtype),
        random(3, channels, channels),
    )

    def gate(means: Tensor) -> Tensor:
        return torch.sigmoid(means.flatten(2).float() @ matrices)[..., None, None].to(dtype)

    near = {"rtol": 1e-5, "atol": 5e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for mask in (None, masks):
        y, *moments = fused.norm_act_rows(x, weight, bias, 2, mask, "hardswish", residual, gate)
        plain, *others = fused.norm_act_rows(x, weight, bias, 2, mask, "hardswish")
        weighed = plain * gate(plain.mean((-2, -1), keepdim=True)) + residual
        torch.testing.assert_close(y, weighed, **near)
        assert all(torch.equal(one, other) for one, other in zip(moments, others, strict=True))
    scales = random(3, channels)
    y, plain = (fused.affine_act(x, scales, bias.expand(3, -1), "relu", None, one) for one in (gate, None))
    torch.testing.assert_close(y, plain * gate(plain.mean((-2, -1), keepdim=True)), **near)


@interpreted
def test_masked_channels_may_hold_anything() -> None:
    x, mask = images(2, 8, 3, 3), torch.arange(8) < 6
    x[:, 6:] = torch.nan
    leaves = [x.requires_grad_(), *(part.requires_grad_() for part in vectors(8))]
    y = fused.norm_act(*leaves, mask, "silu")
    assert y.isfinite().all() and all(part.isfinite().all() for part in torch.autograd.grad(y.square().sum(), leaves))


@interpreted
def test_numbers_that_are_not_finite_stay_so() -> None:
    x = images(2, 8, 3, 3)
    x[0, 0, 0, 0] = torch.nan
    for act in ACTS:
        y = fused.norm_act(x, *vectors(8), None, act)
        assert y[:, 0].isnan().all() and y[:, 1:].isfinite().all()


# -- joint normalisation of tokens and channels ----------------------------------------------------------------------------
@interpreted
@pytest.mark.parametrize("tokens, channels, widths", [(9, 24, (16, 24, 8)), (64, 72, (64, 72, 64)), (3, 8, (8, 8, 8))])
def test_joint_normalisation_of_several_groups(tokens: int, channels: int, widths: tuple[int, ...]) -> None:
    width = torch.tensor(widths)
    x = torch.where(torch.arange(channels) < width[:, None, None, None], random(3, 1 + (tokens < 10), tokens, channels) + 1, 0.0)
    given = [x, *vectors(3, channels)]  # weights are not zero where x is: they must not be looked at
    exactly = partial(exact_joint_norm, widths=widths)
    compare(lambda *all: torch.vmap(joint_norm)(*all, width), exactly, given, 1e-5)
    compare(lambda *all: torch.vmap(joint_norm)(*all, width), exactly, [part.bfloat16() for part in given], 2e-2)
    compare(
        lambda x, w, b: torch.vmap(joint_norm, in_dims=(0, None, None, 0))(x, w[0], b[0], width),
        lambda x, w, b: exactly(x, w[:1].expand(3, -1), b[:1].expand(3, -1)),
        given,
        1e-5,
    )
    with torch.no_grad():
        assert error(joint_norm(*given, width), exactly(*(part.double() for part in given))) < 1e-5
        shared = joint_norm(x, given[1][0], given[2][0], width)
        assert error(shared, exactly(*(part.double() for part in (x, *(part[:1].expand(3, -1) for part in given[1:]))))) < 1e-5


# -- cells of DARTS --------------------------------------------------------------------------------------------------------
@interpreted
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("maximum", [True, False], ids=["maximum", "mean"])
@pytest.mark.parametrize("channels, side", [(20, 5), (8, 1)])
def test_pools_of_several_networks(channels: int, side: int, maximum: bool, stride: int) -> None:
    x = images(2, 1, channels, side, side) - 3  # below zero: what lies outside is not a zero
    torch.testing.assert_close(pooled(x, maximum, stride), torch.stack([pooled(one, maximum, stride) for one in x]))
    half = x.bfloat16()
    torch.testing.assert_close(pooled(half, maximum, stride), torch.stack([pooled(one, maximum, stride) for one in half]))
    x[0, 0, 0, 0, 0] = torch.nan
    assert pooled(x, maximum, stride).isnan().sum() == torch.stack([pooled(one, maximum, stride) for one in x]).isnan().sum() > 0


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_rows(dtype: torch.dtype) -> None:
    """Of three rows, of none, of one, of none at the end; rows before and after stay."""
    rows = random(9, 4, 5, dtype=dtype)
    terms, starts = torch.tensor([0, 2, 3, 1]), torch.tensor([0, 3, 3, 4])
    expected = rows.clone()
    expected[4], expected[5], expected[6], expected[7] = rows[[0, 2, 3]].float().sum(0), 0, rows[1], 0
    found = rows.clone()
    add_rows(found, terms, starts, 4)
    torch.testing.assert_close(found, expected)
    add_rows(found, terms[:0], starts[:1], 8)
    assert not found[8].any() and torch.equal(found[:4], rows[:4])


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_picked_side_by_side(dtype: torch.dtype) -> None:
    rows, index = random(5, 2, 3, 3, 20, dtype=dtype), torch.tensor([4, 0, 1, 1, 3, 2])
    rows[0, 0, 0, 0, 0] = torch.nan
    for rectify in (False, True):
        expected = F.relu(rows) if rectify else rows
        torch.testing.assert_close(pick_rows(rows, index, rectify=rectify), expected[index], equal_nan=True)
        beside = torch.cat([expected[index[0::2]], expected[index[1::2]]], -1)
        torch.testing.assert_close(pick_rows(rows, index, 2, rectify), beside, equal_nan=True)


# -- squeeze-excite --------------------------------------------------------------------------------------------------------
@interpreted
@pytest.mark.parametrize("shape", [(3, 8, 4, 4), (2, 20, 3, 5), (1, 136, 7, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_weighed_by_what_the_map_shows(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "runs", lambda x: True)  # also one network in full precision
    bound = 0.03 if dtype == torch.bfloat16 else None  # units and gates are rounded to eight bits before they are used
    compare(squeezed_by, exactly_squeezed, [images(*shape, dtype=dtype), *layers(shape[1], dtype=dtype)], bound)
    hidden = torch.arange(UNITS) < 8
    arms = [partial(function, hidden=hidden) for function in (squeezed_by, exactly_squeezed)]
    compare(*arms, [images(*shape, dtype=dtype), *layers(shape[1], dtype=dtype)], bound)


@interpreted
def test_channels_weighed_in_groups() -> None:
    x, hidden = images(2, 3, 8, 4, 4), torch.arange(UNITS) < torch.tensor([[8], [16]])

    def each(x: Tensor, *given: Tensor) -> Tensor:
        rows = (exactly_squeezed(*one, hidden=there) for *one, there in zip(x, *given, hidden, strict=True))
        return torch.stack([*rows])

    def ours(x: Tensor, *given: Tensor) -> Tensor:
        return torch.vmap(lambda x, there, *own: squeezed_by(x, *own, hidden=there))(x, hidden, *given)

    compare(ours, each, [x, *layers(8, (2,))])
    compare(  # weights that all groups share
        lambda x, *given: torch.vmap(squeezed_by, in_dims=(0, None, None, None, None))(x, *given),
        lambda x, *given: torch.stack([exactly_squeezed(one, *given) for one in x]),
        [x, *layers(8)],
    )
    gate = random(2, 3, 8, 1, 1, seed=1)
    with torch.no_grad():
        for found in (torch.vmap(fused.gated)(x, gate), fused.gated(x, gate)):
            torch.testing.assert_close(found, x * gate)


# -- without kernels -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_a_gpu_torch_computes_the_same(dtype: torch.dtype) -> None:
    x, weight = images(3, 8, 5, 5, dtype=dtype), random(8, 1, 7, 7, seed=1)
    close = 1e-12 if dtype == torch.float64 else 5e-6 if dtype == torch.float32 else 2e-2
    compare(fused.depthwise, lambda x, w: F.conv2d(x, w, None, 1, 3, 1, 8), [x, weight.to(dtype)], close)
    both = [part.double() if dtype == torch.float64 else part for part in vectors(8)]
    compare(lambda *all: fused.norm_act(*all, None, "silu"), lambda *all: exact_norm(*all, None, "silu"), [x, *both], close)
