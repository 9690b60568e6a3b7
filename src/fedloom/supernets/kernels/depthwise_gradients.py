"""Both gradients of a depth-wise convolution: kernels, then their launches. How they walk over maps: see ``depthwise.py``.

In gradients of taps a thread has ``Q`` columns side by side, as forward. Not in gradients of maps: that made them little faster, and their
compilation, of which a first round waits for dozens, four times as long.
"""

# mypy: disable-error-code="assignment, import-not-found, import-untyped, misc, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.supernets.kernels.depthwise import DEPTHWISE_SIZES, LANES, _limit, _near, _spot, _taps, _zeros, columns_of, is_seen
from fedloom.supernets.kernels.launch import PROGRAMS, block_lanes, group_step, launch

OF_TAPS = 2  # the same in gradients of taps, as registers allow


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


@triton.constexpr_function
def met(t, row, R, S, D):
    """Which of the rows of dy in sight, counted from the first, meets row q * S + t of x through this row of taps; -1 if none does."""
    return (t + (R - row) * D) // S + (R * D) // S if (t + (R - row) * D) % S == 0 else -1


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
def depthwise_input_gradient(
    dy: Tensor, taps: Tensor, h: int, w: int, kernel: int, stride: int, dilation: int, reach: Tensor | None, active: Tensor | None
) -> Tensor:
    """dy: (groups, n, h', w', c); the result is (groups, n, h, w, c)."""
    groups, n, oh, ow, c = dy.shape
    dx = dy.new_empty(groups, n, h, w, c)
    lanes = block_lanes(c, LANES, 1.2)
    parts = -(-c // lanes)
    columns = columns_of(groups * n * ow, parts)
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
