"""A small convolutional space: one stage of 1-3 residual blocks, and one width for all of them."""

from dataclasses import dataclass

import numpy as np

from fedloom.core.settings import setting
from fedloom.spaces.base import SPACES, Gene, SearchSpace, Tally

WIDTHS, DEPTHS, KERNELS, EXPANSIONS = (8, 12, 16), (1, 2, 3), (3, 5, 7), (1, 2, 3)
BLOCKS = range(1, max(DEPTHS) + 1)


@dataclass(frozen=True)
class ToySettings:
    stride: int = setting(2, "stride of the first convolution", low=1, high=4)

    @classmethod
    def tiny(cls) -> "ToySettings":
        return cls()


@SPACES.add("toy", ToySettings, "1-3 residual blocks of 8-16 channels, kernels 3/5/7, expansions 1/2/3")
class Toy(SearchSpace):
    name = "toy"
    genes = (
        Gene("width", WIDTHS),
        Gene("depth", DEPTHS, stage=1),
        *(Gene(f"kernel of block {block}", KERNELS, stage=1, place=block) for block in BLOCKS),
        *(Gene(f"expansion of block {block}", EXPANSIONS, stage=1, place=block) for block in BLOCKS),
    )

    def active_many(self, choices):
        """A block that the depth leaves out has no kernel and no expansion."""
        present = np.array(DEPTHS)[choices[:, 1], None] >= np.array(BLOCKS)
        return np.concatenate([np.ones((len(choices), 2), bool), present, present], axis=1)

    def blocks(self, architecture):
        """Width of the network; name, kernel and middle width of its blocks."""
        width, depth, *rest = (gene.values[choice] for gene, choice in zip(self.genes, architecture.choices, strict=True))
        kernels, expansions = rest[: len(BLOCKS)], rest[len(BLOCKS) :]
        return width, [(f"block{block}", kernels[block - 1], width * expansions[block - 1]) for block in BLOCKS if block <= depth]

    def cost(self, architecture):
        pixels = (-(-self.image.size // self.settings.stride)) ** 2
        width, blocks = self.blocks(architecture)
        tally = Tally()
        tally.convolution(self.image.channels, width, 3, pixels)
        for _, kernel, middle in blocks:
            tally.convolution(width, middle, 1, pixels)
            tally.convolution(1, middle, kernel, pixels)
            tally.convolution(middle, width, 1, pixels)
        tally.convolution(width, self.image.classes, 1, 1, norm=False, bias=True)
        return tally.cost
