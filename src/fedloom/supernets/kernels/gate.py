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
def gate_kernel(x, gate, y, pixels, units, UNIT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """y = x * gate."""
    c = units * UNIT
    parts, blocks = tl.cdiv(c, BC), tl.cdiv(pixels, BR)
    pid = tl.program_id(0)
    image, block, part = (pid // (parts * blocks)).to(tl.int64), pid // parts % blocks, pid % parts
    channel = part * BC + tl.arange(0, BC)
    row = block * BR + tl.arange(0, BR)[:, None]
    there = (row < pixels) & (channel < c)[None, :]
    factor = tl.load(gate + image * c + channel, mask=channel < c, other=0.0).to(tl.float32)
    places = image * pixels * c + row * c + channel[None, :]
    tl.store(y + places, tl.load(x + places, mask=there, other=0.0).to(tl.float32) * factor[None, :], mask=there)


@triton.jit(do_not_specialize=["pixels", "units"])
def gate_gradient_kernel(x, gate, dy, dx, dgate, pixels, units, UNIT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """dx = dy * gate; dgate is the sum of dy * x over the pixels of an image."""
    c = units * UNIT
    parts = tl.cdiv(c, BC)
    pid = tl.program_id(0)
    image, part = (pid // parts).to(tl.int64), pid % parts
    channel = part * BC + tl.arange(0, BC)
    factor = tl.load(gate + image * c + channel, mask=channel < c, other=0.0).to(tl.float32)
    sums = tl.zeros((BR, BC), tl.float32)
    for start in range(0, pixels, BR):
        row = start + tl.arange(0, BR)[:, None]
        there = (row < pixels) & (channel < c)[None, :]
        places = image * pixels * c + row * c + channel[None, :]
        slope = tl.load(dy + places, mask=there, other=0.0).to(tl.float32)
        sums += slope * tl.load(x + places, mask=there, other=0.0).to(tl.float32)
        tl.store(dx + places, slope * factor[None, :], mask=there)
    tl.store(dgate + image * c + channel, tl.sum(sums, 0), mask=channel < c)


# -- launches -----------------------------------------------------------------------------------------------------------
def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x: (groups, n, h, w, c), gate: (groups, n, c), both dense."""
    (images, pixels, lanes, tall), (units, unit) = _by_image(x), in_units(x.shape[-1])
    y = x.new_empty(x.shape)
    with torch.cuda.device_of(x):
        blocks = images * -(-pixels // tall) * -(-x.shape[-1] // lanes)
        launch(gate_kernel, blocks, x, gate, y, pixels, units, unit, tall, lanes, num_warps=4)
    return y


def gated_gradients(x: Tensor, gate: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dgate."""
    (images, pixels, lanes, tall), (units, unit) = _by_image(x), in_units(x.shape[-1])
    dx, dgate = x.new_empty(x.shape), gate.new_empty(gate.shape)
    with torch.cuda.device_of(x):
        blocks = images * -(-x.shape[-1] // lanes)
        launch(gate_gradient_kernel, blocks, x, gate, dy, dx, dgate, pixels, units, unit, tall, lanes, num_warps=4)
    return dx, dgate


def _by_image(x: Tensor) -> tuple[int, int, int, int]:
    """Images, their pixels, and channels and rows of a tile."""
    groups, n, h, w, c = x.shape
    lanes = block_lanes(c, 128, 1.25)
    return groups * n, h * w, lanes, min(TILE // 2 // lanes, triton.next_power_of_2(h * w))
