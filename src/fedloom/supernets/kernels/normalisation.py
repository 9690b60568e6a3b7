"""Normalisation with its activation, and the gradients: kernels, then their launches.

x is (groups, rows, c), where a row is a pixel. c is passed as ``units`` of UNIT channels: that c is a multiple of eight tells the
compiler that it may load several channels at once. Vectors over channels are ``step`` numbers apart, 0 where all groups share
them.
"""

# mypy: disable-error-code="assignment, import-not-found, import-untyped, misc, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.supernets.kernels.launch import TILE, block_lanes, group_step, in_units, launch

SUMMING = 512  # blocks of a sum over pixels; each has a beginning and an end of its own, so few are faster, down to a GPU's fill
WASTE = 1.1  # a block may have this many times the channels that there are
CHUNKS = 512  # most parts of a sum over pixels, so that adding them up takes little time


@triton.jit
def _activated(z, ACT: tl.constexpr):
    if ACT == "relu":
        return tl.where(z < 0, 0.0, z)  # not a maximum, which would hide NaN
    elif ACT == "hardswish":
        return z * tl.minimum(tl.maximum(z + 3.0, 0.0), 6.0) * 0.16666666666666666  # a division takes many instructions
    elif ACT == "silu":
        return z / (1.0 + tl.exp(-z))
    else:
        return z


@triton.jit
def _slope(z, ACT: tl.constexpr):
    if ACT == "relu":
        return tl.where(z > 0, 1.0, 0.0)
    elif ACT == "hardswish":
        return tl.where(z <= -3.0, 0.0, tl.where(z < 3.0, z * 0.3333333333333333 + 0.5, 1.0))
    elif ACT == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-z))
        return sigmoid * (1.0 + z * (1.0 - sigmoid))
    else:
        return tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def _channels(mask, group, mask_step, channel, c, HAS_MASK: tl.constexpr):
    """Which channels are there and not masked out."""
    live = channel < c
    if HAS_MASK:
        live = live & (tl.load(mask + group * mask_step * c + channel, mask=live, other=0) != 0)
    return live


@triton.jit
def _read(channel, live, c, HAS_MASK: tl.constexpr):
    """(1, channels) which to read of a map: all that are there, so that several are read at once, unless none is live."""
    read = channel < c
    if HAS_MASK:
        read = read & (tl.max(live.to(tl.int32), 0) > 0)
    return read[None, :]


@triton.jit
def _only(value, live, HAS_MASK: tl.constexpr):
    """Zero where a channel is masked out, whatever it held."""
    if HAS_MASK:
        return tl.where(live[None, :], value, 0.0)
    else:
        return value


@triton.jit
def _vector(vector, group, step, channel, live, c, HAS: tl.constexpr, NONE: tl.constexpr):
    """(1, channels) numbers of a group, zero where a channel is masked out; NONE where there is no vector."""
    if HAS:
        found = tl.load(vector + group.to(tl.int64) * step + channel, mask=live, other=0.0).to(tl.float32)
    else:
        found = tl.where(live, NONE, 0.0)
    return found[None, :]


@triton.jit(do_not_specialize=["rows", "each", "chunks", "units", "x_step", "mask_step"])
def moments_kernel(
    x, mask, partial, rows, each, chunks, units, x_step, mask_step,
    UNIT: tl.constexpr, HAS_MASK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """partial: (groups, chunks, 2, c), mean and sum of squared deviations of ``each`` rows. x_step: rows between groups.

    Sums are of differences to the mean of the chunk's first tile. So they lose no digits where means are large, and at most those of
    the number of tiles where the first is unlike the others. For the same reason means are stored less the group's first row.
    """
    c = units * UNIT
    parts = tl.cdiv(c, BC)
    pid = tl.program_id(0)
    group, chunk, part = pid // (parts * chunks), pid // parts % chunks, pid % parts
    channel = part * BC + tl.arange(0, BC)
    live = _channels(mask, group, mask_step, channel, c, HAS_MASK)
    begin = chunk * each
    count = tl.minimum(each, rows - begin)
    x += group.to(tl.int64) * x_step * c
    origin = tl.load(x + channel, mask=live, other=0.0).to(tl.float32)
    x += tl.cast(begin, tl.int64) * c
    place = tl.arange(0, BR)[:, None]
    offsets = place * c + channel[None, :]
    read = _read(channel, live, c, HAS_MASK)
    first = tl.load(x + offsets, mask=(place < count) & read, other=0.0).to(tl.float32)
    shift = tl.sum(first, 0) / tl.minimum(count, BR).to(tl.float32)
    sums = tl.zeros((BR, BC), tl.float32)
    squares = tl.zeros((BR, BC), tl.float32)
    whole = count // BR * BR
    for _ in range(0, whole, BR):
        value = tl.load(x + offsets, mask=read, other=0.0).to(tl.float32) - shift[None, :]
        sums += value
        squares += value * value
        x += BR * c
    if whole < count:
        there = whole + place < count
        value = tl.load(x + offsets, mask=there & read, other=0.0).to(tl.float32)
        value = tl.where(there, value - shift[None, :], 0.0)
        sums += value
        squares += value * value
    total = tl.sum(sums, 0)
    number = count.to(tl.float32)
    partial += (group.to(tl.int64) * chunks + chunk) * (2 * c) + channel
    tl.store(partial, (shift - origin) + total / number, mask=channel < c)
    tl.store(partial + c, tl.sum(squares, 0) - total * (total / number), mask=channel < c)


@triton.jit(do_not_specialize=["rows", "each", "chunks", "c", "x_step", "mask_step"])
def moments_total_kernel(
    x, partial, mask, moments, rows, each, chunks, c, x_step, mask_step, eps,
    HAS_MASK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """moments: (groups, 3, c), mean, biased variance and 1 / sqrt(variance + eps); 0 and 1 where masked out. Chan et al., 1979."""
    parts = tl.cdiv(c, BC)
    pid = tl.program_id(0)
    group, part = pid // parts, pid % parts
    channel = part * BC + tl.arange(0, BC)
    live = _channels(mask, group, mask_step, channel, c, HAS_MASK)
    partial += group.to(tl.int64) * chunks * (2 * c) + channel[None, :]
    place = tl.arange(0, BR)[:, None]
    origin = tl.load(x + group.to(tl.int64) * x_step * c + channel[None, :], mask=live[None, :], other=0.0).to(tl.float32)
    sums = tl.zeros((BR, BC), tl.float32)
    for start in range(0, chunks, BR):
        chunk = start + place
        there = (chunk < chunks) & live[None, :]
        number = tl.minimum(each, rows - chunk * each).to(tl.float32)
        mean = tl.load(partial + chunk * (2 * c), mask=there, other=0.0)
        sums += tl.where(there, number * mean, 0.0)
    further = tl.sum(sums, 0)[None, :] / rows
    squares = tl.zeros((BR, BC), tl.float32)
    for start in range(0, chunks, BR):
        chunk = start + place
        there = (chunk < chunks) & live[None, :]
        number = tl.minimum(each, rows - chunk * each).to(tl.float32)
        mean = tl.load(partial + chunk * (2 * c), mask=there, other=0.0)
        within = tl.load(partial + chunk * (2 * c) + c, mask=there, other=0.0)
        away = mean - further
        squares += tl.where(there, within + number * away * away, 0.0)
    variance = tl.sum(squares, 0)[None, :] / rows
    variance = tl.where(live[None, :], tl.where(variance < 0, 0.0, variance), 1.0)
    inverse = tl.div_rn(tl.full(variance.shape, 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    moments += group * 3 * c + channel[None, :]
    tl.store(moments, origin + further, mask=(channel < c)[None, :])
    tl.store(moments + c, variance, mask=(channel < c)[None, :])
    tl.store(moments + 2 * c, inverse, mask=(channel < c)[None, :])


@triton.jit(do_not_specialize=["rows", "pixels", "units", "x_step", "residual_step", "weight_step", "bias_step", "mask_step"])
def apply_kernel(
    x, moments, weight, bias, mask, gate, residual, y, rows, pixels, units, x_step, residual_step, weight_step, bias_step, mask_step,
    UNIT: tl.constexpr, HAS_MOMENTS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = act((x - mean) * inverse * weight + bias) * gate + residual. gate: (groups, images, c), of ``pixels`` rows each."""
    c = units * UNIT
    parts, blocks = tl.cdiv(c, BC), tl.cdiv(rows, BR)
    pid = tl.program_id(0)
    group, block, part = pid // (parts * blocks), pid // parts % blocks, pid % parts
    channel = part * BC + tl.arange(0, BC)
    live = _channels(mask, group, mask_step, channel, c, HAS_MASK)
    row = block * BR + tl.arange(0, BR)[:, None]
    offsets = tl.arange(0, BR)[:, None] * c + channel[None, :]
    scale = _vector(weight, group, weight_step, channel, live, c, HAS_WEIGHT, 1.0)
    shift = _vector(bias, group, bias_step, channel, live, c, HAS_BIAS, 0.0)
    there = (row < rows) & _read(channel, live, c, HAS_MASK)
    z = tl.load(x + (group.to(tl.int64) * x_step + block * BR) * c + offsets, mask=there, other=0.0).to(tl.float32)
    if HAS_MOMENTS:
        z -= _vector(moments, group, 3 * c, channel, live, c, True, 0.0)
        scale *= _vector(moments + 2 * c, group, 3 * c, channel, live, c, True, 1.0)
    z = _activated(_only(z * scale + shift, live, HAS_MASK), ACT)
    keep = (row < rows) & (channel < c)[None, :]
    if HAS_GATE:
        image = group.to(tl.int64) * (rows // pixels) + row // pixels
        z *= tl.load(gate + image * c + channel[None, :], mask=keep, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        z += tl.load(residual + (group.to(tl.int64) * residual_step + block * BR) * c + offsets, mask=keep, other=0.0).to(tl.float32)
    tl.store(y + (group.to(tl.int64) * rows + block * BR) * c + offsets, z, mask=keep)


@triton.jit(do_not_specialize=["images", "pixels", "units", "x_step", "weight_step", "bias_step", "mask_step"])
def means_kernel(
    x, moments, weight, bias, mask, means, images, pixels, units, x_step, weight_step, bias_step, mask_step,
    UNIT: tl.constexpr, HAS_MOMENTS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    ACT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """means: (groups, images, c), over the pixels of an image, of act((x - mean) * inverse * weight + bias)."""
    c = units * UNIT
    parts = tl.cdiv(c, BC)
    pid = tl.program_id(0)
    place, part = pid // parts, pid % parts
    group, image = (place // images).to(tl.int64), place % images
    channel = part * BC + tl.arange(0, BC)
    live = _channels(mask, group, mask_step, channel, c, HAS_MASK)
    scale = _vector(weight, group, weight_step, channel, live, c, HAS_WEIGHT, 1.0)
    shift = _vector(bias, group, bias_step, channel, live, c, HAS_BIAS, 0.0)
    if HAS_MOMENTS:
        scale *= _vector(moments + 2 * c, group, 3 * c, channel, live, c, True, 1.0)
        mean = _vector(moments, group, 3 * c, channel, live, c, True, 0.0)
    x += (group * x_step + image * pixels) * c
    sums = tl.zeros((BR, BC), tl.float32)
    for start in range(0, pixels, BR):
        row = start + tl.arange(0, BR)[:, None]
        there = (row < pixels) & _read(channel, live, c, HAS_MASK)
        z = tl.load(x + row * c + channel[None, :], mask=there, other=0.0).to(tl.float32)
        if HAS_MOMENTS:
            z -= mean
        sums += tl.where(row < pixels, _activated(_only(z * scale + shift, live, HAS_MASK), ACT), 0.0)
    tl.store(means + tl.cast(place, tl.int64) * c + channel, tl.sum(sums, 0) / pixels, mask=channel < c)


@triton.jit(do_not_specialize=["rows", "each", "chunks", "units", "x_step", "dy_step", "weight_step", "bias_step", "mask_step"])
def gradient_sums_kernel(
    x, dy, moments, weight, bias, mask, partial, rows, each, chunks, units, x_step, dy_step, weight_step, bias_step, mask_step,
    UNIT: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    ACT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """partial: (groups, chunks, 2, c), the sums of dz and dz * normalised over ``each`` rows; dz is the gradient before act."""
    c = units * UNIT
    parts = tl.cdiv(c, BC)
    pid = tl.program_id(0)
    group, chunk, part = pid // (parts * chunks), pid // parts % chunks, pid % parts
    channel = part * BC + tl.arange(0, BC)
    live = _channels(mask, group, mask_step, channel, c, HAS_MASK)
    begin = chunk * each
    count = tl.minimum(each, rows - begin)
    x += (group.to(tl.int64) * x_step + begin) * c
    dy += (group.to(tl.int64) * dy_step + begin) * c
    place = tl.arange(0, BR)[:, None]
    offsets = place * c + channel[None, :]
    mean = _vector(moments, group, 3 * c, channel, live, c, True, 0.0)
    inverse = _vector(moments + 2 * c, group, 3 * c, channel, live, c, True, 1.0)
    scale = _vector(weight, group, weight_step, channel, live, c, HAS_WEIGHT, 1.0)
    shift = _vector(bias, group, bias_step, channel, live, c, HAS_BIAS, 0.0)
    read = _read(channel, live, c, HAS_MASK)
    sums = tl.zeros((BR, BC), tl.float32)
    products = tl.zeros((BR, BC), tl.float32)
    for start in range(0, count, BR):
        there = (start + place < count) & read
        normalised = _only((tl.load(x + offsets, mask=there, other=0.0).to(tl.float32) - mean) * inverse, live, HAS_MASK)
        dz = _only(tl.load(dy + offsets, mask=there, other=0.0).to(tl.float32), live, HAS_MASK) * _slope(normalised * scale + shift, ACT)
        sums += dz
        products += dz * normalised
        x += BR * c
        dy += BR * c
    partial += (group.to(tl.int64) * chunks + chunk) * (2 * c) + channel
    tl.store(partial, tl.sum(sums, 0), mask=channel < c)
    tl.store(partial + c, tl.sum(products, 0), mask=channel < c)


@triton.jit(do_not_specialize=["chunks", "c"])
def gradient_total_kernel(partial, totals, vectors, chunks, c, BR: tl.constexpr, BC: tl.constexpr):
    """totals: (groups, 2, c), the sums over chunks; vectors: the same in the precision of the weights."""
    parts = tl.cdiv(c, BC)
    pid = tl.program_id(0)
    part, which, group = pid % parts, pid // parts % 2, pid // (2 * parts)
    channel = part * BC + tl.arange(0, BC)[None, :]
    place = tl.arange(0, BR)[:, None]
    partial += (group.to(tl.int64) * chunks * 2 + which) * c + channel
    sums = tl.zeros((BR, BC), tl.float32)
    for start in range(0, chunks, BR):
        chunk = start + place
        sums += tl.load(partial + chunk * (2 * c), mask=(chunk < chunks) & (channel < c), other=0.0)
    total = tl.sum(sums, 0)[None, :]
    tl.store(totals + (group * 2 + which) * c + channel, total, mask=channel < c)
    tl.store(vectors + (group * 2 + which) * c + channel, total, mask=channel < c)


@triton.jit(do_not_specialize=["rows", "units", "x_step", "dy_step", "weight_step", "bias_step", "mask_step"])
def gradient_kernel(
    x, dy, moments, totals, weight, bias, mask, dx, rows, units, x_step, dy_step, weight_step, bias_step, mask_step,
    UNIT: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    ACT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx = inverse * weight * (dz - mean of dz - normalised * mean of dz * normalised)."""
    c = units * UNIT
    parts, blocks = tl.cdiv(c, BC), tl.cdiv(rows, BR)
    pid = tl.program_id(0)
    group, block, part = pid // (parts * blocks), pid // parts % blocks, pid % parts
    channel = part * BC + tl.arange(0, BC)
    live = _channels(mask, group, mask_step, channel, c, HAS_MASK)
    row = block * BR + tl.arange(0, BR)[:, None]
    offsets = tl.arange(0, BR)[:, None] * c + channel[None, :]
    there = (row < rows) & _read(channel, live, c, HAS_MASK)
    mean = _vector(moments, group, 3 * c, channel, live, c, True, 0.0)
    inverse = _vector(moments + 2 * c, group, 3 * c, channel, live, c, True, 1.0)
    scale = _vector(weight, group, weight_step, channel, live, c, HAS_WEIGHT, 1.0)
    shift = _vector(bias, group, bias_step, channel, live, c, HAS_BIAS, 0.0)
    sums = _vector(totals, group, 2 * c, channel, live, c, True, 0.0) / rows
    products = _vector(totals + c, group, 2 * c, channel, live, c, True, 0.0) / rows
    value = tl.load(x + (group.to(tl.int64) * x_step + block * BR) * c + offsets, mask=there, other=0.0).to(tl.float32)
    dz = tl.load(dy + (group.to(tl.int64) * dy_step + block * BR) * c + offsets, mask=there, other=0.0).to(tl.float32)
    normalised = (value - mean) * inverse
    dz *= _slope(normalised * scale + shift, ACT)
    result = _only(inverse * scale * (dz - sums - normalised * products), live, HAS_MASK)
    tl.store(dx + (group.to(tl.int64) * rows + block * BR) * c + offsets, result, mask=(row < rows) & (channel < c)[None, :])


# -- launches -----------------------------------------------------------------------------------------------------------
def _apart(vector: Tensor | None) -> int:
    """Numbers from a group's vector to the next one's; 0 where all share it."""
    return 0 if vector is None or vector.shape[0] == 1 else vector.stride(0)


def _chunked(groups: int, rows: int, c: int) -> tuple[int, int, int, int]:
    """Rows and channels of a tile, rows of a chunk, and chunks."""
    lanes = block_lanes(c, 128, WASTE)
    tall = TILE // 2 // lanes  # its sums stay in registers
    tiles = -(-rows // tall)
    each = -(-tiles // min(CHUNKS, -(-SUMMING // (groups * -(-c // lanes))))) * tall
    return tall, lanes, each, -(-rows // each)


def moments(x: Tensor, mask: Tensor | None, rows: int, eps: float) -> Tensor:
    """(groups, 3, c) mean, variance and inverse deviation of the first ``rows`` images; x: (groups, n, h, w, c), mask: (groups or 1, c)."""
    groups, _, h, w, c = x.shape
    rows *= h * w
    tall, lanes, each, chunks = _chunked(groups, rows, c)
    units, unit = in_units(c)
    partial = x.new_empty(groups, chunks, 2, c, dtype=torch.float32)
    found = x.new_empty(groups, 3, c, dtype=torch.float32)
    masked = x if mask is None else mask
    mask_step = group_step(mask, c)
    with torch.cuda.device_of(x):
        launch(
            moments_kernel, groups * chunks * -(-c // lanes),
            x, masked, partial, rows, each, chunks, units, group_step(x, c), mask_step,
            unit, mask is not None, tall, lanes, num_warps=4,
        )  # fmt: skip
        launch(
            moments_total_kernel, groups * -(-c // 16),
            x, partial, masked, found, rows, each, chunks, c, group_step(x, c), mask_step, eps,
            mask is not None, CHUNKS // 2, 16, num_warps=4,
        )  # fmt: skip
    return found


def apply(
    x: Tensor, found: Tensor | None, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, residual: Tensor | None, act: str,
    gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Normalised by the moments ``found``, or without them only scaled and shifted; then act, then weighed by the gate, (groups, n, c) and
    dense, then the residual added."""
    groups, n, h, w, c = x.shape
    rows, (units, unit) = n * h * w, in_units(c)
    lanes = block_lanes(c, 128, WASTE)
    tall = TILE // lanes
    y = x.new_empty(x.shape)
    parts = (found, weight, bias, mask, gate, residual)
    steps = (group_step(x, c), group_step(residual, c), _apart(weight), _apart(bias), group_step(mask, c))
    with torch.cuda.device_of(x):
        launch(
            apply_kernel, groups * -(-rows // tall) * -(-c // lanes),
            x, *(x if part is None else part for part in parts), y, rows, h * w, units, *steps,
            unit, *(part is not None for part in parts), act, tall, lanes, num_warps=4,
        )  # fmt: skip
    return y


def pooled(x: Tensor, found: Tensor | None, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, act: str) -> Tensor:
    """(groups, n, c): the means over an image's pixels of what ``apply`` gives."""
    groups, n, h, w, c = x.shape
    units, unit = in_units(c)
    lanes = block_lanes(c, 128, WASTE)
    tall = min(TILE // 2 // lanes, triton.next_power_of_2(h * w))
    means = x.new_empty(groups, n, c)
    parts = (found, weight, bias, mask)
    steps = (group_step(x, c), _apart(weight), _apart(bias), group_step(mask, c))
    with torch.cuda.device_of(x):
        launch(
            means_kernel, groups * n * -(-c // lanes),
            x, *(x if part is None else part for part in parts), means, n, h * w, units, *steps,
            unit, *(part is not None for part in parts), act, tall, lanes, num_warps=4,
        )  # fmt: skip
    return means


def gradients(
    x: Tensor, dy: Tensor, found: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, act: str,
    dtype: torch.dtype, of_x: bool = True,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """dx, if asked for, and (groups, 2, c) the gradients of bias and weight by group, in this precision."""
    groups, n, h, w, c = x.shape
    rows, (units, unit) = n * h * w, in_units(c)
    tall, lanes, each, chunks = _chunked(groups, rows, c)
    partial = x.new_empty(groups, chunks, 2, c, dtype=torch.float32)
    totals = x.new_empty(groups, 2, c, dtype=torch.float32)
    vectors = totals if dtype == torch.float32 else x.new_empty(groups, 2, c, dtype=dtype)
    given = [x if part is None else part for part in (weight, bias, mask)]
    steps = (group_step(x, c), group_step(dy, c), _apart(weight), _apart(bias), group_step(mask, c))
    flags = (unit, weight is not None, bias is not None, mask is not None, act)
    dx = x.new_empty(x.shape) if of_x else None
    with torch.cuda.device_of(x):
        launch(
            gradient_sums_kernel, groups * chunks * -(-c // lanes),
            x, dy, found, *given, partial, rows, each, chunks, units, *steps, *flags, tall, lanes, num_warps=4,
        )  # fmt: skip
        launch(gradient_total_kernel, 2 * groups * -(-c // 16), partial, totals, vectors, chunks, c, CHUNKS // 2, 16, num_warps=4)
        if dx is not None:
            launch(
                gradient_kernel, groups * -(-rows // tall) * -(-c // lanes),
                x, dy, found, totals, *given, dx, rows, units, *steps, *flags, tall, lanes, num_warps=4,
            )  # fmt: skip
    return dx, vectors
