"""The blocks of a NASViT architecture as ordinary modules: for export and deployment. Parameter names are those of ``Supernet.plain``."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.spaces.nasvit import HEAD_WIDTH, VALUE_EXPANSION, AnyBlock, AttentionBlock, ConvolutionBlock
from fedloom.supernets.inverted import PlainBranch
from fedloom.supernets.nasvit_attention import BRANCH
from fedloom.supernets.normalisation import EPS


def plain_block(block: AnyBlock) -> nn.Module:
    return PlainAttentionBlock(block) if isinstance(block, AttentionBlock) else PlainConvolutionBlock(block)


class PlainConvolutionBlock(PlainBranch):
    def __init__(self, block: ConvolutionBlock) -> None:
        super().__init__(block, "silu")
        self.shortcut = nn.Conv2d(block.inputs, block.outputs, 1, bias=False) if block.reshapes else None
        self.stride, self.padding = block.stride, block.size % 2

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x = F.avg_pool2d(x, 2, padding=self.padding) if self.stride == 2 else x
        return y + (x if self.shortcut is None else self.shortcut(x))


class PlainAttentionBlock(nn.Module):
    def __init__(self, block: AttentionBlock) -> None:
        super().__init__()
        self.attention, self.feed = PlainAttention(block), PlainFeed(block)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.feed(self.attention(x.flatten(2).transpose(1, 2)))
        return tokens.transpose(1, 2).reshape(x.shape)


class PlainAttention(nn.Module):
    def __init__(self, block: AttentionBlock) -> None:
        super().__init__()
        self.block = block
        width, heads, side, values = block.width, block.heads, block.size, VALUE_EXPANSION * block.width
        self.norm = JointNorm(width)
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, values)
        self.local = nn.Conv2d(values, values, 3, padding=1, groups=values, bias=False)
        self.positions = nn.Parameter(torch.zeros(2 * side - 1, 2 * side - 1, heads))
        self.before, self.after = nn.Linear(heads, heads), nn.Linear(heads, heads)
        self.project = nn.Linear(values, width)
        self.scale = scales(block)

    def forward(self, tokens: Tensor) -> Tensor:
        x, heads, side = self.norm(tokens), self.block.heads, self.block.size
        query, key = (layer(x).unflatten(2, (heads, HEAD_WIDTH)).transpose(1, 2) for layer in (self.query, self.key))
        value = self.local(self.value(x).transpose(1, 2).unflatten(2, (side, side)))
        value = value.flatten(2).unflatten(1, (heads, -1)).transpose(2, 3)  # (n, heads, tokens, 32)
        place = torch.arange(side, device=x.device)
        apart = place[:, None] - place + side - 1
        bias = self.positions[apart[:, None, :, None], apart[None, :, None, :]].reshape(side**2, side**2, heads)
        product = (query @ key.transpose(2, 3)).permute(0, 2, 3, 1) * HEAD_WIDTH**-0.5 + bias  # (n, tokens, tokens, heads)
        mixed = self.after(self.before(product).softmax(2)).permute(0, 3, 1, 2)
        y = self.project(F.silu((mixed @ value).transpose(1, 2).flatten(2)))
        return tokens + y * self.scale[self.block.row] * (BRANCH / self.block.width)


class PlainFeed(nn.Module):
    """Two feed-forward layers, one after the other, that share a scale."""

    def __init__(self, block: AttentionBlock) -> None:
        super().__init__()
        self.row, self.factor = block.row, BRANCH / block.width
        self.first, self.second = (feed_forward(block.width) for _ in range(2))
        self.scale = scales(block)

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            tokens = tokens + layer(tokens) * self.scale[self.row] * self.factor
        return tokens


class JointNorm(nn.Module):
    """Layer normalisation over tokens and channels together, with a weight and a bias per channel; x: (n, tokens, channels)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[1:], eps=EPS) * self.weight + self.bias


def feed_forward(width: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(norm=JointNorm(width), hidden=nn.Linear(width, width), act=nn.SiLU(), output=nn.Linear(width, width)))


def scales(block: AttentionBlock) -> nn.ParameterDict:
    return nn.ParameterDict({block.row: nn.Parameter(torch.ones(block.width))})
