"""Layer normalisation over tokens and channels together, of active channels only, and its gradients: kernels, then their launches.

x is (images, tokens, c), whatever groups the images belong to. A program has an image, which is small.
"""

# mypy: disable-error-code="assignment, import-not-found, import-untyped, misc, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.supernets.kernels.launch import TILE, launch


@triton.jit(do_not_specialize=["images", "tokens", "c", "weight_step", "bias_step", "width_step"])
def joint_kernel(
    x, weight, bias, width, y, found, images, tokens, c, weight_step, bias_step, width_step, eps, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """y, and the mean and inverse deviation of an image. Channels from the group's ``width`` on come out as zero."""
    image = tl.program_id(0).to(tl.int64)
    group = image // images
    active = tl.load(width + group * width_step)
    channel = tl.arange(0, BC)
    live = channel < active
    count = (tokens * active).to(tl.float32)
    places = image * tokens * c + tl.arange(0, BR)[:, None] * c + channel[None, :]
    sums = tl.zeros((BR, BC), tl.float32)
    for start in range(0, tokens, BR):
        there = (start + tl.arange(0, BR)[:, None] < tokens) & live[None, :]
        sums += tl.load(x + places + start * c, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(sums, 1), 0) / count
    squares = tl.zeros((BR, BC), tl.float32)
    for start in range(0, tokens, BR):
        there = (start + tl.arange(0, BR)[:, None] < tokens) & live[None, :]
        away = tl.where(there, tl.load(x + places + start * c, mask=there, other=0.0).to(tl.float32) - mean, 0.0)
        squares += away * away
    inverse = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, 1), 0) / count + eps)
    scale = tl.load(weight + group * weight_step + channel, mask=live, other=0.0).to(tl.float32)
    shift = tl.load(bias + group * bias_step + channel, mask=live, other=0.0).to(tl.float32)
    for start in range(0, tokens, BR):
        row = start + tl.arange(0, BR)[:, None]
        there = (row < tokens) & live[None, :]
        normal = (tl.load(x + places + start * c, mask=there, other=0.0).to(tl.float32) - mean) * inverse
        made = tl.where(live[None, :], normal * scale[None, :] + shift[None, :], 0.0)
        tl.store(y + places + start * c, made, mask=(row < tokens) & (channel < c)[None, :])
    tl.store(found + 2 * image, mean)
    tl.store(found + 2 * image + 1, inverse)


@triton.jit(do_not_specialize=["images", "tokens", "c", "weight_step", "width_step"])
def joint_gradient_kernel(
    x, dy, found, weight, width, dx, sums, images, tokens, c, weight_step, width_step, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """dx; and an image's part of the gradients of bias and weight, (images, 2, c)."""
    image = tl.program_id(0).to(tl.int64)
    group = image // images
    active = tl.load(width + group * width_step)
    channel = tl.arange(0, BC)
    live = channel < active
    count = (tokens * active).to(tl.float32)
    mean, inverse = tl.load(found + 2 * image), tl.load(found + 2 * image + 1)
    scale = tl.load(weight + group * weight_step + channel, mask=live, other=0.0).to(tl.float32)
    places = image * tokens * c + tl.arange(0, BR)[:, None] * c + channel[None, :]
    slopes, turns = tl.zeros((BR, BC), tl.float32), tl.zeros((BR, BC), tl.float32)
    for start in range(0, tokens, BR):
        there = (start + tl.arange(0, BR)[:, None] < tokens) & live[None, :]
        slope = tl.load(dy + places + start * c, mask=there, other=0.0).to(tl.float32)
        slopes += slope
        turns += slope * ((tl.load(x + places + start * c, mask=there, other=0.0).to(tl.float32) - mean) * inverse)
    of_bias, of_weight = tl.sum(slopes, 0), tl.sum(turns, 0)
    tl.store(sums + 2 * image * c + channel, of_bias, mask=channel < c)
    tl.store(sums + (2 * image + 1) * c + channel, of_weight, mask=channel < c)
    shift, stretch = tl.sum(of_bias * scale, 0) / count, tl.sum(of_weight * scale, 0) / count
    for start in range(0, tokens, BR):
        row = start + tl.arange(0, BR)[:, None]
        there = (row < tokens) & live[None, :]
        slope = tl.load(dy + places + start * c, mask=there, other=0.0).to(tl.float32) * scale[None, :]
        normal = (tl.load(x + places + start * c, mask=there, other=0.0).to(tl.float32) - mean) * inverse
        made = tl.where(live[None, :], inverse * (slope - shift - normal * stretch), 0.0)
        tl.store(dx + places + start * c, made, mask=(row < tokens) & (channel < c)[None, :])


# -- launches -----------------------------------------------------------------------------------------------------------
def joint(x: Tensor, weight: Tensor, bias: Tensor, width: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y, and (groups * n, 2) means and inverse deviations. x: (groups, n, tokens, c), dense; weight, bias: (groups or 1, c); width:
    (groups or 1,) active channels."""
    groups, n, tokens, c = x.shape
    y, found = x.new_empty(x.shape), x.new_empty(groups * n, 2, dtype=torch.float32)
    with torch.cuda.device_of(x):
        steps = (_step(weight), _step(bias), _step(width))
        launch(joint_kernel, groups * n, x, weight, bias, width, y, found, n, tokens, c, *steps, eps, *_tile(c))
    return y, found


def joint_gradients(x: Tensor, dy: Tensor, found: Tensor, weight: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """dx, and (groups, n, 2, c) of which the sums over images are the gradients of bias and weight."""
    groups, n, tokens, c = x.shape
    dx, sums = x.new_empty(x.shape), x.new_empty(groups, n, 2, c, dtype=torch.float32)
    with torch.cuda.device_of(x):
        steps = (_step(weight), _step(width))
        launch(joint_gradient_kernel, groups * n, x, dy, found, weight, width, dx, sums, n, tokens, c, *steps, *_tile(c))
    return dx, sums


def _step(tensor: Tensor) -> int:
    """Numbers from a group to the next one; 0 where all share them."""
    return 0 if len(tensor) == 1 else tensor.stride(0)


def _tile(c: int) -> tuple[int, int]:
    """Tokens and channels of a tile."""
    lanes = triton.next_power_of_2(c)
    return max(1, TILE // 2 // lanes), lanes
