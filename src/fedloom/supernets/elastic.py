"""Layers whose weights, widths and statistics are arguments."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
GROUP = 8  # channels per group; divides every width of every space


class Statistics(dict[str, tuple[Tensor, Tensor]]):
    """Means and variances of every batch normalisation of one architecture, by layer name.

    With ``rows`` > 0 a forward pass measures them on its first ``rows`` images and normalises all images with them: a subnet is
    calibrated and scored in one pass.
    """

    def __init__(self, known: Mapping[str, tuple[Tensor, Tensor]] | None = None, rows: int = 0) -> None:
        super().__init__(known or {})
        self.rows = rows


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, name: str, statistics: Statistics | None) -> Tensor:
    if statistics is None:
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    if statistics.rows:
        statistics[name] = _moments(x[: statistics.rows])
    mean, variance = statistics[name]
    return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=EPS)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance per channel, as training mode computes them; on a CPU this is ten times faster than ``var_mean``."""
    mean, variance = x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
    F.batch_norm(x, mean, variance, training=True, momentum=1.0)  # writes both; its variance is the unbiased one
    count = x.numel() // x.shape[1]
    return mean, variance * ((count - 1) / count)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, x.shape[1] // GROUP, weight, bias, eps=EPS)


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A 1x1 convolution. On a CPU a matrix product over the channels does it several times faster on small maps."""
    if x.is_cuda:
        return F.conv2d(x, weight, bias)
    return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)


def centre(size: int, part: int) -> slice:
    """The middle ``part`` of ``size`` positions."""
    start = (size - part) // 2
    return slice(start, start + part)


def elastic_kernel(weight: Tensor, kernel: int, to_five: Tensor | None, to_three: Tensor | None) -> Tensor:
    """The active kernel of a 7x7 depth-wise weight (Once-for-all, section 3.3): centre, times a learned matrix, per step down.

    weight: (channels, 1, side, side), already cut to the entries the kernel needs; to_five: (rows, rows, 25); to_three: (9, 9).
    """
    channels = weight.shape[0]
    if to_five is not None:
        # rows = 5 for a 5x5 kernel; for a 3x3 kernel only the 3x3 inner rows of the matrix are used, 9 of 25 outputs.
        rows = to_five.shape[0]
        weight = (weight.reshape(channels, 25) @ to_five.reshape(rows * rows, 25).T).reshape(channels, 1, rows, rows)
    if to_three is not None:
        weight = (weight.reshape(channels, 9) @ to_three.T).reshape(channels, 1, 3, 3)
    assert weight.shape[-1] == kernel
    return weight
