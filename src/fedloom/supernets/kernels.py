"""Triton kernels of ``fused.py`` and their launches. Only that module imports this one, and only where Triton will be used.

Maps are (groups, images, rows, columns, channels), each group dense; every tensor of another group may be the same one (step 0).
A group is one architecture of a masked pass. Sums are in float32 and in a fixed order: a result never depends on chance.
No launch reads anything back, so all of them can be captured in a CUDA graph.

Sizes are not specialised: one compiled kernel serves all widths and batches of a kernel size, stride and precision.
"""

# mypy: disable-error-code="assignment, import-not-found, import-untyped, misc, no-untyped-def"
from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 32  # channels of a depth-wise block: one per thread of a warp, so that a thread keeps the weights of one channel
COLUMNS = 16  # columns of a depth-wise block, four per thread
FEW = 4  # columns of a block where there are too few blocks to fill a GPU
PROGRAMS = 1024  # blocks that fill a large GPU; only speed and the order of sums depend on it
CHUNKS = 512  # most parts of a sum over pixels, so that adding them up takes little time
TILE = 4096  # numbers in a tile of an element-wise kernel

# What one compiled kernel must serve: Triton would compile anew for sizes of 1 and for multiples of 16.
DEPTHWISE_SIZES = ["n", "h", "w", "oh", "ow", "c", "x_step", "taps_step", "zero"]


# -- depth-wise convolution ---------------------------------------------------------------------------------------------
# A block is a few columns (of one image or of neighbouring ones) by LANES channels. It walks down the rows. Each number that it loads
# meets the taps of one kernel column in registers, which gives parts of several rows of the result: loads are 2 * reach + 1 times
# fewer than multiplications.
#
# Threads past the last column read that one again and throw their sums away: no comparison for that in the loop.
#
# ``zero`` is 0. Adding ``row * zero`` to an edge keeps the compiler from computing all comparisons before the loop and keeping them in
# registers, of which there are too few.


@triton.jit
def _limit(active, group, c, HAS_ACTIVE: tl.constexpr):
    """Channels of this group that matter."""
    limit = c
    if HAS_ACTIVE:
        limit = tl.minimum(c, tl.load(active + group).to(tl.int32))
    return limit


@triton.constexpr_function
def tap_row(distance, R, D):
    """Which row of taps is this many rows below the kernel's middle; -1 if none is."""
    return distance // D + R if distance % D == 0 and abs(distance) <= R * D else -1


@triton.jit
def _spot(place, n, columns, first):
    """Image, counted from the first, and column of a place; past the last place those of the last."""
    place = tl.minimum(place, n * columns - 1)
    return place // columns - first, place % columns


@triton.jit
def _near(column, SHIFT: tl.constexpr, columns, edge):
    """Whether column + SHIFT, of columns that are inside, is inside too."""
    if SHIFT < 0:
        return column >= edge - SHIFT
    else:
        return column < columns - SHIFT + edge


@triton.jit
def _zeros(COUNT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """A tuple of COUNT tiles of zeros."""
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros((BP, BC), tl.float32),)
    return tiles


@triton.jit
def _taps(taps, channel, live, c, K: tl.constexpr, R: tl.constexpr):
    """The middle (2R + 1)² taps, row by row; a tuple of (1, channels)."""
    SIDE: tl.constexpr = 2 * R + 1
    found = ()
    for place in tl.static_range(SIDE * SIDE):
        tap = (K // 2 - R + place // SIDE) * K + K // 2 - R + place % SIDE
        found = found + (tl.load(taps + tap * c + channel, mask=live, other=0.0)[None, :],)
    return found


@triton.jit
def _convolve(
    x, taps, y, sources, targets, start, keep, channel, live, zero, h, w, oh, ow, c,
    K: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """start: (BP, 1) the input column under the kernel's middle; sources, targets: where the columns begin in x and y.

    Step q reads the S input rows from q * S on. They reach result rows q + LOW to q + HIGH, whose sums so far are ``sums``.
    """
    LOW: tl.constexpr = -((R * D) // S)
    HIGH: tl.constexpr = (S - 1 + R * D) // S
    SIDE: tl.constexpr = 2 * R + 1
    weights = _taps(taps, channel, live, c, K, R)
    sums = _zeros(HIGH - LOW + 1, BP, BC)
    for q in range(oh):
        edge = q * zero
        for t in tl.static_range(S):
            row = q * S + t
            for kx in tl.static_range(SIDE):
                near = _near(start, (kx - R) * D, w, edge) & live[None, :]
                if S > 1:
                    near = near & (row < h)
                value = tl.load(x + (row * w + (kx - R) * D) * c + sources, mask=near, other=0.0).to(tl.float32)
                new = ()
                for j in tl.static_range(HIGH - LOW + 1):
                    if tap_row(t - (LOW + j) * S, R, D) >= 0:  # of result row q + LOW + j
                        new = new + (sums[j] + value * weights[tap_row(t - (LOW + j) * S, R, D) * SIDE + kx],)
                    else:
                        new = new + (sums[j],)
                sums = new
        if q + LOW >= 0:
            tl.store(y + (q + LOW) * ow * c + targets, sums[0], mask=keep)
        sums = sums[1:] + _zeros(1, BP, BC)
    for j in tl.static_range(-LOW):
        row = oh + LOW + j
        tl.store(y + row * ow * c + targets, sums[j], mask=keep & (row >= 0))


@triton.jit(do_not_specialize=DEPTHWISE_SIZES)
def forward_kernel(
    x, taps, y, reach, active, n, h, w, oh, ow, c, x_step, taps_step, zero,
    K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, HAS_REACH: tl.constexpr, HAS_ACTIVE: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A block of y. x_step: images from one group to the next; taps: (groups, K * K, c), taps_step numbers apart."""
    parts, blocks = tl.cdiv(c, BC), tl.cdiv(n * ow, BP)
    pid = tl.program_id(0)
    group, block, part = pid // (parts * blocks), pid // parts % blocks, pid % parts
    place = block * BP + tl.arange(0, BP)
    channel = part * BC + tl.arange(0, BC)
    limit = _limit(active, group, c, HAS_ACTIVE)
    live = channel < limit
    # Offsets are 64 bits wide up to the block's first image, 32 bits from there.
    first = block * BP // ow
    image, column = _spot(place, n, ow, first)
    x += (group.to(tl.int64) * x_step + first) * (h * w * c)
    y += (group.to(tl.int64) * n + first) * (oh * ow * c)
    sources = (image * (h * w) + column * S)[:, None] * c + channel[None, :]
    targets = (image * (oh * ow) + column)[:, None] * c + channel[None, :]
    keep = (place < n * ow)[:, None] & (channel < c)[None, :]
    start = (column * S)[:, None]
    taps += group.to(tl.int64) * taps_step
    if part * BC >= limit:
        for row in range(oh):
            tl.store(y + row * ow * c + targets, tl.zeros((BP, BC), tl.float32), mask=keep)
    else:
        near = K // 2
        if HAS_REACH:
            near = tl.load(reach + group).to(tl.int32)
        if HAS_REACH and K > 3 and near <= 1:
            _convolve(x, taps, y, sources, targets, start, keep, channel, live, zero, h, w, oh, ow, c, K, 1, S, D, BP, BC)
        elif HAS_REACH and K > 5 and near == 2:
            _convolve(x, taps, y, sources, targets, start, keep, channel, live, zero, h, w, oh, ow, c, K, 2, S, D, BP, BC)
        else:
            _convolve(x, taps, y, sources, targets, start, keep, channel, live, zero, h, w, oh, ow, c, K, K // 2, S, D, BP, BC)


@triton.jit
def _spread(
    dy, taps, dx, sources, targets, column, keep, channel, live, zero, h, w, oh, ow, c,
    K: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, PHASE: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of x in columns column * S + PHASE. Step q reads row q of dy, which reaches the rows from q * S - R * D on."""
    SIDE: tl.constexpr = 2 * R + 1
    WINDOW: tl.constexpr = 2 * R * D + 1
    weights = _taps(taps, channel, live, c, K, R)
    sums = _zeros(WINDOW, BP, BC)
    for q in range(oh):
        edge = q * zero
        for kx in tl.static_range(SIDE):
            if (PHASE - (kx - R) * D) % S == 0:  # else no column of dy sees these columns of x through this tap
                near = _near(column, (PHASE - (kx - R) * D) // S, ow, edge) & live[None, :]
                value = tl.load(dy + (q * ow + (PHASE - (kx - R) * D) // S) * c + sources, mask=near, other=0.0).to(tl.float32)
                new = ()
                for j in tl.static_range(WINDOW):
                    if j % D == 0:
                        new = new + (sums[j] + value * weights[(j // D) * SIDE + kx],)
                    else:
                        new = new + (sums[j],)
                sums = new
        for t in tl.static_range(S):
            row = q * S - R * D + t
            tl.store(dx + row * w * c + targets, sums[t], mask=keep & (row >= 0) & (row < h))
        sums = sums[S:] + _zeros(S, BP, BC)
    for j in tl.static_range(WINDOW - S):
        row = oh * S - R * D + j
        tl.store(dx + row * w * c + targets, sums[j], mask=keep & (row >= 0) & (row < h))


@triton.jit(do_not_specialize=DEPTHWISE_SIZES)
def input_gradient_kernel(
    dy, taps, dx, reach, active, n, h, w, oh, ow, c, x_step, taps_step, zero,
    K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, HAS_REACH: tl.constexpr, HAS_ACTIVE: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A block of dx: every S-th column, so that all its columns use the same taps. x_step: images between groups of dy."""
    parts, blocks = tl.cdiv(c, BC), tl.cdiv(n * ow, BP)
    pid = tl.program_id(0)
    part, phase, block, group = pid % parts, pid // parts % S, pid // (parts * S) % blocks, pid // (parts * S * blocks)
    place = block * BP + tl.arange(0, BP)
    channel = part * BC + tl.arange(0, BC)
    limit = _limit(active, group, c, HAS_ACTIVE)
    live = channel < limit
    first = block * BP // ow
    image, column = _spot(place, n, ow, first)
    dy += (group.to(tl.int64) * x_step + first) * (oh * ow * c)
    dx += (group.to(tl.int64) * n + first) * (h * w * c)
    sources = (image * (oh * ow) + column)[:, None] * c + channel[None, :]
    targets = (image * (h * w) + column * S + phase)[:, None] * c + channel[None, :]
    keep = ((place < n * ow) & (column * S + phase < w))[:, None] & (channel < c)[None, :]
    column = column[:, None]
    taps += group.to(tl.int64) * taps_step
    if part * BC >= limit:
        for row in range(h):
            tl.store(dx + row * w * c + targets, tl.zeros((BP, BC), tl.float32), mask=keep)
    else:
        near = K // 2
        if HAS_REACH:
            near = tl.load(reach + group).to(tl.int32)
        for PHASE in tl.static_range(S):
            if phase == PHASE:
                if HAS_REACH and K > 3 and near <= 1:
                    _spread(
                        dy, taps, dx, sources, targets, column, keep, channel, live, zero, h, w, oh, ow, c,
                        K, 1, S, D, PHASE, BP, BC,
                    )  # fmt: skip
                elif HAS_REACH and K > 5 and near == 2:
                    _spread(
                        dy, taps, dx, sources, targets, column, keep, channel, live, zero, h, w, oh, ow, c,
                        K, 2, S, D, PHASE, BP, BC,
                    )  # fmt: skip
                else:
                    _spread(
                        dy, taps, dx, sources, targets, column, keep, channel, live, zero, h, w, oh, ow, c,
                        K, K // 2, S, D, PHASE, BP, BC,
                    )  # fmt: skip


@triton.jit
def _correlate(
    x, dy, partial, begin, end, part, limit, zero, n, h, w, oh, ow, c,
    K: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums over the blocks of columns from begin to end; the rows of dy that a row of x meets are in ``seen``."""
    LOW: tl.constexpr = -((R * D) // S)
    HIGH: tl.constexpr = (S - 1 + R * D) // S
    SIDE: tl.constexpr = 2 * R + 1
    channel = part * BC + tl.arange(0, BC)
    live = (channel < limit)[None, :]
    sums = _zeros(SIDE * SIDE, BP, BC)
    for block in range(begin, end):
        place = block * BP + tl.arange(0, BP)
        image, column = _spot(place, n, ow, 0)
        inside = (place < n * ow)[:, None] & live
        start = (column * S)[:, None]
        sources = x + (image.to(tl.int64) * (h * w) + column * S)[:, None] * c + channel[None, :]
        targets = dy + (image.to(tl.int64) * (oh * ow) + column)[:, None] * c + channel[None, :]
        seen = ()
        for j in tl.static_range(HIGH - LOW):
            row = LOW + j
            seen = seen + (tl.load(targets + row * ow * c, mask=inside & (row >= 0) & (row < oh), other=0.0).to(tl.float32),)
        for q in range(oh):
            edge = q * zero
            seen = seen + (tl.load(targets + (q + HIGH) * ow * c, mask=inside & (q + HIGH < oh), other=0.0).to(tl.float32),)
            for t in tl.static_range(S):
                row = q * S + t
                values = ()
                for kx in tl.static_range(SIDE):
                    near = _near(start, (kx - R) * D, w, edge) & live
                    if S > 1:
                        near = near & (row < h)
                    values = values + (tl.load(sources + (row * w + (kx - R) * D) * c, mask=near, other=0.0).to(tl.float32),)
                new = ()
                for tap in tl.static_range(SIDE * SIDE):
                    if (t + (R - tap // SIDE) * D) % S == 0:  # else no row of dy sees this row of x through this tap
                        new = new + (sums[tap] + values[tap % SIDE] * seen[(t + (R - tap // SIDE) * D) // S - LOW],)
                    else:
                        new = new + (sums[tap],)
                sums = new
            seen = seen[1:]
    for tap in tl.static_range(SIDE * SIDE):
        spot = (K // 2 - R + tap // SIDE) * K + K // 2 - R + tap % SIDE
        tl.store(partial + spot * c + channel, tl.sum(sums[tap], 0), mask=channel < limit)


@triton.jit(do_not_specialize=[*DEPTHWISE_SIZES, "dy_step", "chunks"])
def weight_gradient_kernel(
    x, dy, partial, reach, active, n, h, w, oh, ow, c, x_step, dy_step, chunks, zero,
    K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, HAS_REACH: tl.constexpr, HAS_ACTIVE: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """partial: (groups, chunks, K * K, c), of which taps out of reach and channels that do not matter are left unwritten."""
    parts, blocks = tl.cdiv(c, BC), tl.cdiv(n * ow, BP)
    pid = tl.program_id(0)
    group, chunk, part = pid // (parts * chunks), pid // parts % chunks, pid % parts
    each = tl.cdiv(blocks, chunks)
    begin = chunk * each
    end = tl.minimum(begin + each, blocks)
    limit = _limit(active, group, c, HAS_ACTIVE)
    x += group.to(tl.int64) * x_step * (h * w * c)
    dy += group.to(tl.int64) * dy_step * (oh * ow * c)
    partial += (group.to(tl.int64) * chunks + chunk) * (K * K * c)
    if part * BC < limit:
        near = K // 2
        if HAS_REACH:
            near = tl.load(reach + group).to(tl.int32)
        if HAS_REACH and K > 3 and near <= 1:
            _correlate(x, dy, partial, begin, end, part, limit, zero, n, h, w, oh, ow, c, K, 1, S, D, BP, BC)
        elif HAS_REACH and K > 5 and near == 2:
            _correlate(x, dy, partial, begin, end, part, limit, zero, n, h, w, oh, ow, c, K, 2, S, D, BP, BC)
        else:
            _correlate(x, dy, partial, begin, end, part, limit, zero, n, h, w, oh, ow, c, K, K // 2, S, D, BP, BC)


@triton.jit(do_not_specialize=["c", "chunks", "together"])
def weight_total_kernel(
    partial, dw, reach, active, c, chunks, together,
    K: tl.constexpr, HAS_REACH: tl.constexpr, HAS_ACTIVE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dw: (groups / together, c, K * K), the sums over the chunks of ``together`` groups each."""
    parts = tl.cdiv(c, BC)
    pid = tl.program_id(0)
    part, tap, result = pid % parts, pid // parts % (K * K), pid // (parts * K * K)
    channel = part * BC + tl.arange(0, BC)
    away = tl.maximum(tl.abs(tap // K - K // 2), tl.abs(tap % K - K // 2))
    sums = tl.zeros((BR, BC), tl.float32)
    for group in range(result * together, (result + 1) * together):
        limit = _limit(active, group, c, HAS_ACTIVE)
        near = K // 2
        if HAS_REACH:
            near = tl.load(reach + group).to(tl.int32)
        read = (channel < limit)[None, :] & (away <= near)
        for start in range(0, chunks, BR):
            chunk = start + tl.arange(0, BR)
            rows = (tl.cast(group, tl.int64) * chunks + chunk) * (K * K) + tap
            sums += tl.load(partial + rows[:, None] * c + channel[None, :], mask=read & (chunk < chunks)[:, None], other=0.0)
    tl.store(dw + (tl.cast(result, tl.int64) * c + channel) * (K * K) + tap, tl.sum(sums, 0), mask=channel < c)


# -- normalisation and activation ---------------------------------------------------------------------------------------
# x is (groups, rows, c), where a row is a pixel. c is passed as ``units`` of UNIT channels: that c is a multiple of eight tells the
# compiler that it may load several channels at once. Vectors over channels are ``step`` numbers apart, 0 where all groups share
# them.


@triton.jit
def _activated(z, ACT: tl.constexpr):
    if ACT == "relu":
        return tl.where(z < 0, 0.0, z)  # not a maximum, which would hide NaN
    elif ACT == "hardswish":
        return z * (tl.minimum(tl.maximum(z + 3.0, 0.0), 6.0) / 6.0)
    elif ACT == "silu":
        return z / (1.0 + tl.exp(-z))
    else:
        return z


@triton.jit
def _slope(z, ACT: tl.constexpr):
    if ACT == "relu":
        return tl.where(z > 0, 1.0, 0.0)
    elif ACT == "hardswish":
        return tl.where(z <= -3.0, 0.0, tl.where(z < 3.0, z / 3.0 + 0.5, 1.0))
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
    for start in range(0, count, BR):
        there = start + place < count
        value = tl.load(x + offsets, mask=there & read, other=0.0).to(tl.float32)
        value = tl.where(there, value - shift[None, :], 0.0)
        sums += value
        squares += value * value
        x += BR * c
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


@triton.jit(do_not_specialize=["rows", "units", "x_step", "residual_step", "weight_step", "bias_step", "mask_step"])
def apply_kernel(
    x, moments, weight, bias, mask, residual, y, rows, units, x_step, residual_step, weight_step, bias_step, mask_step,
    UNIT: tl.constexpr, HAS_MOMENTS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ACT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = act((x - mean) * inverse * weight + bias) + residual."""
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
    if HAS_RESIDUAL:
        z += tl.load(residual + (group.to(tl.int64) * residual_step + block * BR) * c + offsets, mask=keep, other=0.0).to(tl.float32)
    tl.store(y + (group.to(tl.int64) * rows + block * BR) * c + offsets, z, mask=keep)


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


# -- channels weighed by image ------------------------------------------------------------------------------------------
# x is (images, pixels, c) and gate (images, c), whatever groups the images belong to.


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
def _step(tensor: Tensor | None, unit: int) -> int:
    """From one group to the next, in units; 0 where all groups share the tensor."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0) // unit


def _lanes(c: int, most: int, waste: float) -> int:
    """Channels of a block: as many as possible, but with little waste in the last block."""
    fits = [width for width in (128, 64, 32, 16) if width <= most and -(-c // width) * width <= waste * c]
    return fits[0] if fits else 8


def _columns(columns: int, parts: int) -> int:
    """Columns of a depth-wise block."""
    return COLUMNS if -(-columns // COLUMNS) * parts >= PROGRAMS // 2 else FEW


_compiled: dict[Hashable, Any] = {}
_first_constant: dict[int, int] = {}  # of a kernel's arguments


def _launch(kernel: Any, blocks: int, *arguments: Any, num_warps: int = 4) -> None:
    """``kernel[(blocks,)](*arguments)``. Triton looks for the compiled kernel at every launch, which takes Python a
    while; here it is found by what it was compiled for: precision and alignment of tensors, and constants, which come last."""
    if not hasattr(kernel, "device_caches"):  # in Triton's interpreter
        kernel[(blocks,)](*arguments, num_warps=num_warps)
        return
    name = id(kernel)
    if name not in _first_constant:
        _first_constant[name] = [parameter.is_constexpr for parameter in kernel.params].index(True)
    constants, small = _first_constant[name], True
    seen: list[Hashable] = [name, num_warps, arguments[constants:]]
    for argument in arguments[:constants]:
        if isinstance(argument, Tensor):
            seen += (argument.dtype, argument.device.index, argument.data_ptr() % 16 == 0)
        else:
            small = small and argument < 2**31
    key = (*seen, small)
    found = _compiled.get(key)
    if found is None:
        _compiled[key] = kernel[(blocks,)](*arguments, num_warps=num_warps)
    else:
        found[(blocks, 1, 1)](*arguments)


def depthwise_forward(
    x: Tensor, taps: Tensor, kernel: int, stride: int, dilation: int, reach: Tensor | None, active: Tensor | None
) -> Tensor:
    """x: (groups, n, h, w, c); taps: (groups or 1, kernel², c) float32; reach, active: (groups,)."""
    groups, n, h, w, c = x.shape
    oh, ow = -(-h // stride), -(-w // stride)
    y = x.new_empty(groups, n, oh, ow, c)
    lanes = _lanes(c, LANES, 1.2)
    parts = -(-c // lanes)
    columns = _columns(groups * n * ow, parts)
    with torch.cuda.device_of(x):
        _launch(
            forward_kernel, groups * -(-n * ow // columns) * parts,
            x, taps, y, x if reach is None else reach, x if active is None else active,
            n, h, w, oh, ow, c, _step(x, h * w * c), _step(taps, 1), 0,
            kernel, stride, dilation, reach is not None, active is not None, columns, lanes, num_warps=4,
        )  # fmt: skip
    return y


def depthwise_input_gradient(
    dy: Tensor, taps: Tensor, h: int, w: int, kernel: int, stride: int, dilation: int, reach: Tensor | None, active: Tensor | None
) -> Tensor:
    """dy: (groups, n, h', w', c); the result is (groups, n, h, w, c)."""
    groups, n, oh, ow, c = dy.shape
    dx = dy.new_empty(groups, n, h, w, c)
    lanes = _lanes(c, LANES, 1.2)
    parts = -(-c // lanes)
    columns = _columns(groups * n * ow, parts)
    with torch.cuda.device_of(dy):
        _launch(
            input_gradient_kernel, groups * -(-n * ow // columns) * stride * parts,
            dy, taps, dx, dy if reach is None else reach, dy if active is None else active,
            n, h, w, oh, ow, c, _step(dy, oh * ow * c), _step(taps, 1), 0,
            kernel, stride, dilation, reach is not None, active is not None, columns, lanes, num_warps=4,
        )  # fmt: skip
    return dx


def depthwise_weight_gradient(
    x: Tensor, dy: Tensor, weight: Tensor, kernel: int, stride: int, dilation: int, reach: Tensor | None, active: Tensor | None
) -> Tensor:
    """Like ``weight``, (groups or 1, c, 1, kernel, kernel): summed over groups where they share it."""
    groups, n, h, w, c = x.shape
    oh, ow = dy.shape[2:4]
    lanes = _lanes(c, LANES, 1.2)
    parts, warps = -(-c // lanes), 8
    columns = warps * 32 // lanes  # one number per thread: a thread has no registers for the taps of several
    blocks = -(-n * ow // columns)
    each = -(-blocks // max(1, PROGRAMS // (groups * parts)))
    chunks = -(-blocks // each)
    partial = x.new_empty(groups, chunks, kernel * kernel, c, dtype=torch.float32)
    dw = weight.new_empty(weight.shape)
    flags = (reach is not None, active is not None)
    with torch.cuda.device_of(x):
        _launch(
            weight_gradient_kernel, groups * chunks * parts,
            x, dy, partial, x if reach is None else reach, x if active is None else active,
            n, h, w, oh, ow, c, _step(x, h * w * c), _step(dy, oh * ow * c), chunks, 0,
            kernel, stride, dilation, *flags, columns, lanes, num_warps=warps,
        )  # fmt: skip
        _launch(
            weight_total_kernel, len(weight) * kernel * kernel * -(-c // 32),
            partial, dw, x if reach is None else reach, x if active is None else active, c, chunks, groups // len(weight),
            kernel, *flags, 64, 32, num_warps=4,
        )  # fmt: skip
    return dw


def _apart(vector: Tensor | None) -> int:
    """Numbers from a group's vector to the next one's; 0 where all share it."""
    return 0 if vector is None or vector.shape[0] == 1 else vector.stride(0)


def _chunked(groups: int, rows: int, c: int) -> tuple[int, int, int, int]:
    """Rows and channels of a tile, rows of a chunk, and chunks."""
    lanes = _lanes(c, 128, 1.25)
    tall = TILE // 2 // lanes  # its sums stay in registers
    tiles = -(-rows // tall)
    each = -(-tiles // max(1, min(CHUNKS, 2 * PROGRAMS // (groups * -(-c // lanes))))) * tall
    return tall, lanes, each, -(-rows // each)


def _units(c: int) -> tuple[int, int]:
    """c as units of UNIT channels."""
    return (c // 8, 8) if c % 8 == 0 else (c, 1)


def moments(x: Tensor, mask: Tensor | None, rows: int, eps: float) -> Tensor:
    """(groups, 3, c) mean, variance and inverse deviation of the first ``rows`` images; x: (groups, n, h, w, c), mask: (groups or 1, c)."""
    groups, _, h, w, c = x.shape
    rows *= h * w
    tall, lanes, each, chunks = _chunked(groups, rows, c)
    units, unit = _units(c)
    partial = x.new_empty(groups, chunks, 2, c, dtype=torch.float32)
    found = x.new_empty(groups, 3, c, dtype=torch.float32)
    masked = x if mask is None else mask
    mask_step = _step(mask, c)
    with torch.cuda.device_of(x):
        _launch(
            moments_kernel, groups * chunks * -(-c // lanes),
            x, masked, partial, rows, each, chunks, units, _step(x, c), mask_step, unit, mask is not None, tall, lanes, num_warps=4,
        )  # fmt: skip
        _launch(
            moments_total_kernel, groups * -(-c // 16),
            x, partial, masked, found, rows, each, chunks, c, _step(x, c), mask_step, eps, mask is not None, CHUNKS // 2, 16, num_warps=4,
        )  # fmt: skip
    return found


def apply(
    x: Tensor, found: Tensor | None, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, residual: Tensor | None, act: str
) -> Tensor:
    """Normalised by the moments ``found``, or without them only scaled and shifted; then act, then the residual added."""
    groups, n, h, w, c = x.shape
    rows, (units, unit) = n * h * w, _units(c)
    lanes = _lanes(c, 128, 1.25)
    tall = TILE // lanes
    y = x.new_empty(x.shape)
    given = [x if part is None else part for part in (found, weight, bias, mask, residual)]
    with torch.cuda.device_of(x):
        _launch(
            apply_kernel, groups * -(-rows // tall) * -(-c // lanes),
            x, *given, y, rows, units, _step(x, c), _step(residual, c), _apart(weight), _apart(bias), _step(mask, c),
            unit, *(part is not None for part in (found, weight, bias, mask, residual)), act, tall, lanes, num_warps=4,
        )  # fmt: skip
    return y


def gradients(
    x: Tensor, dy: Tensor, found: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, act: str,
    dtype: torch.dtype, of_x: bool = True,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """dx, if asked for, and (groups, 2, c) the gradients of bias and weight by group, in this precision."""
    groups, n, h, w, c = x.shape
    rows, (units, unit) = n * h * w, _units(c)
    tall, lanes, each, chunks = _chunked(groups, rows, c)
    partial = x.new_empty(groups, chunks, 2, c, dtype=torch.float32)
    totals = x.new_empty(groups, 2, c, dtype=torch.float32)
    vectors = totals if dtype == torch.float32 else x.new_empty(groups, 2, c, dtype=dtype)
    given = [x if part is None else part for part in (weight, bias, mask)]
    steps = (_step(x, c), _step(dy, c), _apart(weight), _apart(bias), _step(mask, c))
    flags = (unit, weight is not None, bias is not None, mask is not None, act)
    dx = x.new_empty(x.shape) if of_x else None
    with torch.cuda.device_of(x):
        _launch(
            gradient_sums_kernel, groups * chunks * -(-c // lanes),
            x, dy, found, *given, partial, rows, each, chunks, units, *steps, *flags, tall, lanes, num_warps=4,
        )  # fmt: skip
        _launch(gradient_total_kernel, 2 * groups * -(-c // 16), partial, totals, vectors, chunks, c, CHUNKS // 2, 16, num_warps=4)
        if dx is not None:
            _launch(
                gradient_kernel, groups * -(-rows // tall) * -(-c // lanes),
                x, dy, found, totals, *given, dx, rows, units, *steps, *flags, tall, lanes, num_warps=4,
            )  # fmt: skip
    return dx, vectors


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x: (groups, n, h, w, c), gate: (groups, n, c), both dense."""
    (images, pixels, lanes, tall), (units, unit) = _by_image(x), _units(x.shape[-1])
    y = x.new_empty(x.shape)
    with torch.cuda.device_of(x):
        blocks = images * -(-pixels // tall) * -(-x.shape[-1] // lanes)
        _launch(gate_kernel, blocks, x, gate, y, pixels, units, unit, tall, lanes, num_warps=4)
    return y


def gated_gradients(x: Tensor, gate: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dgate."""
    (images, pixels, lanes, tall), (units, unit) = _by_image(x), _units(x.shape[-1])
    dx, dgate = x.new_empty(x.shape), gate.new_empty(gate.shape)
    with torch.cuda.device_of(x):
        blocks = images * -(-x.shape[-1] // lanes)
        _launch(gate_gradient_kernel, blocks, x, gate, dy, dx, dgate, pixels, units, unit, tall, lanes, num_warps=4)
    return dx, dgate


def _by_image(x: Tensor) -> tuple[int, int, int, int]:
    """Images, their pixels, and channels and rows of a tile."""
    groups, n, h, w, c = x.shape
    lanes = _lanes(c, 128, 1.25)
    return groups * n, h * w, lanes, min(TILE // 2 // lanes, triton.next_power_of_2(h * w))
