"""Convolutional networks in numbers: what a stride leaves of a map, and for networks of inverted residual blocks (MobileNetV3,
NASViT) what they are made of, what that costs and how it is drawn."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Generic, Protocol, TypeVar

from fedloom.core.architecture import Architecture
from fedloom.spaces.base import BlockDiagram, Box, Cost, Counted, ImageShape, SearchSpace, Tally, total


def halved(size: int, stride: int = 2) -> int:
    """Side of the map that a layer of stride 2 gives, rounded up; the side it receives for stride 1."""
    return -(-size // stride)


def box(label: str, channels: tuple[int, ...], share: float, *remarks: str) -> Box:
    return Box(label, ", ".join(["→".join(map(str, channels)), *remarks]), share)


class Block(Protocol):
    """Any block that a network may have."""

    @property
    def cost(self) -> Cost: ...

    @property
    def name(self) -> str: ...  # "stage3.block1", or "first" for one before the stages

    @property
    def size(self) -> int: ...  # side of the map it receives

    @property
    def widest(self) -> int: ...  # its largest number of channels

    @property
    def gives(self) -> int: ...  # numbers of one image that it hands on

    def box(self, full: int) -> Box: ...  # full: the number of channels that is drawn at full height


@dataclass(frozen=True)
class InvertedBlock(Counted):
    """One inverted residual block of an architecture: expansion, depth-wise convolution, squeeze-excite, projection."""

    name: str
    inputs: int
    middle: int
    outputs: int
    kernel: int
    stride: int
    expands: bool  # without, it works on its input directly
    squeeze: int  # hidden width of squeeze-excite, 0 without
    size: int  # side of the map it receives

    @property
    def after(self) -> int:
        """Side of the map it gives."""
        return halved(self.size, self.stride)

    @property
    def widest(self) -> int:
        return self.middle

    @property
    def gives(self) -> int:
        return self.outputs * self.after**2

    def count(self, tally: Tally) -> None:
        if self.expands:
            tally.convolution(self.inputs, self.middle, 1, self.size**2)
        tally.convolution(1, self.middle, self.kernel, self.after**2)
        if self.squeeze:
            tally.convolution(self.middle, self.squeeze, 1, 1, norm=False, bias=True)
            tally.convolution(self.squeeze, self.middle, 1, 1, norm=False, bias=True)
        tally.convolution(self.middle, self.outputs, 1, self.after**2)

    def box(self, full: int) -> Box:
        """Kernel and expansion; channels in, inside and out, ½ for stride 2, SE for squeeze-excite."""
        expansion = f" ×{self.middle // self.inputs}" if self.expands else ""
        channels = (self.inputs, self.middle, self.outputs) if self.expands else (self.inputs, self.outputs)
        remarks = ["½"] * (self.stride == 2) + ["SE"] * (self.squeeze > 0)
        return box(f"{self.kernel}×{self.kernel}{expansion}", channels, self.widest / full, *remarks)


@dataclass(frozen=True)
class Stem(Counted):
    """What comes before the blocks: images at their side, and the first convolution."""

    inputs: int
    outputs: int
    stride: int
    size: int  # side that images are resized to

    @property
    def after(self) -> int:
        return halved(self.size, self.stride)

    @property
    def gives(self) -> int:
        return self.outputs * self.after**2

    def count(self, tally: Tally) -> None:
        tally.convolution(self.inputs, self.outputs, 3, self.after**2)


@dataclass(frozen=True)
class Head(Counted):
    """What comes after the blocks: a convolution, the mean of the map, features, classes."""

    inputs: int
    middle: int
    features: int
    classes: int
    size: int  # side of the map it receives

    @property
    def gives(self) -> int:
        return self.classes

    def count(self, tally: Tally) -> None:
        tally.convolution(self.inputs, self.middle, 1, self.size**2)
        tally.convolution(self.middle, self.features, 1, 1, norm=False)
        tally.convolution(self.features, self.classes, 1, 1, norm=False, bias=True)


# Few different ones, however many the architectures: what they cost is counted once.
_stem, _head = lru_cache(maxsize=1024)(Stem), lru_cache(maxsize=1024)(Head)
Kind = TypeVar("Kind", bound=Block, covariant=True)


@dataclass(frozen=True)
class Outline(Generic[Kind]):
    """A whole architecture in numbers: what to build, run, slice and count."""

    image: ImageShape
    input_size: int  # side that images are resized to
    stem_stride: int
    stem: int
    blocks: tuple[Kind, ...]
    last: int  # width of the last block
    head: int
    features: int
    final_size: int  # side of the last map

    @cached_property
    def pieces(self) -> tuple[Stem | Kind | Head, ...]:
        """The network as a chain: each works on what the one before it gives."""
        stem = _stem(self.image.channels, self.stem, self.stem_stride, self.input_size)
        return (stem, *self.blocks, _head(self.last, self.head, self.features, self.image.classes, self.final_size))

    @cached_property
    def cost(self) -> Cost:
        return total([piece.cost for piece in self.pieces])

    @property
    def widest(self) -> int:
        return max(self.head, self.features, *(block.widest for block in self.blocks))

    def drawing(self, full: int) -> BlockDiagram:
        """A row per stage, a box per block; blocks before the stages are drawn with the stem."""
        stem = box("3×3", (self.image.channels, self.stem), self.stem / full, *["½"] * (self.stem_stride == 2))
        rows: dict[str, list[Box]] = {f"stem, {self.input_size} pixels": [stem]}
        title = next(iter(rows))
        for block in self.blocks:
            stage, _, place = block.name.partition(".")
            if place == "block1":
                title = f"stage {stage.removeprefix('stage')}, {block.size} pixels"
            rows.setdefault(title, []).append(block.box(full))
        rows[f"head, {self.final_size} pixels"] = [
            box("1×1", (self.last, self.head), self.head / full),
            box("mean, 1×1", (self.head, self.features), self.features / full),
            box("classes", (self.features, self.image.classes), self.image.classes / full),
        ]
        return BlockDiagram(tuple((title, tuple(boxes)) for title, boxes in rows.items()))


class OutlinedSpace(SearchSpace, Generic[Kind]):
    """A space whose architectures have an outline, which says what they cost and how they are drawn."""

    def __init__(self, settings: Any, image: ImageShape) -> None:
        super().__init__(settings, image)
        # One cache per space; outlines are asked for at every training step.
        self.outline = lru_cache(maxsize=4096)(self.make_outline)

    @abstractmethod
    def make_outline(self, architecture: Architecture) -> Outline[Kind]: ...

    def cost(self, architecture: Architecture) -> Cost:
        return self.outline(architecture).cost

    def drawing(self, architecture: Architecture) -> BlockDiagram:
        return self.outline(architecture).drawing(self.outline(self.named["largest"]).widest)
