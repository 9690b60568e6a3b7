"""The once-for-all MobileNetV3 space (Cai et al., ICLR 2020: depth 2-4, expansion 3/4/6, kernel 3/5/7).

45 genes: the kernels of 20 blocks, their expansions, the depths of 5 stages. A width multiplier, the strides and the input
size make instances of any scale; the gene list is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.settings import setting
from fedloom.spaces.base import SPACES, BlockDiagram, Box, Choices, Cost, Gene, Genes, ImageShape, SearchSpace, Tally, round_to_eight

KERNELS, EXPANSIONS, DEPTHS = (3, 5, 7), (3, 4, 6), (2, 3, 4)
STAGES, BLOCKS = 5, 4  # stages, and blocks in the deepest one
WIDTHS = (24, 40, 80, 112, 160)
SQUEEZE = (False, True, False, True, True)  # squeeze-excite by stage
ACTIVATIONS = ("relu", "relu", "hardswish", "hardswish", "hardswish")
STEM, HEAD, FEATURES = 16, 960, 1280


@dataclass(frozen=True)
class MobileNetV3Settings:
    width: float = setting(1.0, "multiplier of all channel numbers, rounded to multiples of 8", low=0.05, high=4)
    stem_stride: int = setting(1, "stride of the first convolution: 1 for small images, 2 for the original at 224 pixels", low=1, high=2)
    strides: tuple[int, ...] = setting((2, 2, 2, 1, 2), "stride of each of the five stages")
    norm: str = setting("batch", "normalisation: batch, or group with groups of 8 channels", choices=("batch", "group"))
    input_size: int = setting(0, "side in pixels that images are resized to inside the network; 0 keeps them as they are", low=0, high=1024)

    @classmethod
    def tiny(cls) -> MobileNetV3Settings:
        """The smallest useful instance: every gene has its effect, on images of 8 pixels and more."""
        return cls(width=0.1, strides=(2, 1, 1, 1, 1))


@dataclass(frozen=True)
class Block:
    """One inverted residual block of an architecture, in numbers."""

    name: str
    inputs: int
    middle: int
    outputs: int
    kernel: int
    stride: int
    activation: str
    squeeze: int  # hidden width of squeeze-excite, 0 without
    size: int  # side of the map it receives

    @property
    def expands(self) -> bool:
        """The block after the stem works on its input directly, without an expansion layer."""
        return self.name != "first"

    @property
    def shortcut(self) -> bool:
        return self.stride == 1 and self.inputs == self.outputs


@dataclass(frozen=True)
class Outline:
    """A whole architecture in numbers: what to build, run, slice and count."""

    image: ImageShape
    input_size: int
    stem: int
    blocks: tuple[Block, ...]
    head: int
    features: int
    final_size: int


@SPACES.add("mobilenetv3", MobileNetV3Settings, "once-for-all MobileNetV3: 5 stages of 2-4 blocks, kernels 3/5/7, expansions 3/4/6")
class MobileNetV3(SearchSpace):
    name = "mobilenetv3"

    def __init__(self, settings: MobileNetV3Settings, image: ImageShape) -> None:
        if len(settings.strides) != STAGES or not set(settings.strides) <= {1, 2}:
            raise InvalidConfig(f"mobilenetv3.strides must be {STAGES} numbers, each 1 or 2; got {list(settings.strides)}")
        self.settings, self.image = settings, image
        # One cache per space; outlines are asked for at every training step.
        self._outline = lru_cache(maxsize=4096)(self._make_outline)
        self._cost = lru_cache(maxsize=4096)(self._make_cost)

    @cached_property
    def genes(self) -> tuple[Gene, ...]:
        places = [f"block {block + 1} of stage {stage + 1}" for stage in range(STAGES) for block in range(BLOCKS)]
        return (
            *(Gene(f"kernel of {place}", KERNELS) for place in places),
            *(Gene(f"expansion of {place}", EXPANSIONS) for place in places),
            *(Gene(f"depth of stage {stage + 1}", DEPTHS) for stage in range(STAGES)),
        )

    def active(self, choices: Choices) -> npt.NDArray[np.bool_]:
        depths = np.array(DEPTHS)[np.asarray(choices[2 * STAGES * BLOCKS :])]
        present = (np.arange(BLOCKS) < depths[:, None]).ravel()  # (stages * blocks,)
        return np.concatenate([present, present, np.ones(STAGES, bool)])

    @cached_property
    def named(self) -> Mapping[str, Architecture]:
        return {name: self.canonical([choice] * len(self.genes)) for choice, name in enumerate(("smallest", "medium", "largest"))}

    @property
    def architectures(self) -> int:
        operations = len(KERNELS) * len(EXPANSIONS)
        return int(sum(operations**depth for depth in DEPTHS) ** STAGES)

    def input_sizes(self, genes: Genes) -> list[int]:
        return [self.settings.input_size or self.image.size] * len(genes)

    def outline(self, architecture: Architecture) -> Outline:
        return self._outline(architecture)

    def cost(self, architecture: Architecture) -> Cost:
        return self._cost(architecture)

    def drawing(self, architecture: Architecture) -> BlockDiagram:
        """A row per stage, a box per block: kernel and expansion; channels in, inside and out, ½ for stride 2, SE for squeeze-excite."""
        outline, whole = self.outline(architecture), self.outline(self.named["largest"])
        widest = max(whole.head, whole.features, *(block.middle for block in whole.blocks))

        def box(label: str, channels: Sequence[int], width: int, stride: int = 1, squeeze: int = 0) -> Box:
            return Box(label, "→".join(map(str, channels)) + ", ½" * (stride == 2) + ", SE" * (squeeze > 0), width / widest)

        def block_box(block: Block) -> Box:
            kernel = f"{block.kernel}×{block.kernel}"
            if not block.expands:
                return box(kernel, (block.inputs, block.outputs), block.middle)
            label = f"{kernel} ×{block.middle // block.inputs}"
            return box(label, (block.inputs, block.middle, block.outputs), block.middle, block.stride, block.squeeze)

        stem = box("3×3", (outline.image.channels, outline.stem), outline.stem, self.settings.stem_stride)
        stages: list[tuple[str, tuple[Box, ...]]] = [(f"stem, {outline.input_size} pixels", (stem, block_box(outline.blocks[0])))]
        for stage in range(1, STAGES + 1):
            blocks = [block for block in outline.blocks if block.name.startswith(f"stage{stage}.")]
            stages.append((f"stage {stage}, {blocks[0].size} pixels", tuple(map(block_box, blocks))))
        head = (
            box("1×1", (outline.blocks[-1].outputs, outline.head), outline.head),
            box("mean, 1×1", (outline.head, outline.features), outline.features),
            box("classes", (outline.features, outline.image.classes), outline.image.classes),
        )
        return BlockDiagram((*stages, (f"head, {outline.final_size} pixels", head)))

    def _make_outline(self, architecture: Architecture) -> Outline:
        def wide(channels: int) -> int:
            return round_to_eight(channels * self.settings.width)

        choices = architecture.choices
        kernels, expansions, depths = choices[:20], choices[20:40], choices[40:]
        input_size = self.settings.input_size or self.image.size
        size = _halved(input_size, self.settings.stem_stride)
        stem = wide(STEM)
        blocks = [Block("first", stem, stem, stem, 3, 1, "relu", 0, size)]
        inputs = stem
        for stage in range(STAGES):
            for index in range(DEPTHS[depths[stage]]):
                gene = stage * BLOCKS + index
                stride = self.settings.strides[stage] if index == 0 else 1
                middle = round_to_eight(inputs * EXPANSIONS[expansions[gene]])
                squeeze = round_to_eight(middle // 4) if SQUEEZE[stage] else 0
                name = f"stage{stage + 1}.block{index + 1}"
                outputs = wide(WIDTHS[stage])
                blocks.append(Block(name, inputs, middle, outputs, KERNELS[kernels[gene]], stride, ACTIVATIONS[stage], squeeze, size))
                inputs, size = outputs, _halved(size, stride)
        return Outline(self.image, input_size, stem, tuple(blocks), wide(HEAD), wide(FEATURES), size)

    def _make_cost(self, architecture: Architecture) -> Cost:
        outline, tally = self.outline(architecture), Tally()
        convolution = tally.convolution
        size = outline.blocks[0].size
        convolution(outline.image.channels, outline.stem, 3, size**2)
        for block in outline.blocks:
            after = _halved(block.size, block.stride)
            if block.expands:
                convolution(block.inputs, block.middle, 1, block.size**2)
            convolution(1, block.middle, block.kernel, after**2)
            if block.squeeze:
                convolution(block.middle, block.squeeze, 1, 1, norm=False, bias=True)
                convolution(block.squeeze, block.middle, 1, 1, norm=False, bias=True)
            convolution(block.middle, block.outputs, 1, after**2)
        convolution(outline.blocks[-1].outputs, outline.head, 1, outline.final_size**2)
        convolution(outline.head, outline.features, 1, 1, norm=False)
        convolution(outline.features, outline.image.classes, 1, 1, norm=False, bias=True)
        return tally.cost


def _halved(size: int, stride: int) -> int:
    return -(-size // stride)
