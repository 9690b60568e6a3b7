"""The once-for-all MobileNetV3 space (Cai et al., ICLR 2020: depth 2-4, expansion 3/4/6, kernel 3/5/7).

45 genes: the kernels of 20 blocks, their expansions, the depths of 5 stages. A width multiplier, the strides and the input
size make instances of any scale; the gene list is the same for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.settings import setting
from fedloom.spaces.base import SPACES, Gene, Genes, ImageShape, round_to_eight
from fedloom.spaces.convolutions import InvertedBlock, Outline, OutlinedSpace, halved

KERNELS, EXPANSIONS, DEPTHS = (3, 5, 7), (3, 4, 6), (2, 3, 4)
STAGES, BLOCKS = 5, 4  # stages, and blocks in the deepest one
WIDTHS = (24, 40, 80, 112, 160)
SQUEEZE = (False, True, False, True, True)  # squeeze-excite by stage
ACTIVATIONS = ("relu", "relu", "hardswish", "hardswish", "hardswish")
STEM, HEAD, FEATURES = 16, 960, 1280
PRESENT = np.arange(BLOCKS) < np.array(DEPTHS)[:, None]  # (choices of a depth, blocks) which blocks a stage has


@dataclass(frozen=True)
class MobileNetV3Settings:
    width: float = setting(1.0, "factor for all channel numbers, rounded to multiples of 8", low=0.05, high=4)
    stem_stride: int = setting(1, "stride of the first convolution: 1 for small images, 2 for the original at 224 pixels", low=1, high=2)
    strides: tuple[int, ...] = setting((2, 2, 2, 1, 2), "stride of each of the five stages")
    norm: str = setting("batch", "normalisation: batch, or group with groups of 8 channels", choices=("batch", "group"))
    input_size: int = setting(0, "resize images inside the network to this side in pixels; 0: keep them", low=0, high=1024)

    @classmethod
    def tiny(cls) -> MobileNetV3Settings:
        """The smallest useful instance: every gene has its effect, on images of 8 pixels and more."""
        return cls(width=0.1, strides=(2, 1, 1, 1, 1))


@dataclass(frozen=True)
class Block(InvertedBlock):
    """An inverted residual block; the one after the stem, "first", does not expand."""

    activation: str  # relu or hardswish

    @property
    def shortcut(self) -> bool:
        return self.stride == 1 and self.inputs == self.outputs


@SPACES.add("mobilenetv3", MobileNetV3Settings, "once-for-all MobileNetV3: 5 stages of 2-4 blocks, kernels 3/5/7, expansions 3/4/6")
class MobileNetV3(OutlinedSpace[Block]):
    name = "mobilenetv3"

    def __init__(self, settings: MobileNetV3Settings, image: ImageShape) -> None:
        if len(settings.strides) != STAGES or not set(settings.strides) <= {1, 2}:
            raise InvalidConfig(f"mobilenetv3.strides must be {STAGES} numbers, each 1 or 2; got {list(settings.strides)}")
        super().__init__(settings, image)
        self._blocks: dict[tuple[int, int, int], Block] = {}

    @cached_property
    def genes(self) -> tuple[Gene, ...]:
        stages = range(1, STAGES + 1)
        places = [(stage, block) for stage in stages for block in range(1, BLOCKS + 1)]
        return (
            *(Gene(f"kernel of block {block} of stage {stage}", KERNELS, stage=stage, place=block) for stage, block in places),
            *(
                Gene(f"expansion of block {block} of stage {stage}", EXPANSIONS, stage=stage, place=block, channels=True)
                for stage, block in places
            ),
            *(Gene(f"depth of stage {stage}", DEPTHS, stage=stage) for stage in stages),
        )

    def active_many(self, choices: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        present = PRESENT[choices[:, 2 * STAGES * BLOCKS :]].reshape(len(choices), STAGES * BLOCKS)
        return np.concatenate([present, present, np.ones((len(choices), STAGES), bool)], axis=1)

    @cached_property
    def follows(self) -> npt.NDArray[np.bool_]:
        """The genes of a block are followed by those of the next block of its stage and, where it may be the last block there, by those
        of the first block of the next stage. The depth of a stage comes before all blocks of the stage, and after nothing."""
        stage, place = np.array([(gene.stage, gene.place) for gene in self.genes]).T
        this_stage, this_place = stage[:, None], place[:, None]
        next_block = (stage == this_stage) & (place == this_place + 1) & (this_place > 0)
        next_stage = (stage == this_stage + 1) & (place == 1) & (this_place >= min(DEPTHS))
        depth = (stage == this_stage) & (place > 0) & (this_place == 0)
        return next_block | next_stage | depth

    @property
    def architectures(self) -> int:
        operations = len(KERNELS) * len(EXPANSIONS)
        return int(sum(operations**depth for depth in DEPTHS) ** STAGES)

    def input_sizes(self, genes: Genes) -> list[int]:
        return [self.settings.input_size] * len(genes)

    def make_outline(self, architecture: Architecture) -> Outline[Block]:
        choices = architecture.choices
        kernels, expansions, depths = choices[:20], choices[20:40], choices[40:]
        blocks = [self._first]
        for stage in range(STAGES):
            for gene in range(stage * BLOCKS, stage * BLOCKS + DEPTHS[depths[stage]]):
                blocks.append(self._block(gene, kernels[gene], expansions[gene]))
        return Outline(
            image=self.image,
            input_size=self._input_size,
            stem_stride=self.settings.stem_stride,
            stem=self._first.inputs,
            blocks=tuple(blocks),
            last=blocks[-1].outputs,
            head=self._wide(HEAD),
            features=self._wide(FEATURES),
            final_size=blocks[-1].after,
        )

    @property
    def _input_size(self) -> int:
        return int(self.settings.input_size or self.image.size)

    def _wide(self, channels: int) -> int:
        return round_to_eight(channels * self.settings.width)

    @cached_property
    def _first(self) -> Block:
        stem = self._wide(STEM)
        return Block("first", stem, stem, stem, 3, 1, False, 0, halved(self._input_size, self.settings.stem_stride), "relu")

    def _block(self, gene: int, kernel: int, expansion: int) -> Block:
        """By the place of its genes among those of all blocks, and their choices; one for all networks that have it."""
        choice = gene, kernel, expansion
        if choice not in self._blocks:
            self._blocks[choice] = self._make_block(*choice)
        return self._blocks[choice]

    def _make_block(self, gene: int, kernel: int, expansion: int) -> Block:
        """What it receives depends on none of the choices."""
        stage, index = divmod(gene, BLOCKS)
        before = self._block(gene - 1, 0, 0) if gene else self._first
        stride = self.settings.strides[stage] if index == 0 else 1
        middle = round_to_eight(before.outputs * EXPANSIONS[expansion])
        squeeze = round_to_eight(middle // 4) if SQUEEZE[stage] else 0
        name, outputs = f"stage{stage + 1}.block{index + 1}", self._wide(WIDTHS[stage])
        channels = (before.outputs, middle, outputs)
        return Block(name, *channels, KERNELS[kernel], stride, True, squeeze, before.after, ACTIVATIONS[stage])
