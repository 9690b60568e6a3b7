"""Depth-wise convolution and both its gradients: kernels, then their launches.

A block is a few columns (of one image or of neighbouring ones) by LANES channels. It walks down the rows. Each number that it loads
meets the taps of one kernel column in registers, which gives parts of several rows of the result: loads are 2 * reach + 1 times
fewer than multiplications. Where a thread has ``Q`` columns side by side, they meet mostly the same numbers, and it loads each once. Not so
in gradients of maps: that made them little faster, and their compilation, of which a first round waits for dozens, four times as long.

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
BESIDE = 4  # columns side by side of one thread, forward
OF_TAPS = 2  # the same in gradients of taps, as registers allow
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
def met(t, row, R, S, D):
    """Which of the rows of dy in sight, counted from the first, meets row q * S + t of x through this row of taps; -1 if none does."""
    return (t + (R - row) * D) // S + (R * D) // S if (t + (R - row) * D) % S == 0 else -1


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
    K: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums over the blocks of columns from begin to end; the rows of dy that a row of x meets are in ``seen``, Q columns of each."""
    LOW: tl.constexpr = -((R * D) // S)
    HIGH: tl.constexpr = (S - 1 + R * D) // S
    SIDE: tl.constexpr = 2 * R + 1
    across = ow // Q
    channel = part * BC + tl.arange(0, BC)
    live = (channel < limit)[None, :]
    sums = _zeros(SIDE * SIDE, BP, BC)
    for block in range(begin, end):
        place = block * BP + tl.arange(0, BP)
        image, column = _spot(place, n, across, 0)
        column *= Q
        inside = (place < n * across)[:, None] & live
        start = (column * S)[:, None]
        sources = x + (image.to(tl.int64) * (h * w) + column * S)[:, None] * c + channel[None, :]
        targets = dy + (image.to(tl.int64) * (oh * ow) + column)[:, None] * c + channel[None, :]
        seen = ()
        for j in tl.static_range((HIGH - LOW) * Q):
            row = LOW + j // Q
            there = inside & (row >= 0) & (row < oh)
            seen = seen + (tl.load(targets + (row * ow + j % Q) * c, mask=there, other=0.0).to(tl.float32),)
        for q in range(oh):
            edge = q * zero
            for beside in tl.static_range(Q):
                there = inside & (q + HIGH < oh)
                seen = seen + (tl.load(targets + ((q + HIGH) * ow + beside) * c, mask=there, other=0.0).to(tl.float32),)
            for t in tl.static_range(S):
                row = q * S + t
                values = ()  # from R * D columns left of the middle on
                for right in tl.static_range(-R * D, R * D + (Q - 1) * S + 1):
                    near = live
                    if right < 0 or right > (Q - 1) * S:
                        near = near & _near(start, right, w, edge)
                    if S > 1:
                        near = near & (row < h)
                    if is_seen(right, R, S, D, Q):
                        values = values + (tl.load(sources + (row * w + right) * c, mask=near, other=0.0).to(tl.float32),)
                    else:
                        values = values + (sums[0],)  # nobody reads it
                for beside in tl.static_range(Q):
                    new = ()
                    for tap in tl.static_range(SIDE * SIDE):
                        if met(t, tap // SIDE, R, S, D) >= 0:
                            new = new + (sums[tap] + values[beside * S + tap % SIDE * D] * seen[met(t, tap // SIDE, R, S, D) * Q + beside],)
                        else:
                            new = new + (sums[tap],)
                    sums = new
            seen = seen[Q:]
    for tap in tl.static_range(SIDE * SIDE):
        spot = (K // 2 - R + tap // SIDE) * K + K // 2 - R + tap % SIDE
        tl.store(partial + spot * c + channel, tl.sum(sums[tap], 0), mask=channel < limit)


@triton.jit(do_not_specialize=[*DEPTHWISE_SIZES, "dy_step", "chunks"])
def weight_gradient_kernel(
    x, dy, partial, reach, active, n, h, w, oh, ow, c, x_step, dy_step, chunks, zero,
    K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, HAS_REACH: tl.constexpr, HAS_ACTIVE: tl.constexpr,
    Q: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """partial: (groups, chunks, K * K, c), of which taps out of reach and channels that do not matter are left unwritten. Q divides ow."""
    parts, blocks = tl.cdiv(c, BC), tl.cdiv(n * (ow // Q), BP)
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
            _correlate(x, dy, partial, begin, end, part, limit, zero, n, h, w, oh, ow, c, K, 1, S, D, Q, BP, BC)
        elif HAS_REACH and K > 5 and near == 2:
            _correlate(x, dy, partial, begin, end, part, limit, zero, n, h, w, oh, ow, c, K, 2, S, D, Q, BP, BC)
        else:
            _correlate(x, dy, partial, begin, end, part, limit, zero, n, h, w, oh, ow, c, K, K // 2, S, D, Q, BP, BC)


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


# -- launches -----------------------------------------------------------------------------------------------------------
def _columns(columns: int, parts: int) -> int:
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
    columns, beside = _columns(groups * n * ow, parts), 1
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


def depthwise_input_gradient(
    dy: Tensor, taps: Tensor, h: int, w: int, kernel: int, stride: int, dilation: int, reach: Tensor | None, active: Tensor | None
) -> Tensor:
    """dy: (groups, n, h', w', c); the result is (groups, n, h, w, c)."""
    groups, n, oh, ow, c = dy.shape
    dx = dy.new_empty(groups, n, h, w, c)
    lanes = block_lanes(c, LANES, 1.2)
    parts = -(-c // lanes)
    columns = _columns(groups * n * ow, parts)
    with torch.cuda.device_of(dy):
        launch(
            input_gradient_kernel, groups * -(-n * ow // columns) * stride * parts,
            dy, taps, dx, dy if reach is None else reach, dy if active is None else active,
            n, h, w, oh, ow, c, group_step(dy, oh * ow * c), group_step(taps, 1), 0,
            kernel, stride, dilation, reach is not None, active is not None, columns, lanes, num_warps=4,
        )  # fmt: skip
    return dx


def depthwise_weight_gradient(
    x: Tensor, dy: Tensor, weight: Tensor, kernel: int, stride: int, dilation: int, reach: Tensor | None, active: Tensor | None
) -> Tensor:
    """Like ``weight``, (groups or 1, c, 1, kernel, kernel): summed over groups where they share it."""
    groups, n, h, w, c = x.shape
    oh, ow = dy.shape[2:4]
    lanes = block_lanes(c, LANES, 1.2)
    parts, warps = -(-c // lanes), 8
    columns = warps * 32 // lanes  # a thread has one channel: it has no registers for the taps of two
    beside = OF_TAPS if ow % OF_TAPS == 0 else 1
    blocks = -(-n * (ow // beside) // columns)
    each = -(-blocks // max(1, PROGRAMS // (groups * parts)))
    chunks = -(-blocks // each)
    partial = x.new_empty(groups, chunks, kernel * kernel, c, dtype=torch.float32)
    dw = weight.new_empty(weight.shape)
    flags = (reach is not None, active is not None)
    with torch.cuda.device_of(x):
        launch(
            weight_gradient_kernel, groups * chunks * parts,
            x, dy, partial, x if reach is None else reach, x if active is None else active,
            n, h, w, oh, ow, c, group_step(x, h * w * c), group_step(dy, oh * ow * c), chunks, 0,
            kernel, stride, dilation, *flags, beside, columns, lanes, num_warps=warps,
        )  # fmt: skip
        launch(
            weight_total_kernel, len(weight) * kernel * kernel * -(-c // 32),
            partial, dw, x if reach is None else reach, x if active is None else active, c, chunks, groups // len(weight),
            kernel, *flags, 64, 32, num_warps=4,
        )  # fmt: skip
    return dw
