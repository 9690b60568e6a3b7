"""The NASViT supernet (Gong et al., ICLR 2022): nested weights, the first channels and heads of each layer shared by all widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.architecture import Architecture
from fedloom.spaces.convolutions import Head, Stem
from fedloom.spaces.nasvit import (
    DEPTHS,
    EXPANSIONS,
    HEAD_EXPANSION,
    KERNELS,
    STAGES,
    WIDTHS,
    AnyBlock,
    AttentionBlock,
    ConvolutionBlock,
    NASViT,
    NASViTSettings,
    place,
    scale_row,
)
from fedloom.supernets.base import SUPERNETS, Region, Weights, resized
from fedloom.supernets.chain import Chain
from fedloom.supernets.elastic import below, only, pick, pointwise
from fedloom.supernets.inverted import PlainNetwork, run_branch, run_head, run_network, run_stem
from fedloom.supernets.nasvit_attention import attention_block
from fedloom.supernets.nasvit_plain import plain_block
from fedloom.supernets.nasvit_weights import Piece, initial, piece_regions
from fedloom.supernets.normalisation import Statistics


@SUPERNETS.add("nasvit", NASViTSettings, "nested weights of convolutions and attention, with scales by depth and number of tokens")
class NASViTSupernet(Chain[NASViT]):
    def initial(self, seed: int) -> dict[str, Tensor]:
        return initial(self.space, seed)

    def pieces(self, architecture: Architecture) -> tuple[Piece, ...]:
        return self.space.outline(architecture).pieces

    def piece_regions(self, piece: Piece) -> Mapping[str, Region]:
        return piece_regions(self.space, piece)

    def run_piece(self, piece: Piece, x: Tensor, weights: Weights, statistics: Statistics | None = None) -> Tensor:
        if isinstance(piece, Stem):
            return run_stem(resized(x, piece.size), weights, piece.stride, statistics, "silu")
        if isinstance(piece, Head):
            return run_head(x, weights, statistics, "silu")
        if isinstance(piece, AttentionBlock):
            attention_scale, feed_scale = (weights[f"{piece.name}.{branch}.scale.{piece.row}"] for branch in ("attention", "feed"))
            return attention_block(x, weights, piece.name, (attention_scale, feed_scale), piece.width)
        y = run_branch(x, weights, piece, weights[f"{piece.name}.depth.conv.weight"], statistics, "silu")
        x = _pooled(x, piece)
        return y + (pointwise(x, weights[f"{piece.name}.shortcut.weight"]) if piece.reshapes else x)

    def masked(self, images: Tensor, weights: Weights, genes: Tensor, statistics: Statistics | None = None) -> Tensor:
        space = self.space
        resolution = space.settings.resolutions.index(images.shape[-1])
        outline = space.outline(replace(space.named["largest"], choices=(resolution, *space.named["largest"].choices[1:])))
        widths = [pick([space.wide(width) for width in gene.values], genes[1 + n]) for n, gene in enumerate(space.genes[WIDTHS])]

        def run(x: Tensor, block: AnyBlock) -> Tensor:
            number, index = place(block.name)
            stage = STAGES[number]
            inputs, outputs = widths[number + (index > 0)], widths[number + 1]
            depths = space.depths(number)
            depth = pick(depths, genes[DEPTHS][number])
            if isinstance(block, AttentionBlock):
                y = _masked_attention(x, weights, block, depths, depth, outputs)
            else:
                middle = inputs * pick(stage.expansions, genes[EXPANSIONS][number])
                kernel = _masked_kernel(weights[f"{block.name}.depth.conv.weight"], pick(stage.kernels, genes[KERNELS][number]))
                masks = (below(block.middle, middle), below(block.squeeze, _round_to_eight(middle // 4)), below(block.outputs, outputs))
                y = run_branch(x, weights, block, kernel, statistics, "silu", masks)
                y = y + _masked_shortcut(_pooled(x, block), weights, block, inputs, outputs)
            return y if index < depths[0] else torch.where(depth > index, y, x)

        masks = (below(outline.stem, widths[0]), below(outline.head, widths[-2] * HEAD_EXPANSION), below(outline.features, widths[-1]))
        return run_network(images, weights, outline, run, statistics, "silu", masks)

    def network(self, architecture: Architecture) -> nn.Module:
        outline = self.space.outline(architecture)
        return PlainNetwork(outline, plain_block, "silu", outline.input_size)


# -- layers -------------------------------------------------------------------
def _pooled(x: Tensor, block: ConvolutionBlock) -> Tensor:
    """The shortcut at the size of the branch: means of four pixels, zeros around a map of odd side counted among them."""
    return F.avg_pool2d(x, 2, padding=block.size % 2) if block.stride == 2 else x


def _masked_attention(x: Tensor, weights: Weights, block: AttentionBlock, depths: Sequence[int], depth: Tensor, width: Tensor) -> Tensor:
    """An attention block with the scales of this depth, one of those that its stage may have."""
    _, index = place(block.name)
    scales = [torch.zeros_like(weights[f"{block.name}.attention.norm.weight"])] * 2
    for value in dict.fromkeys(depths):
        if value > index:
            names = [f"{block.name}.{branch}.scale.{scale_row(value, block.size)}" for branch in ("attention", "feed")]
            scales = [torch.where(depth == value, weights[name], scale) for name, scale in zip(names, scales, strict=True)]
    return attention_block(x, weights, block.name, (scales[0], scales[1]), width, below(block.width, width))


def _masked_shortcut(x: Tensor, weights: Weights, block: ConvolutionBlock, inputs: Tensor, outputs: Tensor) -> Tensor:
    """The identity where the widths are equal, else the convolution."""
    if f"{block.name}.shortcut.weight" not in weights:  # never needed in this instance
        return x
    fitted = only(pointwise(x, weights[f"{block.name}.shortcut.weight"]), below(block.outputs, outputs))
    same = F.pad(x, (0, 0, 0, 0, 0, block.outputs - block.inputs))
    return torch.where(inputs == outputs, same, fitted)


def _masked_kernel(weight: Tensor, kernel: Tensor) -> Tensor:
    """The centre of a depth-wise weight that this kernel uses, zeros around it; (channels, 1, side, side)."""
    side = weight.shape[-1]
    if side == 3:
        return weight
    near = (torch.arange(side, device=weight.device) - side // 2).abs() <= kernel // 2
    return torch.where(near & near[:, None], weight, 0.0)


def _round_to_eight(width: Tensor) -> Tensor:
    """``round_to_eight`` of whole numbers, as arithmetic on tensors."""
    rounded = ((width + 4) // 8 * 8).clamp(min=8)
    return rounded + 8 * (10 * rounded < 9 * width)
