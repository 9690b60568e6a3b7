"""Networks that papers take as they are: MobileNetV3-Large, a small vision transformer and ResNet-18, each under its name.

Two genes: which network, and for the convolutional ones its width, in sixteenths of every layer's channels (HeteroFL's levels, Diao et
al., ICLR 2021). Widths of one network share their first channels; different networks share nothing.

MobileNetV3-Large is that of Howard et al. (ICCV 2019, Table 1). ResNet-18 (He et al., CVPR 2016) has the stem for small images: one 3x3
convolution, no pooling. The transformer is that of FedTP's experiments (Li et al., 2022): 6 blocks of width 128, 8 heads of 64, hidden 256.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.settings import setting
from fedloom.spaces.base import SPACES, Cost, Counted, Gene, Genes, ImageShape, SearchSpace, Tally, round_to_eight, total
from fedloom.spaces.convolutions import InvertedBlock, halved

NETWORKS = ("mobilenetv3-large", "vit", "resnet18")
WIDTHS = (1, 2, 4, 8, 16)  # sixteenths
LEAST = 4  # channels of a layer, as ResNet-18 has at a sixteenth
MOBILENET, VIT, RESNET = range(3)

# Of MobileNetV3-Large: kernel, expanded and output channels, squeeze-excite, activation; and the blocks that may halve the map.
BLOCKS = (
    *((3, 16, 16, False, "relu"), (3, 64, 24, False, "relu"), (3, 72, 24, False, "relu")),
    *((5, 72, 40, True, "relu"), (5, 120, 40, True, "relu"), (5, 120, 40, True, "relu")),
    *(
        (3, 240, 80, False, "hardswish"),
        (3, 200, 80, False, "hardswish"),
        (3, 184, 80, False, "hardswish"),
        (3, 184, 80, False, "hardswish"),
    ),
    *((3, 480, 112, True, "hardswish"), (3, 672, 112, True, "hardswish")),
    *((5, 672, 160, True, "hardswish"), (5, 960, 160, True, "hardswish"), (5, 960, 160, True, "hardswish")),
)
HALVING = (0, 2, 4, 7, 13)  # 0: the stem; blocks are counted from 1
STEM, HEAD, FEATURES = 16, 960, 1280

STAGES = (64, 128, 256, 512)  # channels of ResNet-18; two blocks each, the first of all but the first stage halves the map
DEPTH, WIDTH, HEADS, HEAD_WIDTH, HIDDEN = 6, 128, 8, 64, 256  # of the transformer


@dataclass(frozen=True)
class NetworksSettings:
    width: float = setting(1.0, "factor for all channel numbers", low=0.05, high=4)
    halvings: int = setting(3, "how often mobilenetv3-large halves its maps: 3 for 32 pixels, 5 for the original at 224", low=0, high=5)
    patch: int = setting(4, "side in pixels of the patches that the transformer sees; must divide the side of images", low=1, high=64)
    input_size: int = setting(0, "resize images inside the network to this side in pixels; 0: keep them", low=0, high=1024)

    @classmethod
    def tiny(cls) -> NetworksSettings:
        """For images of any size: on smaller ones the outer entries of the last kernels would see nothing but padding."""
        return cls(width=0.3, patch=6, input_size=18)


# -- what networks are made of, in numbers ------------------------------------------
@dataclass(frozen=True)
class Layer(Counted):
    """A convolution and its normalisation."""

    name: str
    inputs: int
    outputs: int
    kernel: int
    stride: int
    size: int  # side of the map it receives
    activation: str

    @property
    def after(self) -> int:
        return halved(self.size, self.stride)

    def count(self, tally: Tally) -> None:
        tally.convolution(self.inputs, self.outputs, self.kernel, self.after**2)


@dataclass(frozen=True)
class MobileBlock(InvertedBlock):
    activation: str

    @property
    def shortcut(self) -> bool:
        return self.stride == 1 and self.inputs == self.outputs


@dataclass(frozen=True)
class BasicBlock(Counted):
    """Two 3x3 convolutions and a shortcut, with a 1x1 convolution where the shape changes."""

    name: str
    inputs: int
    outputs: int
    stride: int
    size: int

    @property
    def after(self) -> int:
        return halved(self.size, self.stride)

    @property
    def reshapes(self) -> bool:
        return self.stride != 1 or self.inputs != self.outputs

    @property
    def layers(self) -> tuple[Layer, ...]:
        first = Layer(f"{self.name}.first", self.inputs, self.outputs, 3, self.stride, self.size, "relu")
        second = Layer(f"{self.name}.second", self.outputs, self.outputs, 3, 1, self.after, "none")
        across = Layer(f"{self.name}.across", self.inputs, self.outputs, 1, self.stride, self.size, "none")
        return (first, second, across) if self.reshapes else (first, second)

    def count(self, tally: Tally) -> None:
        for layer in self.layers:
            layer.count(tally)


@dataclass(frozen=True)
class Linear(Counted):
    """A layer on features; of several tokens on each."""

    name: str
    inputs: int
    outputs: int
    bias: bool = True
    tokens: int = 1

    def count(self, tally: Tally) -> None:
        tally.convolution(self.inputs, self.outputs, 1, self.tokens, norm=False, bias=self.bias)


@dataclass(frozen=True)
class Patches(Counted):
    """Patches as tokens, a token for the class, and a learned position of each."""

    name: str
    inputs: int
    outputs: int
    patch: int
    tokens: int

    def count(self, tally: Tally) -> None:
        tally.convolution(self.inputs, self.outputs, self.patch, self.tokens - 1, norm=False, bias=True)
        tally.parameters += self.outputs * (1 + self.tokens)
        tally.activations += self.outputs


@dataclass(frozen=True)
class AttentionBlock(Counted):
    """Attention and a hidden layer, each after a layer normalisation and beside a shortcut."""

    name: str
    width: int
    inner: int  # of all heads together
    hidden: int
    tokens: int

    @property
    def linears(self) -> tuple[Linear, ...]:
        width, tokens = self.width, self.tokens
        return (
            Linear(f"{self.name}.parts", width, 3 * self.inner, False, tokens),  # queries, keys and values
            Linear(f"{self.name}.project", self.inner, width, True, tokens),
            Linear(f"{self.name}.hidden", width, self.hidden, True, tokens),
            Linear(f"{self.name}.output", self.hidden, width, True, tokens),
        )

    def count(self, tally: Tally) -> None:
        for linear in self.linears:
            linear.count(tally)
        tally.parameters += 4 * self.width  # two normalisations
        tally.macs += 2 * self.tokens**2 * self.inner
        # Normalised twice, weights of attention before and after the softmax, what it gives, the hidden layer before its activation.
        tally.activations += self.tokens * (2 * self.width + self.inner + self.hidden) + 2 * HEADS * self.tokens**2


@dataclass(frozen=True)
class LastNorm(Counted):
    """The layer normalisation of the class token, after the blocks."""

    name: str
    width: int

    def count(self, tally: Tally) -> None:
        tally.parameters += 2 * self.width
        tally.activations += self.width


Piece = Layer | MobileBlock | BasicBlock | Linear | Patches | AttentionBlock | LastNorm
Wide = Callable[[int], int]  # channels as published -> channels


@SPACES.add("networks", NetworksSettings, "fixed networks by name: resnet18, mobilenetv3-large, vit; and widths of the first two")
class Networks(SearchSpace):
    name = "networks"

    def __init__(self, settings: NetworksSettings, image: ImageShape) -> None:
        super().__init__(settings, image)
        if self.side % settings.patch:
            what = f"networks.patch is {settings.patch}, which does not divide the {self.side} pixels of an image"
            raise InvalidConfig(f"{what}. Set it to a divisor, or networks.input_size to a multiple", key="networks.patch")
        self.pieces = lru_cache(maxsize=64)(self._pieces)  # asked for at every training step

    @property
    def side(self) -> int:
        return int(self.settings.input_size or self.image.size)

    @cached_property
    def genes(self) -> tuple[Gene, ...]:
        labels = tuple(f"1/{WIDTHS[-1] // width}" if width < WIDTHS[-1] else "1" for width in WIDTHS)
        return (
            Gene("network", tuple(range(len(NETWORKS))), NETWORKS, stage=1),
            Gene("width", WIDTHS, labels, stage=1, place=1, channels=True),
        )

    def active_many(self, choices: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """The transformer has one width."""
        return np.stack([np.ones(len(choices), bool), choices[:, 0] != VIT], axis=1)

    @cached_property
    def named(self) -> Mapping[str, Architecture]:
        """By parameters and multiply-accumulates; and each network as published."""
        whole = {name: self.canonical((number, len(WIDTHS) - 1)) for number, name in enumerate(NETWORKS)}
        smallest = self.canonical((MOBILENET, 0))
        return {"smallest": smallest, "medium": whole["mobilenetv3-large"], "largest": whole["resnet18"], **whole}

    def input_sizes(self, genes: Genes) -> list[int]:
        return [self.settings.input_size] * len(genes)

    def cost(self, architecture: Architecture) -> Cost:
        return total([piece.cost for piece in self.pieces(architecture)])

    # -- the networks ------------------------------------------------------------
    def _pieces(self, architecture: Architecture) -> tuple[Piece, ...]:
        network, width = architecture.choices
        share = self.settings.width * (WIDTHS[-1] if network == VIT else WIDTHS[width]) / WIDTHS[-1]

        def wide(channels: int) -> int:
            return max(LEAST, round(channels * share))

        return (self._mobilenet, self._vit, self._resnet)[network](wide)

    def _mobilenet(self, wide: Wide) -> tuple[Piece, ...]:
        halves = HALVING[len(HALVING) - self.settings.halvings :]
        stem = Layer("mobilenet.stem", self.image.channels, wide(STEM), 3, 1 + (0 in halves), self.side, "hardswish")
        blocks: list[MobileBlock] = []
        size, inputs = stem.after, STEM
        for number, (kernel, middle, outputs, squeezes, activation) in enumerate(BLOCKS, 1):
            squeeze = wide(round_to_eight(middle // 4)) if squeezes else 0
            stride, channels = 1 + (number in halves), (wide(inputs), wide(middle), wide(outputs))
            name, expands = f"mobilenet.block{number}", middle != inputs
            blocks.append(MobileBlock(name, *channels, kernel, stride, expands, squeeze, size, activation))
            inputs, size = outputs, blocks[-1].after
        head = Layer("mobilenet.head", wide(inputs), wide(HEAD), 1, 1, size, "hardswish")
        features = Linear("mobilenet.features", wide(HEAD), wide(FEATURES))
        return stem, *blocks, head, features, Linear("classifier.mobilenet", wide(FEATURES), self.image.classes)

    def _vit(self, wide: Wide) -> tuple[Piece, ...]:
        tokens = (self.side // self.settings.patch) ** 2 + 1
        width, inner, hidden = wide(WIDTH), HEADS * wide(HEAD_WIDTH), wide(HIDDEN)
        blocks = (AttentionBlock(f"vit.block{number}", width, inner, hidden, tokens) for number in range(1, DEPTH + 1))
        patches = Patches("vit.patches", self.image.channels, width, self.settings.patch, tokens)
        return patches, *blocks, LastNorm("vit.norm", width), Linear("classifier.vit", width, self.image.classes)

    def _resnet(self, wide: Wide) -> tuple[Piece, ...]:
        stem = Layer("resnet.stem", self.image.channels, wide(STAGES[0]), 3, 1, self.side, "relu")
        blocks: list[BasicBlock] = []
        size, inputs = self.side, STAGES[0]
        for stage, outputs in enumerate(STAGES, 1):
            for block in (1, 2):
                stride = 2 if block == 1 and stage > 1 else 1
                blocks.append(BasicBlock(f"resnet.stage{stage}.block{block}", wide(inputs), wide(outputs), stride, size))
                inputs, size = outputs, blocks[-1].after
        return stem, *blocks, Linear("classifier.resnet", wide(inputs), self.image.classes)
