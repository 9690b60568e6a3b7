"""The NASViT space (Gong et al., ICLR 2022): convolution stages, then stages of a convolution block and attention blocks.

31 genes: the input resolution, nine widths, and for each of seven stages its depth, kernel and expansion, shared by its blocks.
23 of them have more than one choice. Multipliers of width and depth, the strides and the resolutions make instances of any scale;
the gene list is the same for all of them, also where two widths or depths of a small instance are rounded to the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.settings import setting
from fedloom.spaces.base import SPACES, Box, Counted, Gene, Genes, ImageShape, Tally, round_to_eight
from fedloom.spaces.convolutions import InvertedBlock, Outline, OutlinedSpace, box, halved


@dataclass(frozen=True)
class Stage:
    """What a stage may be: its first block is a convolution; the others are too, or attention."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    kernels: tuple[int, ...]
    expansions: tuple[int, ...]
    squeeze: bool
    attention: bool


STEMS, FEATURES = (16, 24), (1792, 1984)
STAGES = (
    Stage((16, 24), (1, 2), (3, 5), (1,), False, False),
    Stage((24, 32), (3, 4, 5), (3, 5), (4, 5, 6), False, False),
    Stage((32, 40), (3, 4, 5, 6), (3,), (4, 5, 6), True, False),
    Stage((64, 72), (3, 4, 5, 6), (3,), (4, 5, 6), False, True),
    Stage((112, 120, 128), (3, 4, 5, 6, 7, 8, 9), (3,), (4, 5, 6), True, True),
    Stage((160, 168, 176, 184), (3, 4, 5, 6, 7, 8), (3,), (6,), True, True),
    Stage((208, 216, 224), (3, 4, 5, 6), (3,), (6,), True, True),
)
HEAD_EXPANSION = 6
HEAD_WIDTH = 8  # channels of one attention head
VALUE_EXPANSION = 4  # values are this many times as wide as queries and keys
RESIDUES = 8  # scales of attention blocks are chosen by the number of tokens modulo 8
PUBLISHED_DEPTHS = 10  # and, in the public implementation, by any depth below 10

# Where the genes lie: resolution; widths of stem, stages, features; depths, kernels, expansions of stages.
WIDTHS, DEPTHS, KERNELS, EXPANSIONS = slice(1, 10), slice(10, 17), slice(17, 24), slice(24, 31)


@dataclass(frozen=True)
class NASViTSettings:
    width: float = setting(1.0, "factor for all channel numbers, rounded to multiples of 8", low=0.05, high=4)
    depth: float = setting(1.0, "factor for the numbers of blocks in all stages, rounded up", low=0.1, high=1)
    stem_stride: int = setting(1, "stride of the first convolution: 1 for small images, 2 for the original", low=1, high=2)
    strides: tuple[int, ...] = setting((1, 2, 2, 1, 2, 1, 2), "stride of each of the seven stages")
    resolutions: tuple[int, ...] = setting((24, 28, 32, 36), "the four sides in pixels to which images may be resized, increasing")
    window: int = setting(18, "largest side of a map with attention; the cost of attention grows with its fourth power", low=1, high=64)

    @classmethod
    def original(cls) -> NASViTSettings:
        """As published, for images of about 224 pixels."""
        return cls(stem_stride=2, strides=(1, 2, 2, 2, 2, 1, 2), resolutions=(192, 224, 256, 288))

    @classmethod
    def tiny(cls) -> NASViTSettings:
        """The smallest useful instance: every kind of gene has its effect, on images of about 8 pixels."""
        return cls(width=0.25, depth=0.5, strides=(1, 1, 1, 2, 1, 1, 2), resolutions=(5, 6, 9, 10))


@dataclass(frozen=True)
class ConvolutionBlock(InvertedBlock):
    """An inverted residual block whose shortcut is always there."""

    @property
    def reshapes(self) -> bool:
        """Whether the shortcut is a 1x1 convolution, so that the channels fit."""
        return self.inputs != self.outputs

    def count(self, tally: Tally) -> None:
        super().count(tally)
        if self.reshapes:
            tally.convolution(self.inputs, self.outputs, 1, self.after**2, norm=False)


@dataclass(frozen=True)
class AttentionBlock(Counted):
    """One block of attention and two feed-forward layers, in numbers."""

    name: str
    width: int
    depth: int  # of its stage
    size: int

    @property
    def heads(self) -> int:
        return self.width // HEAD_WIDTH

    @property
    def gives(self) -> int:
        return self.width * self.size**2

    @property
    def row(self) -> str:
        return scale_row(self.depth, self.size)

    def count(self, tally: Tally) -> None:
        width, tokens, heads = self.width, self.size**2, self.heads
        values = VALUE_EXPANSION * width
        for inputs, outputs in ((width, width), (width, width), (width, values), (values, width), *[(width, width)] * 4):
            tally.convolution(inputs, outputs, 1, tokens, norm=False, bias=True)
        tally.convolution(1, values, 3, tokens, norm=False)
        for _ in ("before", "after"):  # the softmax, heads are mixed
            tally.convolution(heads, heads, 1, tokens**2, norm=False, bias=True)
        tally.macs += tokens**2 * (width + values)  # queries times keys, attention times values
        tally.activations += 2 * heads * tokens**2 + (values + 3 * width) * tokens  # both products, softmax and normalisations
        tally.parameters += (2 * self.size - 1) ** 2 * heads + 2 * 3 * width + 2 * width  # positions, normalisations, scales

    @property
    def widest(self) -> int:
        return VALUE_EXPANSION * self.width

    def box(self, full: int) -> Box:
        return box("attention", (self.width,), self.widest / full, f"{self.heads} heads")


AnyBlock = ConvolutionBlock | AttentionBlock
# Many architectures have the same block: what it costs is counted once.
_convolution, _attention = lru_cache(maxsize=4096)(ConvolutionBlock), lru_cache(maxsize=4096)(AttentionBlock)


@SPACES.add("nasvit", NASViTSettings, "NASViT: 3 convolution and 4 attention stages; widths, depths, kernels, expansions, resolution")
class NASViT(OutlinedSpace[AnyBlock]):
    name = "nasvit"

    def __init__(self, settings: NASViTSettings, image: ImageShape) -> None:
        if len(settings.strides) != len(STAGES) or not set(settings.strides) <= {1, 2}:
            raise InvalidConfig(f"nasvit.strides must be {len(STAGES)} numbers, each 1 or 2; got {list(settings.strides)}")
        sides = list(settings.resolutions)
        if len(sides) != 4 or sorted(set(sides)) != sides or sides[0] < 1:
            raise InvalidConfig(f"nasvit.resolutions must be 4 increasing numbers of pixels; got {sides}")
        super().__init__(settings, image)
        largest = max(side for stage, side in zip(STAGES, self.sides(sides[-1]), strict=True) if stage.attention)
        if largest > settings.window:
            what = f"nasvit.resolutions up to {sides[-1]} give attention maps of {largest}x{largest}"
            cure = f"Lower them, set a stride of stem or stages to 2, or use nasvit.window={largest}"
            raise InvalidConfig(f"{what}, more than nasvit.window = {settings.window}. {cure}")

    @cached_property
    def genes(self) -> tuple[Gene, ...]:
        stages = list(enumerate(STAGES, 1))
        return (
            Gene("resolution", tuple(self.settings.resolutions)),
            Gene("width of the stem", STEMS, place=1, channels=True),
            *(Gene(f"width of stage {number}", stage.widths, stage=number, channels=True) for number, stage in stages),
            Gene("width of the features", FEATURES, stage=len(STAGES) + 1, channels=True),
            *(Gene(f"depth of stage {number}", stage.depths, stage=number) for number, stage in stages),
            *(Gene(f"kernel of stage {number}", stage.kernels, stage=number) for number, stage in stages),
            *(Gene(f"expansion of stage {number}", stage.expansions, stage=number, channels=True) for number, stage in stages),
        )

    @cached_property
    def named(self) -> Mapping[str, Architecture]:
        """Medium is the middle choice of every gene, the smaller one of two."""
        picks = {"smallest": 0 * self.sizes, "medium": (self.sizes - 1) // 2, "largest": self.sizes - 1}
        return {name: self.canonical(choices) for name, choices in picks.items()}

    def input_sizes(self, genes: Genes) -> list[int]:
        chosen = genes[:, 0].tolist() if hasattr(genes, "tolist") else [choices[0] for choices in genes]  # a tensor is read once
        return [self.settings.resolutions[choice] for choice in chosen]

    def wide(self, channels: int) -> int:
        """A width of the original, in this instance."""
        return round_to_eight(channels * self.settings.width)

    def deep(self, blocks: int) -> int:
        """A depth of the original, in this instance."""
        return ceil(blocks * self.settings.depth)

    def depths(self, stage: int) -> list[int]:
        """Of a stage, from 0: the depth that each choice of its gene means."""
        return [self.deep(blocks) for blocks in STAGES[stage].depths]

    def sides(self, resolution: int) -> list[int]:
        """Side of the map that each stage gives at this resolution."""
        sides = [halved(resolution, self.settings.stem_stride)]
        for stride in self.settings.strides:
            sides.append(halved(sides[-1], stride))
        return sides[1:]

    def make_outline(self, architecture: Architecture) -> Outline[AnyBlock]:
        values = [gene.values[choice] for gene, choice in zip(self.genes, architecture.choices, strict=True)]
        stem, *widths, features = (self.wide(width) for width in values[WIDTHS])
        blocks: list[AnyBlock] = []
        inputs, size = stem, halved(values[0], self.settings.stem_stride)
        for number, stage in enumerate(STAGES):
            depth, kernel, expansion = self.deep(values[DEPTHS][number]), values[KERNELS][number], values[EXPANSIONS][number]
            for index in range(depth):
                name = f"stage{number + 1}.block{index + 1}"
                if stage.attention and index:
                    blocks.append(_attention(name, inputs, depth, size))
                    continue
                middle, stride = inputs * expansion, 1 if index else self.settings.strides[number]
                squeeze = round_to_eight(middle // 4) if stage.squeeze else 0
                block = _convolution(name, inputs, middle, widths[number], kernel, stride, expansion > 1, squeeze, size)
                blocks.append(block)
                inputs, size = block.outputs, block.after
        return Outline(
            image=self.image,
            input_size=values[0],
            stem_stride=self.settings.stem_stride,
            stem=stem,
            blocks=tuple(blocks),
            last=inputs,
            head=inputs * HEAD_EXPANSION,
            features=features,
            final_size=size,
        )

    # -- as the public implementation counts -------------------------------------
    def as_published(self, architecture: Architecture) -> tuple[int, int]:
        """Parameters and multiply-accumulates of the public implementation's stand-alone network.

        It keeps attention blocks whole: at the supernet's width, with positions for the whole window and scales for every depth and
        number of tokens. It keeps the convolutions of shortcuts that need none. Multiply-accumulates are those of ``cost``.
        """
        cost, outline = self.cost(architecture), self.outline(architecture)
        parameters = cost.parameters
        for block in outline.blocks:
            if isinstance(block, AttentionBlock):
                whole = self.wide(STAGES[place(block.name)[0]].widths[-1])
                parameters += _attention_parameters(whole, self.settings.window, PUBLISHED_DEPTHS * RESIDUES)
                parameters -= _attention_parameters(block.width, block.size, 1)
            elif not block.reshapes:
                parameters += block.inputs * block.outputs
        return parameters, cost.macs

    def supernet_as_published(self) -> int:
        """Parameters of the public supernet: its largest stand-alone network, and a frozen vector per convolution block."""
        largest = self.named["largest"]
        frozen = sum(block.outputs for block in self.outline(largest).blocks if isinstance(block, ConvolutionBlock))
        return self.as_published(largest)[0] + frozen


def place(name: str) -> tuple[int, int]:
    """Stage and place in it, both from 0, of "stage3.block1"."""
    stage, block = name.split(".")
    return int(stage.removeprefix("stage")) - 1, int(block.removeprefix("block")) - 1


def scale_row(depth: int, size: int) -> str:
    """Which of its scales an attention block uses in a stage of this depth on a map of this side."""
    return f"depth{depth}_tokens{size**2 % RESIDUES}"


def _attention_parameters(width: int, size: int, rows: int) -> int:
    """Of a block for maps up to this side, with this many rows of scales."""
    heads = width // HEAD_WIDTH
    layers = (6 + 2 * VALUE_EXPANSION) * width**2 + (7 + VALUE_EXPANSION) * width  # eight linear layers and their biases
    return layers + 9 * VALUE_EXPANSION * width + 2 * (heads**2 + heads) + (2 * size - 1) ** 2 * heads + 2 * 3 * width + 2 * rows * width
