"""Depth-wise convolution: its kernel, then its launch. ``depthwise_gradients.py`` has both its gradients.

A block is a few columns (of one image or of neighbouring ones) by LANES channels. It walks down the rows. Each number that it loads
meets the taps of one kernel column in registers, which gives parts of several rows of the result: loads are 2 * reach + 1 times
fewer than multiplications. A thread has ``Q`` columns side by side, which meet mostly the same numbers, and loads each once.

Threads past the last column read that one again and throw their sums away: no comparison for that in the loop.

``zero`` is 0. Adding ``row * zero`` to an edge keeps the compiler from computing all comparisons before the loop and keeping them in
registers, of which there are too few.
"""

# mypy: disable-error-code="assignment, import-not-found, import-untyped, misc, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.supernets.kernels.launch import PROGRAMS, block_lanes, group_step, launch

LANES = 32  # channels of a depth-wise block: one per thread of a warp, so that a thread keeps the weights of one channel
COLUMNS = 16  # columns of a depth-wise block, four per thread
BESIDE = 4  # columns side by side of one thread
THREADS = 128  # of a depth-wise block
FEW = 4  # columns of a block where there are too few blocks to fill a GPU

# What one compiled kernel must serve: Triton would compile anew for sizes of 1 and for multiples of 16.
DEPTHWISE_SIZES = ["n", "h", "w", "oh", "ow", "c", "x_step", "taps_step", "zero"]


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


@triton.constexpr_function
def tap_at(down, right, R, D):
    """Which tap is this far below the kernel's middle and to the right of it; -1 if none is."""
    row, column = tap_row(down, R, D), tap_row(right, R, D)
    return row * (2 * R + 1) + column if row >= 0 and column >= 0 else -1


@triton.constexpr_function
def is_seen(right, R, S, D, Q):
    """Whether any of Q columns side by side sees what is this far to the right of the first one's middle."""
    return any(tap_row(right - column * S, R, D) >= 0 for column in range(Q))


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
    K: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """start: (BP, 1) the input column under the kernel's middle, for the first of Q columns side by side, which are all inside of the
    same image; sources, targets: where these first columns begin in x and y.

    Step q reads the S input rows from q * S on. They reach result rows q + LOW to q + HIGH, whose sums so far are ``sums``, row by row.
    """
    LOW: tl.constexpr = -((R * D) // S)
    HIGH: tl.constexpr = (S - 1 + R * D) // S
    weights = _taps(taps, channel, live, c, K, R)
    sums = _zeros((HIGH - LOW + 1) * Q, BP, BC)
    for q in range(oh):
        edge = q * zero
        for t in tl.static_range(S):
            row = q * S + t
            for right in tl.static_range(-R * D, R * D + (Q - 1) * S + 1):
                if is_seen(right, R, S, D, Q):
                    near = live[None, :]
                    if right < 0 or right > (Q - 1) * S:  # else it is inside, as these columns are
                        near = near & _near(start, right, w, edge)
                    if S > 1:
                        near = near & (row < h)
                    value = tl.load(x + (row * w + right) * c + sources, mask=near, other=0.0).to(tl.float32)
                    new = ()
                    for j in tl.static_range((HIGH - LOW + 1) * Q):  # of result row q + LOW + j // Q
                        if tap_at(t - (LOW + j // Q) * S, right - j % Q * S, R, D) >= 0:
                            new = new + (sums[j] + value * weights[tap_at(t - (LOW + j // Q) * S, right - j % Q * S, R, D)],)
                        else:
                            new = new + (sums[j],)
                    sums = new
        if q + LOW >= 0:
            for column in tl.static_range(Q):
                tl.store(y + ((q + LOW) * ow + column) * c + targets, sums[column], mask=keep)
        sums = sums[Q:] + _zeros(Q, BP, BC)
    for j in tl.static_range(-LOW * Q):
        row = oh + LOW + j // Q
        tl.store(y + (row * ow + j % Q) * c + targets, sums[j], mask=keep & (row >= 0))


@triton.jit(do_not_specialize=DEPTHWISE_SIZES)
def forward_kernel(
    x, taps, y, reach, active, n, h, w, oh, ow, c, x_step, taps_step, zero,
    K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, HAS_REACH: tl.constexpr, HAS_ACTIVE: tl.constexpr,
    Q: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A block of y. x_step: images from one group to the next; taps: (groups, K * K, c), taps_step numbers apart. Q divides ow."""
    across = ow // Q
    parts, blocks = tl.cdiv(c, BC), tl.cdiv(n * across, BP)
    pid = tl.program_id(0)
    group, block, part = pid // (parts * blocks), pid // parts % blocks, pid % parts
    place = block * BP + tl.arange(0, BP)
    channel = part * BC + tl.arange(0, BC)
    limit = _limit(active, group, c, HAS_ACTIVE)
    live = channel < limit
    # Offsets are 64 bits wide up to the block's first image, 32 bits from there.
    first = block * BP // across
    image, column = _spot(place, n, across, first)
    column *= Q
    x += (group.to(tl.int64) * x_step + first) * (h * w * c)
    y += (group.to(tl.int64) * n + first) * (oh * ow * c)
    sources = (image * (h * w) + column * S)[:, None] * c + channel[None, :]
    targets = (image * (oh * ow) + column)[:, None] * c + channel[None, :]
    keep = (place < n * across)[:, None] & (channel < c)[None, :]
    start = (column * S)[:, None]
    taps += group.to(tl.int64) * taps_step
    if part * BC >= limit:
        for row in range(oh):
            for beside in tl.static_range(Q):
                tl.store(y + (row * ow + beside) * c + targets, tl.zeros((BP, BC), tl.float32), mask=keep)
    else:
        near = K // 2
        if HAS_REACH:
            near = tl.load(reach + group).to(tl.int32)
        if HAS_REACH and K > 3 and near <= 1:
            _convolve(x, taps, y, sources, targets, start, keep, channel, live, zero, h, w, oh, ow, c, K, 1, S, D, Q, BP, BC)
        elif HAS_REACH and K > 5 and near == 2:
            _convolve(x, taps, y, sources, targets, start, keep, channel, live, zero, h, w, oh, ow, c, K, 2, S, D, Q, BP, BC)
        else:
            _convolve(x, taps, y, sources, targets, start, keep, channel, live, zero, h, w, oh, ow, c, K, K // 2, S, D, Q, BP, BC)


# -- launches -----------------------------------------------------------------------------------------------------------
def columns_of(columns: int, parts: int) -> int:
    """Columns of a depth-wise block."""
    return COLUMNS if -(-columns // COLUMNS) * parts >= PROGRAMS // 2 else FEW


def depthwise_forward(
    x: Tensor, taps: Tensor, kernel: int, stride: int, dilation: int, reach: Tensor | None, active: Tensor | None
) -> Tensor:
    """x: (groups, n, h, w, c); taps: (groups or 1, kernel², c) float32; reach, active: (groups,)."""
    groups, n, h, w, c = x.shape
    oh, ow = -(-h // stride), -(-w // stride)
    y = x.new_empty(groups, n, oh, ow, c)
    lanes = block_lanes(c, LANES, 1.2)
    parts = -(-c // lanes)
    columns, beside = columns_of(groups * n * ow, parts), 1
    if columns == COLUMNS and ow % BESIDE == 0:  # as many results for each thread
        columns, beside = THREADS // lanes, BESIDE
    with torch.cuda.device_of(x):
        launch(
            forward_kernel, groups * -(-n * (ow // beside) // columns) * parts,
            x, taps, y, x if reach is None else reach, x if active is None else active,
            n, h, w, oh, ow, c, group_step(x, h * w * c), group_step(taps, 1), 0,
            kernel, stride, dilation, reach is not None, active is not None, beside, columns, lanes, num_warps=4,
        )  # fmt: skip
    return y
