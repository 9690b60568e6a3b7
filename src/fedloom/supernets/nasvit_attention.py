"""The attention block of NASViT (Gong et al., ICLR 2022), of which the widths are arguments: real slices, or masks.

Talking heads (the heads are mixed before and after the softmax), values four times as wide as queries with a depth-wise
convolution, a learned bias per head and offset of two positions, two feed-forward layers. Layer normalisation is joint over tokens
and channels. Every branch is multiplied by a learned scale per channel and by 8 / width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.spaces.nasvit import HEAD_WIDTH
from fedloom.supernets.elastic import convolved, product
from fedloom.supernets.normalisation import EPS

BRANCH = 8  # branches are multiplied by this number over the width


def attention_block(
    x: Tensor,
    weights: Mapping[str, Tensor],
    name: str,
    scales: tuple[Tensor, Tensor],
    width: Tensor | int,
    channels: Tensor | None = None,
) -> Tensor:
    """x: (n, channels, side, side); scales: (channels,) of attention and of the feed-forward layers.

    ``channels`` marks the active ones under masks, ``width`` is their number; the others are zero in x and in the result.
    """
    tokens = x.flatten(2).transpose(1, 2)  # (n, tokens, channels)
    attention_scale, feed_scale = scales if channels is None else _only(scales, channels)

    def normed(layer: str) -> Tensor:
        return joint_norm(tokens, weights[f"{name}.{layer}.norm.weight"], weights[f"{name}.{layer}.norm.bias"], width, channels)

    tokens = _joined(tokens, attention(normed("attention"), weights, f"{name}.attention", channels), attention_scale, width)
    for layer in ("feed.first", "feed.second"):
        hidden = F.silu(_linear(normed(layer), weights, f"{name}.{layer}.hidden"))
        hidden = hidden if channels is None else torch.where(channels, hidden, 0.0)
        tokens = _joined(tokens, _linear(hidden, weights, f"{name}.{layer}.output"), feed_scale, width)
    return tokens.transpose(1, 2).reshape(x.shape)


def attention(x: Tensor, weights: Mapping[str, Tensor], name: str, channels: Tensor | None = None) -> Tensor:
    """x: (n, tokens, channels). Masked heads give and take nothing in either mix, so they add nothing to the result."""
    count, tokens, width = x.shape
    heads, side = width // HEAD_WIDTH, round(tokens**0.5)
    query, key = (_linear(x, weights, f"{name}.{layer}").reshape(count, tokens, heads, -1).transpose(1, 2) for layer in ("query", "key"))
    value = _linear(x, weights, f"{name}.value").transpose(1, 2).reshape(count, -1, side, side)
    value = convolved(value, weights[f"{name}.local.weight"])
    value = value.reshape(count, heads, -1, tokens).transpose(2, 3)  # (n, heads, tokens, 32)
    mixes = [(weights[f"{name}.{layer}.weight"], weights[f"{name}.{layer}.bias"]) for layer in ("before", "after")]
    if channels is not None:
        active = channels[::HEAD_WIDTH]  # widths are whole heads
        mixes = [(torch.where(active & active[:, None], weight, 0.0), torch.where(active, bias, 0.0)) for weight, bias in mixes]
    product = torch.add(position_bias(weights[f"{name}.positions"], side), query @ key.transpose(2, 3), alpha=HEAD_WIDTH**-0.5)
    product = _mixed(_mixed(product, *mixes[0]).softmax(-1), *mixes[1])
    return _linear(F.silu((product @ value).transpose(1, 2).reshape(count, tokens, -1)), weights, f"{name}.project")


def position_bias(table: Tensor, side: int) -> Tensor:
    """(heads, tokens, tokens) from a table by the offset of one token from another, down and right, with no offset in its middle.

    table: (2 side - 1, 2 side - 1, heads), or for larger maps.
    """
    near = slice(len(table) // 2 - side + 1, len(table) // 2 + side)
    windows = table[near, near].unfold(0, side, 1).unfold(1, side, 1)  # (down, right, heads, and backwards: down, right of the other)
    return windows.flip(3, 4).permute(2, 0, 1, 3, 4).reshape(-1, side**2, side**2)


def joint_norm(x: Tensor, weight: Tensor, bias: Tensor, width: Tensor | int, channels: Tensor | None = None) -> Tensor:
    """Layer normalisation over tokens and channels together, of active channels only; x: (n, tokens, channels), zero elsewhere."""
    if channels is None:
        return F.layer_norm(x, x.shape[1:], weight.expand(x.shape[1:]), bias.expand(x.shape[1:]), EPS)
    count = x.shape[1] * width
    away = torch.where(channels, x - x.sum((1, 2), keepdim=True) / count, 0.0)
    variance = away.square().sum((1, 2), keepdim=True) / count
    return torch.where(channels, away * torch.rsqrt(variance + EPS) * weight + bias, 0.0)


def _mixed(product: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(n, heads, tokens, tokens): every head becomes a combination of all."""
    rows = product.flatten(2)
    return torch.baddbmm(bias[:, None], weight.expand(len(rows), *weight.shape), rows).reshape(product.shape)


def _joined(tokens: Tensor, branch: Tensor, scale: Tensor, width: Tensor | int) -> Tensor:
    if isinstance(width, int):
        return torch.addcmul(tokens, branch, scale, value=BRANCH / width)
    return torch.addcmul(tokens, branch, scale * BRANCH / width)


def _linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return product(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _only(scales: tuple[Tensor, Tensor], channels: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.where(channels, scale, 0.0) for scale in scales)
