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
from fedloom.supernets.elastic import convolved, product, zero
from fedloom.supernets.joint_norm import joint_norm
from fedloom.supernets.normalisation import under_vmap

BRANCH = 8  # branches are multiplied by this number over the width


def attention_block(
    x: Tensor,
    weights: Mapping[str, Tensor],
    name: str,
    scales: tuple[Tensor, Tensor],
    width: Tensor | int,
    channels: Tensor | None = None,
) -> Tensor:
    """x: (n, channels, side, side); scales: (channels,) of attention and of the feed-forward layers; ``scaled`` if width is a tensor.

    ``channels`` marks the active ones under masks, ``width`` is their number; the others are zero in x and in the result. Where weights
    are zero outside the active channels, ``width`` is enough. In groups all tensors have them first, unless all groups share one.
    """
    tokens = x.flatten(-2).mT  # (…, n, tokens, channels)
    attention_scale, feed_scale = scales if channels is None else (torch.where(channels, scale, zero(scale)) for scale in scales)

    def normed(layer: str) -> Tensor:
        return joint_norm(tokens, weights[f"{name}.{layer}.norm.weight"], weights[f"{name}.{layer}.norm.bias"], width)

    tokens = _joined(tokens, attention(normed("attention"), weights, f"{name}.attention", channels), attention_scale, width)
    for layer in ("feed.first", "feed.second"):
        hidden = F.silu(_linear(normed(layer), weights, f"{name}.{layer}.hidden"))
        hidden = hidden if channels is None else torch.where(_over_tokens(channels), hidden, zero(hidden))
        tokens = _joined(tokens, _linear(hidden, weights, f"{name}.{layer}.output"), feed_scale, width)
    return tokens.mT.reshape(x.shape)


def attention(x: Tensor, weights: Mapping[str, Tensor], name: str, channels: Tensor | None = None) -> Tensor:
    """x: (…, n, tokens, channels). Masked heads give and take nothing in either mix, so they add nothing to the result."""
    *front, tokens, width = x.shape
    heads, side = width // HEAD_WIDTH, round(tokens**0.5)
    query, key = (_linear(x, weights, f"{name}.{layer}").unflatten(-1, (heads, -1)).transpose(-3, -2) for layer in ("query", "key"))
    value = _linear(x, weights, f"{name}.value").mT.reshape(*front, -1, side, side)
    value = convolved(value, weights[f"{name}.local.weight"])
    value = value.reshape(*front, heads, -1, tokens).mT  # (…, n, heads, tokens, 32)
    mixes = [(weights[f"{name}.{layer}.weight"], weights[f"{name}.{layer}.bias"]) for layer in ("before", "after")]
    if channels is not None:
        active = channels[..., ::HEAD_WIDTH]  # widths are whole heads
        both = active[..., None, :] & active[..., None]
        mixes = [(torch.where(both, weight, zero(weight)), torch.where(active, bias, zero(bias))) for weight, bias in mixes]
    positions = position_bias(weights[f"{name}.positions"], side)
    positions = positions[:, None] if positions.ndim > 3 else positions
    product = torch.add(positions, query @ key.mT, alpha=HEAD_WIDTH**-0.5)
    product = _mixed(_mixed(product, *mixes[0]).softmax(-1), *mixes[1])
    return _linear(F.silu((product @ value).transpose(-3, -2).flatten(-2)), weights, f"{name}.project")


def position_bias(table: Tensor, side: int) -> Tensor:
    """(heads, tokens, tokens) from a table by the offset of one token from another, down and right, with no offset in its middle.

    table: (2 side - 1, 2 side - 1, heads), or for larger maps; in groups both have them first.
    """
    middle = table.shape[-2] // 2
    near = slice(middle - side + 1, middle + side)
    windows = table[..., near, near, :].unfold(-3, side, 1)
    windows = windows.unfold(-3, side, 1)  # (…, down, right, heads, and backwards: down, right of the other)
    return windows.flip(-2, -1).movedim(-3, -5).reshape(*table.shape[:-3], -1, side**2, side**2)


def _mixed(product: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(…, n, heads, tokens, tokens): every head becomes a combination of all."""
    rows = product.flatten(-2).flatten(0, -3)  # (groups * n, heads, tokens²)
    if weight.ndim > 2:  # each image gets those of its group
        images = product.shape[1]
        weight, bias = weight.repeat_interleave(images, 0, output_size=len(rows)), bias.repeat_interleave(images, 0, output_size=len(rows))
    if under_vmap():  # which would make three operations of the next one
        return (weight @ rows + bias[:, None]).reshape(product.shape)
    return torch.baddbmm(bias[..., None], weight.expand(len(rows), *weight.shape[-2:]), rows).reshape(product.shape)


def scaled(scale: Tensor, width: Tensor) -> Tensor:
    """A scale times the factor of branches. scale: (channels,), width: (); in groups each has them first."""
    return scale * (BRANCH / width.to(scale.dtype))[..., None]


def _joined(tokens: Tensor, branch: Tensor, scale: Tensor, width: Tensor | int) -> Tensor:
    return torch.addcmul(tokens, branch, _over_tokens(scale), value=BRANCH / width if isinstance(width, int) else 1)


def _over_tokens(channels: Tensor) -> Tensor:
    """(channels,) as it is; (groups, channels) for all images and tokens of a group."""
    return channels[:, None, None] if channels.ndim > 1 else channels


def _linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return product(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
