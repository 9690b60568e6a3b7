"""Channels weighed by image, as squeeze-excite does, and the gradients: kernels, then their launches.

x is (images, pixels, c) and gate (images, c), whatever groups the images belong to.
"""

# mypy: disable-error-code="assignment, import-not-found, import-untyped, misc, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.supernets.kernels.launch import TILE, block_lanes, in_units, launch


@triton.jit(do_not_specialize=["pixels", "units"])
def weigh_kernel(x, gate, share, y, pixels, units, UNIT: tl.constexpr, HAS_SHARE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """y = x * gate + share / pixels."""
    c = units * UNIT
    parts, blocks = tl.cdiv(c, BC), tl.cdiv(pixels, BR)
    pid = tl.program_id(0)
    image, block, part = (pid // (parts * blocks)).to(tl.int64), pid // parts % blocks, pid % parts
    channel = part * BC + tl.arange(0, BC)
    row = block * BR + tl.arange(0, BR)[:, None]
    there = (row < pixels) & (channel < c)[None, :]
    factor = tl.load(gate + image * c + channel, mask=channel < c, other=0.0).to(tl.float32)
    places = image * pixels * c + row * c + channel[None, :]
    value = tl.load(x + places, mask=there, other=0.0).to(tl.float32) * factor[None, :]
    if HAS_SHARE:
        value += tl.load(share + image * c + channel, mask=channel < c, other=0.0).to(tl.float32)[None, :] / pixels
    tl.store(y + places, value, mask=there)


@triton.jit(do_not_specialize=["pixels", "units", "scale"])
def gate_gradient_kernel(x, dy, dgate, pixels, units, scale, UNIT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """dgate = scale times the sum of dy * x over the pixels of an image."""
    c = units * UNIT
    parts = tl.cdiv(c, BC)
    pid = tl.program_id(0)
    image, part = (pid // parts).to(tl.int64), pid % parts
    channel = part * BC + tl.arange(0, BC)
    sums = tl.zeros((BR, BC), tl.float32)
    for start in range(0, pixels, BR):
        row = start + tl.arange(0, BR)[:, None]
        there = (row < pixels) & (channel < c)[None, :]
        places = image * pixels * c + row * c + channel[None, :]
        slope = tl.load(dy + places, mask=there, other=0.0).to(tl.float32)
        sums += slope * tl.load(x + places, mask=there, other=0.0).to(tl.float32)
    tl.store(dgate + image * c + channel, scale * tl.sum(sums, 0), mask=channel < c)


# -- launches -----------------------------------------------------------------------------------------------------------
def weighed(x: Tensor, gate: Tensor, share: Tensor | None = None) -> Tensor:
    """x * gate, and every pixel its part of the share. x: (groups, n, h, w, c), gate, share: (groups, n, c); all dense."""
    (images, pixels, lanes, tall), (units, unit) = _by_image(x), in_units(x.shape[-1])
    y = x.new_empty(x.shape)
    with torch.cuda.device_of(x):
        blocks = images * -(-pixels // tall) * -(-x.shape[-1] // lanes)
        given = (gate, gate if share is None else share)
        launch(weigh_kernel, blocks, x, *given, y, pixels, units, unit, share is not None, tall, lanes, num_warps=4)
    return y


def gate_gradient(x: Tensor, dy: Tensor, scale: float) -> Tensor:
    """(groups, n, c) of the gate, times scale."""
    (images, pixels, lanes, tall), (units, unit) = _by_image(x), in_units(x.shape[-1])
    groups, n, *_, c = x.shape
    dgate = x.new_empty(groups, n, c)
    with torch.cuda.device_of(x):
        launch(gate_gradient_kernel, images * -(-c // lanes), x, dy, dgate, pixels, units, scale, unit, tall, lanes, num_warps=4)
    return dgate


def _by_image(x: Tensor) -> tuple[int, int, int, int]:
    """Images, their pixels, and channels and rows of a tile."""
    groups, n, h, w, c = x.shape
    lanes = block_lanes(c, 128, 1.25)
    return groups * n, h * w, lanes, min(TILE // 2 // lanes, triton.next_power_of_2(h * w))
