"""What the NASViT supernet's weights are: names, shapes and first values, and the part of them that an architecture uses.

An attention block has a scale of its own for every depth of its stage and every number of tokens modulo 8 that it can meet. Each is
a parameter, so that an architecture names exactly the ones it trains. Nothing is held that no architecture of the instance uses.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedloom.spaces.convolutions import Head, Stem
from fedloom.spaces.nasvit import STAGES, VALUE_EXPANSION, WIDTHS, AnyBlock, AttentionBlock, ConvolutionBlock, NASViT, place, scale_row
from fedloom.supernets.base import Region
from fedloom.supernets.elastic import centre

WHOLE = slice(None)
Piece = Stem | AnyBlock | Head
FIRST_SCALE = 1e-4  # attention and feed-forward branches start almost at zero


def initial(space: NASViT, seed: int) -> dict[str, Tensor]:
    """First values as in the public implementation."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}

    def uniform(name: str, *shape: int, bias: bool = False) -> None:
        bound = 1 / math.sqrt(math.prod(shape[1:]))  # one over the root of the incoming connections, as torch's own layers
        weights[f"{name}.weight"] = (2 * torch.rand(shape, generator=generator) - 1) * bound
        if bias:
            weights[f"{name}.bias"] = (2 * torch.rand(shape[0], generator=generator) - 1) * bound

    def norm(name: str, channels: int, weight: float = 1.0) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.full((channels,), weight), torch.zeros(channels)

    def convolution_block(block: ConvolutionBlock) -> None:
        if block.expands:
            uniform(f"{block.name}.expand.conv", block.middle, block.inputs, 1, 1)
            norm(f"{block.name}.expand.norm", block.middle)
        uniform(f"{block.name}.depth.conv", block.middle, 1, block.kernel, block.kernel)
        norm(f"{block.name}.depth.norm", block.middle)
        if block.squeeze:
            uniform(f"{block.name}.squeeze.reduce", block.squeeze, block.middle, 1, 1, bias=True)
            uniform(f"{block.name}.squeeze.restore", block.middle, block.squeeze, 1, 1, bias=True)
        uniform(f"{block.name}.project.conv", block.outputs, block.middle, 1, 1)
        norm(f"{block.name}.project.norm", block.outputs, weight=0.0)  # starts as the shortcut alone
        if _may_reshape(space, block):
            uniform(f"{block.name}.shortcut", block.outputs, block.inputs, 1, 1)

    def attention_block(block: AttentionBlock) -> None:
        width, heads, values, offsets = block.width, block.heads, VALUE_EXPANSION * block.width, 2 * block.size - 1
        norm(f"{block.name}.attention.norm", width)
        for layer, outputs, inputs in (("query", width, width), ("key", width, width), ("value", values, width)):
            uniform(f"{block.name}.attention.{layer}", outputs, inputs, bias=True)
        uniform(f"{block.name}.attention.local", values, 1, 3, 3)
        weights[f"{block.name}.attention.positions"] = 0.02 * torch.randn(offsets, offsets, heads, generator=generator)
        for layer, outputs, inputs in (("before", heads, heads), ("after", heads, heads), ("project", width, values)):
            uniform(f"{block.name}.attention.{layer}", outputs, inputs, bias=True)
        for layer in ("first", "second"):
            norm(f"{block.name}.feed.{layer}.norm", width)
            uniform(f"{block.name}.feed.{layer}.hidden", width, width, bias=True)
            uniform(f"{block.name}.feed.{layer}.output", width, width, bias=True)
        for branch in ("attention", "feed"):
            weights.update({f"{block.name}.{branch}.scale.{row}": torch.full((width,), FIRST_SCALE) for row in _scale_rows(space, block)})

    outline = space.outline(space.named["largest"])
    uniform("stem.conv", outline.stem, outline.image.channels, 3, 3)
    norm("stem.norm", outline.stem)
    for block in outline.blocks:
        if isinstance(block, AttentionBlock):
            attention_block(block)
        else:
            convolution_block(block)
    uniform("head.conv", outline.head, outline.last, 1, 1)
    norm("head.norm", outline.head)
    uniform("features.conv", outline.features, outline.head, 1, 1)
    uniform("classifier", outline.image.classes, outline.features, bias=True)
    return weights


def _may_reshape(space: NASViT, block: ConvolutionBlock) -> bool:
    """Whether some architecture has a block here with other outputs than inputs: only the first of a stage may."""
    number, index = place(block.name)
    inputs, outputs = ({space.wide(width) for width in gene.values} for gene in space.genes[WIDTHS][number : number + 2])
    return index == 0 and len(inputs | outputs) > 1


def _scale_rows(space: NASViT, block: AttentionBlock) -> list[str]:
    """The scales that some architecture uses in this block."""
    number, index = place(block.name)
    sides = [space.sides(resolution)[number] for resolution in space.settings.resolutions]
    return list(dict.fromkeys(scale_row(depth, side) for depth in space.depths(number) if depth > index for side in sides))


# -- regions ------------------------------------------------------------------
def piece_regions(space: NASViT, piece: Piece) -> dict[str, Region]:
    """The first channels of every layer, the centre of kernels and of position tables, one scale per branch."""
    if isinstance(piece, Stem):
        stem = slice(0, piece.outputs)
        return {"stem.conv.weight": (stem, WHOLE, WHOLE, WHOLE), **_vectors("stem.norm", stem)}
    if isinstance(piece, Head):
        return _head_regions(piece)
    number, _ = place(piece.name)
    if isinstance(piece, AttentionBlock):
        largest = space.sides(space.settings.resolutions[-1])[number]
        parts = _attention_regions(piece, centre(2 * largest - 1, 2 * piece.size - 1))
    else:
        kernels = STAGES[number].kernels
        parts = _convolution_regions(piece, centre(kernels[-1], piece.kernel) if len(kernels) > 1 else WHOLE)
    return {f"{piece.name}.{name}": region for name, region in parts.items()}


def _head_regions(piece: Head) -> dict[str, Region]:
    last, head, features = (slice(0, n) for n in (piece.inputs, piece.middle, piece.features))
    return {
        "head.conv.weight": (head, last, WHOLE, WHOLE),
        **_vectors("head.norm", head),
        "features.conv.weight": (features, head, WHOLE, WHOLE),
        "classifier.weight": (WHOLE, features),
        "classifier.bias": (WHOLE,),
    }


def _vectors(name: str, part: slice) -> dict[str, Region]:
    return {f"{name}.weight": (part,), f"{name}.bias": (part,)}


def _convolution_regions(block: ConvolutionBlock, kernel: slice) -> dict[str, Region]:
    inputs, middle, outputs, hidden = (slice(0, n) for n in (block.inputs, block.middle, block.outputs, block.squeeze))
    parts: dict[str, Region] = {
        "depth.conv.weight": (middle, WHOLE, kernel, kernel),
        "project.conv.weight": (outputs, middle, WHOLE, WHOLE),
        **_vectors("depth.norm", middle),
        **_vectors("project.norm", outputs),
    }
    if block.expands:
        parts |= {"expand.conv.weight": (middle, inputs, WHOLE, WHOLE), **_vectors("expand.norm", middle)}
    if block.squeeze:
        parts |= {"squeeze.reduce.weight": (hidden, middle, WHOLE, WHOLE), "squeeze.reduce.bias": (hidden,)}
        parts |= {"squeeze.restore.weight": (middle, hidden, WHOLE, WHOLE), "squeeze.restore.bias": (middle,)}
    if block.reshapes:
        parts["shortcut.weight"] = (outputs, inputs, WHOLE, WHOLE)
    return parts


def _attention_regions(block: AttentionBlock, offsets: slice) -> dict[str, Region]:
    width, values, heads = (slice(0, n) for n in (block.width, VALUE_EXPANSION * block.width, block.heads))
    layers = {"query": (width, width), "key": (width, width), "value": (values, width), "project": (width, values)}
    parts: dict[str, Region] = {
        "attention.positions": (offsets, offsets, heads),
        "attention.local.weight": (values, WHOLE, WHOLE, WHOLE),
        **_vectors("attention.norm", width),
    }
    for layer, (outputs, inputs) in {**layers, "before": (heads, heads), "after": (heads, heads)}.items():
        parts |= {f"attention.{layer}.weight": (outputs, inputs), f"attention.{layer}.bias": (outputs,)}
    for layer in ("feed.first", "feed.second"):
        parts |= _vectors(f"{layer}.norm", width)
        for inside in ("hidden", "output"):
            parts |= {f"{layer}.{inside}.weight": (width, width), f"{layer}.{inside}.bias": (width,)}
    return {**parts, **{f"{branch}.scale.{block.row}": (width,) for branch in ("attention", "feed")}}
