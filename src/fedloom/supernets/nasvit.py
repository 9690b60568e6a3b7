"""The NASViT supernet (Gong et al., ICLR 2022): nested weights, the first channels and heads of each layer shared by all widths."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.architecture import Architecture
from fedloom.spaces.convolutions import Head, Outline, Stem
from fedloom.spaces.nasvit import (
    DEPTHS,
    EXPANSIONS,
    HEAD_EXPANSION,
    KERNELS,
    RESIDUES,
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
from fedloom.supernets.elastic import below, constant, counting, mean_pool, only, pick, pointwise, sent, zero
from fedloom.supernets.inverted import PlainNetwork, run_branch, run_head, run_network, run_stem
from fedloom.supernets.nasvit_attention import attention_block, scaled
from fedloom.supernets.nasvit_plain import plain_block
from fedloom.supernets.nasvit_weights import Piece, initial, piece_regions
from fedloom.supernets.normalisation import Statistics


@SUPERNETS.add("nasvit", NASViTSettings, "nested weights of convolutions and attention, with scales by depth and number of tokens")
class NASViTSupernet(Chain[NASViT]):
    likes_zeros = True

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
        shortcut = _pooled(x, piece)
        shortcut = pointwise(shortcut, weights[f"{piece.name}.shortcut.weight"]) if piece.reshapes else shortcut
        return run_branch(x, weights, piece, weights[f"{piece.name}.depth.conv.weight"], statistics, "silu", residual=shortcut)

    def among_zeros(self, images: Tensor, weights: Weights, genes: Tensor) -> Tensor:
        """Layers among zeros give zeros for channels, heads and branches that the architecture lacks, so blocks that it lacks pass on
        what they get. Only counts of channels and the kind of shortcuts are left to genes."""
        widths = self._stage_widths(genes)  # of the stem, then of the stages
        same = (widths[:-1] == widths[1:]).to(images.dtype)
        outline, scales = self._largest(images.shape[-1]), dict[str, tuple[Tensor, Tensor]]()
        for number in range(len(STAGES)):
            attention = [block for block in outline.blocks if isinstance(block, AttentionBlock) and place(block.name)[0] == number]
            scales |= _scales_among_zeros(weights, attention, widths[number + 1]) if attention else {}

        def run(x: Tensor, block: AnyBlock) -> Tensor:
            number, _ = place(block.name)
            if isinstance(block, AttentionBlock):
                return attention_block(x, weights, block.name, scales[block.name], widths[number + 1])
            shortcut = _pooled(x, block)
            if f"{block.name}.shortcut.weight" in weights:
                wider = F.pad(shortcut, (0, 0, 0, 0, 0, block.outputs - block.inputs))
                shortcut = torch.addcmul(pointwise(shortcut, weights[f"{block.name}.shortcut.weight"]), wider, same[number])
            return run_branch(x, weights, block, weights[f"{block.name}.depth.conv.weight"], None, "silu", residual=shortcut)

        return run_network(images, weights, outline, run, None, "silu")

    def _stage_widths(self, genes: Tensor) -> Tensor:
        """(8,) of the stem and the stages."""
        choices = [[self.space.wide(width) for width in gene.values] for gene in self.space.genes[WIDTHS]][:-1]
        most = max(map(len, choices))
        table = tuple(tuple([*row, *[0] * (most - len(row))]) for row in choices)
        return constant(table, genes.device).gather(1, genes[WIDTHS][:-1, None])[:, 0]

    def _largest(self, side: int) -> Outline[AnyBlock]:
        """The largest architecture that sees images at this side."""
        largest, resolution = self.space.named["largest"], self.space.settings.resolutions.index(side)
        return self.space.outline(replace(largest, choices=(resolution, *largest.choices[1:])))

    def masked(self, images: Tensor, weights: Weights, genes: Tensor, statistics: Statistics | None = None) -> Tensor:
        space, outline = self.space, self._largest(images.shape[-1])
        widths = [pick([space.wide(width) for width in gene.values], genes[1 + n]) for n, gene in enumerate(space.genes[WIDTHS])]

        def run(x: Tensor, block: AnyBlock) -> Tensor:
            number, index = place(block.name)
            stage = STAGES[number]
            inputs, outputs = widths[number + (index > 0)], widths[number + 1]
            depths = space.depths(number)
            depth = pick(depths, genes[DEPTHS][number])
            if isinstance(block, AttentionBlock):
                y = _masked_attention(x, weights, block, _picked_scales(weights, block, depths, depth), outputs)
            else:
                middle, kernel = inputs * pick(stage.expansions, genes[EXPANSIONS][number]), pick(stage.kernels, genes[KERNELS][number])
                hidden = _round_to_eight(middle // 4)
                y = _masked_convolution(x, weights, block, statistics, (inputs, middle, hidden, outputs, kernel))
            return y if index < depths[0] else torch.where(depth > index, y, x)

        masks = (below(outline.stem, widths[0]), below(outline.head, widths[-2] * HEAD_EXPANSION), below(outline.features, widths[-1]))
        return run_network(images, weights, outline, run, statistics, "silu", masks)

    # -- many networks at once -----------------------------------------------------
    @property
    def takes_groups(self) -> bool:
        return True

    def kind(self, piece: Piece) -> Hashable:
        """Pieces at one place of the network, on maps of one size."""
        return _layers(piece), piece.size

    def kind_names(self, piece: Piece) -> Iterable[str]:
        """Of its scales an attention block needs those for maps of its size."""
        names = [name for name in self.shapes if name.startswith(_layers(piece))]
        tokens = f"_tokens{piece.size**2 % RESIDUES}"
        return [name for name in names if ".scale." not in name or name.endswith(tokens)]

    def run_alike(self, pieces: Sequence[Piece], x: Tensor, weights: Weights, statistics: Statistics | None = None) -> Tensor:
        """Maps between pieces have as many channels as the largest architecture's, zeros after their own."""
        first, largest = pieces[0], self._largest_pieces[self.kind(pieces[0])]

        def numbers(*named: str) -> list[Tensor]:
            """(groups,) each: of the pieces."""
            return list(sent(torch.tensor([[getattr(piece, name) for piece in pieces] for name in named]), x.device))

        def mask(channels: int, width: Tensor) -> Tensor:
            return below(channels, width[:, None])

        if isinstance(first, Stem):
            (outputs,) = numbers("outputs")
            return run_stem(resized(x, first.size), weights, first.stride, statistics, "silu", mask(largest.outputs, outputs))
        if isinstance(first, Head):
            middle, features = numbers("middle", "features")
            return run_head(x, weights, statistics, "silu", mask(largest.middle, middle), mask(largest.features, features))
        if isinstance(first, AttentionBlock):
            (width,) = numbers("width")
            return _masked_attention(x, weights, largest, _own_scales(weights, cast(Sequence[AttentionBlock], pieces), x.device), width)
        return _masked_convolution(x, weights, largest, statistics, numbers("inputs", "middle", "squeeze", "outputs", "kernel"))

    @cached_property
    def _largest_pieces(self) -> dict[Hashable, Any]:
        outlines = [self._largest(side) for side in self.space.settings.resolutions]
        return {self.kind(piece): piece for outline in outlines for piece in outline.pieces}

    def network(self, architecture: Architecture) -> nn.Module:
        outline = self.space.outline(architecture)
        return PlainNetwork(outline, plain_block, "silu", outline.input_size)


# -- layers -------------------------------------------------------------------
def _pooled(x: Tensor, block: ConvolutionBlock) -> Tensor:
    """The shortcut at the size of the branch: means of four pixels, zeros around a map of odd side counted among them."""
    if block.stride == 1:
        return x
    return mean_pool(x.flatten(0, -4), 2, 2, block.size % 2, counts_padding=True).unflatten(0, x.shape[:-3])


def _layers(piece: Piece) -> tuple[str, ...]:
    """How the names of a piece's parameters begin."""
    if isinstance(piece, Stem):
        return ("stem.",)
    return ("head.", "features.", "classifier.") if isinstance(piece, Head) else (f"{piece.name}.",)


def _picked_scales(weights: Weights, block: AttentionBlock, depths: Sequence[int], depth: Tensor) -> tuple[Tensor, Tensor]:
    """Of attention and feed-forward layers at this depth, one of those that its stage may have."""
    _, index = place(block.name)
    scales = [torch.zeros_like(weights[f"{block.name}.attention.norm.weight"])] * 2
    for value in dict.fromkeys(depths):
        if value > index:
            names = [f"{block.name}.{branch}.scale.{scale_row(value, block.size)}" for branch in ("attention", "feed")]
            scales = [torch.where(depth == value, weights[name], scale) for name, scale in zip(names, scales, strict=True)]
    return scales[0], scales[1]


def _own_scales(weights: Weights, blocks: Sequence[AttentionBlock], device: torch.device) -> tuple[Tensor, Tensor]:
    """(groups, channels) of attention and feed-forward layers: each block's."""
    rows = list(dict.fromkeys(block.row for block in blocks))
    which = sent(torch.tensor([rows.index(block.row) for block in blocks]), device)

    def of(branch: str) -> Tensor:
        some = torch.stack([weights[f"{blocks[0].name}.{branch}.scale.{row}"] for row in rows])
        return some[which] if some.ndim == 2 else some[which, counting(len(blocks), device)]  # shared, or (rows, groups, channels)

    return of("attention"), of("feed")


def _scales_among_zeros(weights: Weights, blocks: Sequence[AttentionBlock], width: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Of attention and feed-forward layers, for the blocks of one stage: all but those of its depth and number of tokens are zero."""
    branches = [f"{block.name}.{branch}.scale." for block in blocks for branch in ("attention", "feed")]
    rows = [(number, own) for number, branch in enumerate(branches) for name, own in weights.items() if name.startswith(branch)]
    numbers = constant(tuple(number for number, _ in rows), width.device)
    every = torch.stack([own for _, own in rows])
    of_branch = (counting(len(branches), width.device)[:, None] == numbers).to(every.dtype)
    found = scaled(of_branch @ every, width).unbind()
    return {block.name: (found[2 * number], found[2 * number + 1]) for number, block in enumerate(blocks)}


# Under masks widths are () or, in groups, (groups,).
def _masked_attention(x: Tensor, weights: Weights, block: AttentionBlock, scales: tuple[Tensor, Tensor], width: Tensor) -> Tensor:
    attention, feed = (scaled(scale, width) for scale in scales)
    return attention_block(x, weights, block.name, (attention, feed), width, below(block.width, width[..., None]))


def _masked_convolution(
    x: Tensor, weights: Weights, block: ConvolutionBlock, statistics: Statistics | None, numbers: Sequence[Tensor]
) -> Tensor:
    """numbers: its inputs, middle channels, units of squeeze-excite, outputs and kernel."""
    inputs, middle, hidden, outputs, kernel = numbers
    masks = [below(most, width[..., None]) for most, width in ((block.middle, middle), (block.squeeze, hidden), (block.outputs, outputs))]
    shortcut = _masked_shortcut(_pooled(x, block), weights, block, inputs, outputs)
    own = _masked_kernel(weights[f"{block.name}.depth.conv.weight"], kernel)
    return run_branch(x, weights, block, own, statistics, "silu", (masks[0], masks[1], masks[2]), residual=shortcut)


def _masked_shortcut(x: Tensor, weights: Weights, block: ConvolutionBlock, inputs: Tensor, outputs: Tensor) -> Tensor:
    """The identity where the widths are equal, else the convolution."""
    if f"{block.name}.shortcut.weight" not in weights:  # never needed in this instance
        return x
    fitted = only(pointwise(x, weights[f"{block.name}.shortcut.weight"]), below(block.outputs, outputs[..., None]))
    same = F.pad(x, (0, 0, 0, 0, 0, block.outputs - block.inputs))
    return torch.where((inputs == outputs)[..., None, None, None, None], same, fitted)


def _masked_kernel(weight: Tensor, kernel: Tensor) -> Tensor:
    """The centre of a depth-wise weight that this kernel uses, zeros around it; (channels, 1, side, side)."""
    side = weight.shape[-1]
    if side == 3:
        return weight
    near = (counting(side, weight.device) - side // 2).abs() <= kernel[..., None] // 2
    return torch.where((near[..., None, :] & near[..., None])[..., None, None, :, :], weight, zero(weight))


def _round_to_eight(width: Tensor) -> Tensor:
    """``round_to_eight`` of whole numbers, as arithmetic on tensors."""
    rounded = ((width + 4) // 8 * 8).clamp(min=8)
    return rounded + 8 * (10 * rounded < 9 * width)
