"""The once-for-all MobileNetV3 supernet: nested weights, the first channels of each layer shared by all widths."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from fedloom.core.architecture import Architecture
from fedloom.spaces.base import round_to_eight
from fedloom.spaces.convolutions import Head, Stem
from fedloom.spaces.mobilenetv3 import BLOCKS, DEPTHS, EXPANSIONS, KERNELS, STAGES, Block, MobileNetV3, MobileNetV3Settings
from fedloom.supernets.base import SUPERNETS, Region, Weights, resized
from fedloom.supernets.chain import Chain
from fedloom.supernets.elastic import Extent, below, centre, constant, counting, elastic_kernel, masked_kernel, picks, sent
from fedloom.supernets.inverted import PlainBranch, PlainNetwork, run_branch, run_head, run_network, run_stem
from fedloom.supernets.normalisation import Statistics

WHOLE = slice(None)
MATRICES = (".to_five", ".to_three")  # make a smaller kernel of a larger one
Piece = Stem | Block | Head


@SUPERNETS.add("mobilenetv3", MobileNetV3Settings, "nested once-for-all weights with learned kernel transformations")
class MobileNetV3Supernet(Chain[MobileNetV3]):
    def initial(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        weights: dict[str, Tensor] = {}

        def convolution(name: str, outputs: int, inputs: int, kernel: int = 1, depthwise: bool = False) -> None:
            # He initialisation over the outgoing connections, as MobileNetV3 uses.
            deviation = math.sqrt(2.0 / (kernel**2 * (1 if depthwise else outputs)))
            weights[f"{name}.weight"] = torch.randn(outputs, inputs, kernel, kernel, generator=generator) * deviation

        def norm(name: str, channels: int) -> None:
            weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.ones(channels), torch.zeros(channels)

        outline = self.space.outline(self.space.named["largest"])
        convolution("stem.conv", outline.stem, outline.image.channels, 3)
        norm("stem.norm", outline.stem)
        for block in outline.blocks:
            if block.expands:
                convolution(f"{block.name}.expand.conv", block.middle, block.inputs)
                norm(f"{block.name}.expand.norm", block.middle)
            convolution(f"{block.name}.depth.conv", block.middle, 1, block.kernel, depthwise=True)
            if block.kernel == 7:
                weights[f"{block.name}.depth.to_five"] = torch.eye(25).reshape(5, 5, 25)
                weights[f"{block.name}.depth.to_three"] = torch.eye(9)
            norm(f"{block.name}.depth.norm", block.middle)
            if block.squeeze:
                for layer, outputs, inputs in (("reduce", block.squeeze, block.middle), ("restore", block.middle, block.squeeze)):
                    convolution(f"{block.name}.squeeze.{layer}", outputs, inputs)
                    weights[f"{block.name}.squeeze.{layer}.bias"] = torch.zeros(outputs)
            convolution(f"{block.name}.project.conv", block.outputs, block.middle)
            norm(f"{block.name}.project.norm", block.outputs)
            if block.shortcut:  # starts as the identity, so that all depths agree at first and train faster
                weights[f"{block.name}.project.norm.weight"].zero_()
        convolution("head.conv", outline.head, outline.last)
        norm("head.norm", outline.head)
        convolution("features.conv", outline.features, outline.head)
        classes = outline.image.classes
        weights["classifier.weight"] = torch.randn(classes, outline.features, generator=generator) * 0.01
        weights["classifier.bias"] = torch.zeros(classes)
        return weights

    def pieces(self, architecture: Architecture) -> tuple[Piece, ...]:
        return self.space.outline(architecture).pieces

    def piece_regions(self, piece: Piece) -> Mapping[str, Region]:
        if isinstance(piece, Block) and piece.expands:
            return _block_regions(piece)
        # not elastic: stem, first block and head
        layers = {Stem: ("stem.",), Block: ("first.",), Head: ("head.", "features.", "classifier.")}[type(piece)]
        return {name: (WHOLE,) * len(shape) for name, shape in self.shapes.items() if name.startswith(layers)}

    def run_piece(self, piece: Piece, x: Tensor, weights: Weights, statistics: Statistics | None = None) -> Tensor:
        settings = self.space.settings
        if isinstance(piece, Stem):
            return run_stem(resized(x, settings.input_size), weights, piece.stride, statistics, "hardswish", norm=settings.norm)
        if isinstance(piece, Head):
            return run_head(x, weights, statistics, "hardswish", norm=settings.norm)
        return self._block(x, weights, piece, _depth_kernel(weights, piece), statistics)

    @property
    def takes_groups(self) -> bool:
        return self.space.settings.norm == "batch"

    def kind(self, piece: Piece) -> Hashable:
        return piece.name if isinstance(piece, Block) and piece.expands else piece

    def kind_names(self, piece: Piece) -> Iterable[str]:
        if not (isinstance(piece, Block) and piece.expands):
            return self.piece_regions(piece)
        return [name for name in self.shapes if name.startswith(f"{piece.name}.")]

    def run_alike(self, pieces: Sequence[Block], x: Tensor, weights: Weights, statistics: Statistics | None = None) -> Tensor:
        largest = self._largest[pieces[0].name]
        choices = [(KERNELS.index(block.kernel), block.kernel // 2, block.middle, block.squeeze) for block in pieces]
        gene, reach, middle, hidden = sent(torch.tensor(choices).T.contiguous(), x.device)  # (groups,) each
        matrices = (weights[f"{largest.name}.depth.{name}"] for name in ("to_five", "to_three"))
        kernel = masked_kernel(weights[f"{largest.name}.depth.conv.weight"], gene, *matrices)
        channels, units = below(largest.middle, middle[:, None]), below(largest.squeeze, hidden[:, None])
        return self._block(x, weights, largest, kernel, statistics, channels, units, (reach, middle))

    @cached_property
    def _largest(self) -> dict[str, Block]:
        return {block.name: block for block in self.space.outline(self.space.named["largest"]).blocks}

    def masked(self, images: Tensor, weights: Weights, genes: Tensor, statistics: Statistics | None = None) -> Tensor:
        outline = self.space.outline(self.space.named["largest"])
        elastic = [block for block in outline.blocks if block.expands]  # those of the stages, in the order of genes
        places = {block.name: place for place, block in enumerate(elastic)}
        # What genes decide, of all blocks at once: a GPU takes as long for one number as for twenty.
        kernel_genes, expansion_genes, depth_genes = genes.split([len(elastic), len(elastic), STAGES])
        widths, units = (
            constant(table, genes.device).gather(1, expansion_genes[:, None])[:, 0] for table in (self._widths, self._hidden_units)
        )
        depths = constant((DEPTHS,), genes.device).expand(STAGES, -1).gather(1, depth_genes[:, None])  # (stages, 1)
        there = (depths > counting(BLOCKS, genes.device)).flatten()
        reach = kernel_genes + min(KERNELS) // 2
        active = widths * there
        kernels = _masked_kernels(weights, elastic, kernel_genes)

        def run(x: Tensor, block: Block) -> Tensor:
            if block.name not in places:  # the block after the stem is not elastic
                return self._block(x, weights, block, _depth_kernel(weights, block), statistics)
            place = places[block.name]
            channels, hidden = below(block.middle, widths[place]), below(block.squeeze, units[place])
            y = self._block(x, weights, block, kernels[place], statistics, channels, hidden, (reach[place], active[place]))
            return y if place % BLOCKS < min(DEPTHS) else torch.where(there[place], y, x)

        return run_network(images, weights, outline, run, statistics, "hardswish", norm=self.space.settings.norm)

    @cached_property
    def _widths(self) -> tuple[tuple[int, ...], ...]:
        """Of every elastic block: its middle channels by the gene of its expansion."""
        blocks = [block for block in self._largest.values() if block.expands]
        return tuple(tuple(round_to_eight(block.inputs * expansion) for expansion in EXPANSIONS) for block in blocks)

    @cached_property
    def _hidden_units(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(round_to_eight(width // 4) for width in widths) for widths in self._widths)

    def _block(
        self,
        x: Tensor,
        weights: Weights,
        block: Block,
        kernel: Tensor,
        statistics: Statistics | None,
        channels: Tensor | None = None,
        hidden: Tensor | None = None,
        extent: Extent = (None, None),
    ) -> Tensor:
        """An inverted residual block; under masks, of its active channels and squeeze-excite units. Both activations keep 0 at 0."""
        act = block.activation
        residual = x if block.shortcut else None
        return run_branch(x, weights, block, kernel, statistics, act, (channels, hidden, None), self.space.settings.norm, residual, extent)

    def plain(self, weights: Weights, architecture: Architecture) -> dict[str, Tensor]:
        taken = self.take(weights, architecture)
        kernels = {f"{b.name}.depth.conv.weight": _depth_kernel(taken, b) for b in self.space.outline(architecture).blocks}
        return {name: kernels.get(name, tensor).clone() for name, tensor in taken.items() if not name.endswith(MATRICES)}

    def embedding(self, architecture: Architecture) -> tuple[Mapping[str, Region], tuple[int, ...]]:
        """A plain kernel lies in the middle of a 7x7 one, which needs no transformation."""
        regions = dict(self.regions(architecture))
        for block in self.space.outline(architecture).blocks:
            name, side = f"{block.name}.depth.conv.weight", centre(7, block.kernel)
            if block.expands:
                regions[name] = (*regions[name][:2], side, side)
        regions = {name: region for name, region in regions.items() if not name.endswith(MATRICES)}
        kernels = STAGES * BLOCKS
        return regions, (*[KERNELS.index(7)] * kernels, *architecture.choices[kernels:])

    def network(self, architecture: Architecture) -> nn.Module:
        outline, settings = self.space.outline(architecture), self.space.settings
        return PlainNetwork(outline, partial(PlainBlock, norm=settings.norm), "hardswish", settings.input_size, settings.norm)


def _block_regions(block: Block) -> dict[str, Region]:
    """The first ``middle`` channels of a block; the kernel entries and matrix rows its kernel size depends on."""
    middle, hidden = slice(0, block.middle), slice(0, block.squeeze)
    # A 3x3 kernel is made from the 5x5 one, so it trains the centre 5x5 of the 7x7 weight too, but only 3x3 of the 5x5 outputs.
    reach = centre(7, 7 if block.kernel == 7 else 5)
    regions: dict[str, Region] = {
        "expand.conv.weight": (middle, WHOLE, WHOLE, WHOLE),
        "depth.conv.weight": (middle, WHOLE, reach, reach),
        "project.conv.weight": (WHOLE, middle, WHOLE, WHOLE),
        "project.norm.weight": (WHOLE,),
        "project.norm.bias": (WHOLE,),
    }
    for norm in ("expand.norm", "depth.norm"):
        regions |= {f"{norm}.weight": (middle,), f"{norm}.bias": (middle,)}
    if block.kernel < 7:
        rows = centre(5, block.kernel)
        regions["depth.to_five"] = (rows, rows, WHOLE)
    if block.kernel == 3:
        regions["depth.to_three"] = (WHOLE, WHOLE)
    if block.squeeze:
        regions |= {
            "squeeze.reduce.weight": (hidden, middle, WHOLE, WHOLE),
            "squeeze.reduce.bias": (hidden,),
            "squeeze.restore.weight": (middle, hidden, WHOLE, WHOLE),
            "squeeze.restore.bias": (middle,),
        }
    return {f"{block.name}.{name}": region for name, region in regions.items()}


def _depth_kernel(weights: Weights, block: Block) -> Tensor:
    matrices = (weights.get(f"{block.name}.depth.{name}") for name in ("to_five", "to_three"))
    return elastic_kernel(weights[f"{block.name}.depth.conv.weight"], block.kernel, *matrices)


def _masked_kernels(weights: Weights, blocks: Sequence[Block], genes: Tensor) -> list[Tensor]:
    """(channels, 1, 7, 7) of each block: ``elastic_kernel`` for its gene, with zeros around it, as one product with a matrix. The matrices
    of all blocks are made at once from constants that pick and place the middle of a kernel."""
    like = weights[f"{blocks[0].name}.depth.to_three"]
    five, three, inner = (picks(*sides, like) for sides in ((7, 5), (7, 3), (5, 3)))  # (49, 25), (49, 9), (25, 9)
    to_five = torch.stack([weights[f"{block.name}.depth.to_five"] for block in blocks]).flatten(1, 2)  # (blocks, 25, 25)
    to_three = torch.stack([weights[f"{block.name}.depth.to_three"] for block in blocks])  # (blocks, 9, 9)
    fives = to_five.mT @ five.mT  # (blocks, 25, 49)
    threes = (to_three @ inner.mT @ to_five).mT @ three.mT
    gene = genes[:, None, None]
    made = torch.where(gene == 2, picks(7, 7, like), five @ torch.where(gene == 0, threes, fives))  # (blocks, 49, 49)
    sevens = [weights[f"{block.name}.depth.conv.weight"] for block in blocks]
    return [(seven.flatten(1) @ matrix).reshape(seven.shape) for seven, matrix in zip(sevens, made.unbind(), strict=True)]


class PlainBlock(PlainBranch):
    def __init__(self, block: Block, norm: str) -> None:
        super().__init__(block, block.activation, norm)
        self.shortcut = block.shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x + y if self.shortcut else y
