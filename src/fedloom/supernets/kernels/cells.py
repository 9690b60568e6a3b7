"""What a cell of DARTS does besides convolutions, for many networks: pools, sums and copies of maps. Kernels, then their launches.

Maps are (rows, n, h, w, c), dense. Sums are in float32, whatever the precision.
"""

# mypy: disable-error-code="assignment, import-not-found, import-untyped, misc, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.supernets.kernels.launch import TILE, block_lanes, in_units, launch


@triton.jit(do_not_specialize=["units", "count", "total", "first"])
def sums_kernel(maps, terms, starts, units, count, total, first, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Row ``first`` + i becomes the sum of the rows that ``terms`` has from the i-th start to the next."""
    features = units * UNIT
    blocks = tl.cdiv(features, BLOCK)
    pid = tl.program_id(0)
    bag, block = pid // blocks, pid % blocks
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < features
    begin = tl.load(starts + bag)
    end = total.to(tl.int64)
    if bag + 1 < count:
        end = tl.load(starts + bag + 1)
    made = tl.zeros((BLOCK,), tl.float32)
    for term in range(begin, end):
        row = tl.load(terms + term).to(tl.int64)
        made += tl.load(maps + row * features + place, mask=there, other=0.0).to(tl.float32)
    tl.store(maps + (first + bag).to(tl.int64) * features + place, made, mask=there)


@triton.jit(do_not_specialize=["pixels", "units", "beside"])
def picked_kernel(maps, index, y, pixels, units, beside, UNIT: tl.constexpr, RECTIFY: tl.constexpr, BLOCK: tl.constexpr):
    """``beside`` rows at a time, by an index, side by side in channels; rectified or as they are."""
    c = units * UNIT
    features = pixels * c
    blocks = tl.cdiv(features, BLOCK)
    pid = tl.program_id(0)
    number, block = pid // blocks, pid % blocks  # in the index
    place = block * BLOCK + tl.arange(0, BLOCK)
    there = place < features
    row = tl.load(index + number).to(tl.int64)
    x = tl.load(maps + row * features + place, mask=there, other=0.0)
    if RECTIFY:
        x = tl.where(x < 0, 0.0, x)  # not a maximum, which would hide NaN
    made, part = (number // beside).to(tl.int64), number % beside
    tl.store(y + made * features * beside + place // c * (c * beside) + part * c + place % c, x, mask=there)


@triton.jit(do_not_specialize=["h", "w", "units", "high", "wide"])
def pool_kernel(
    x, y, h, w, units, high, wide, UNIT: tl.constexpr, MAXIMUM: tl.constexpr, STRIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """The maximum or the mean of 3x3 pixels around every ``STRIDE``-th one; what lies outside of the map does not count."""
    c = units * UNIT
    parts, blocks = tl.cdiv(c, BC), tl.cdiv(high * wide, BR)
    pid = tl.program_id(0)
    image, block, part = (pid // (parts * blocks)).to(tl.int64), pid // parts % blocks, pid % parts
    channel = (part * BC + tl.arange(0, BC))[None, :]
    pixel = block * BR + tl.arange(0, BR)
    wanted = (pixel < high * wide)[:, None] & (channel < c)
    top, left = pixel // wide * STRIDE - 1, pixel % wide * STRIDE - 1
    found = tl.full((BR, BC), float("-inf") if MAXIMUM else 0.0, tl.float32)
    number = tl.zeros((BR, 1), tl.float32)
    for tap in tl.static_range(9):
        i, j = top + tap // 3, left + tap % 3
        inside = ((i >= 0) & (i < h) & (j >= 0) & (j < w))[:, None]
        places = (image * h * w + i * w + j)[:, None] * c + channel
        if MAXIMUM:
            seen = tl.load(x + places, mask=inside & wanted, other=float("-inf")).to(tl.float32)
            found = tl.where((seen > found) | (seen != seen), seen, found)  # no number stays one, as in torch
        else:
            found += tl.load(x + places, mask=inside & wanted, other=0.0).to(tl.float32)
            number += inside.to(tl.float32)
    if not MAXIMUM:
        found = found / tl.where(number > 0, number, 1.0)
    tl.store(y + (image * high * wide + pixel)[:, None] * c + channel, found, mask=wanted)


# -- launches -----------------------------------------------------------------------------------------------------------
def sums(rows: Tensor, terms: Tensor, starts: Tensor, first: int) -> None:
    """Writes a row for each of ``starts``, from row ``first`` on: the sum of the rows in its part of ``terms``, which may be empty."""
    features = rows[0].numel()
    block = min(TILE, triton.next_power_of_2(features))
    with torch.cuda.device_of(rows):
        blocks, (units, unit) = len(starts) * -(-features // block), in_units(features)
        launch(sums_kernel, blocks, rows, terms, starts, units, len(starts), len(terms), first, unit, block)


def picked(rows: Tensor, index: Tensor, beside: int, rectify: bool) -> Tensor:
    """(len(index) / beside, n, h, w, c * beside)."""
    features, c = rows[0].numel(), rows.shape[-1]
    y = rows.new_empty(len(index) // beside, *rows.shape[1:-1], c * beside)
    block = min(TILE // 2, triton.next_power_of_2(features))
    with torch.cuda.device_of(rows):
        blocks, (units, unit) = len(index) * -(-features // block), in_units(c)
        launch(picked_kernel, blocks, rows, index, y, features // c, units, beside, unit, rectify, block)
    return y


def pooled(x: Tensor, maximum: bool, stride: int) -> Tensor:
    """3x3 pools of (rows, n, h, w, c)."""
    rows, n, h, w, c = x.shape
    high, wide = -(-h // stride), -(-w // stride)
    y = x.new_empty(rows, n, high, wide, c)
    lanes = block_lanes(c, 128, 1.25)
    tall = min(TILE // 4 // lanes, triton.next_power_of_2(high * wide))
    with torch.cuda.device_of(x):
        blocks, (units, unit) = rows * n * -(-high * wide // tall) * -(-c // lanes), in_units(c)
        launch(pool_kernel, blocks, x, y, h, w, units, high, wide, unit, maximum, stride, tall, lanes)
    return y
