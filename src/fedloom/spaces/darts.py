"""The DARTS space (Liu et al., ICLR 2019): two kinds of cell, 14 edges each, one operation per edge.

28 genes: the edges of the normal cell, then those of the reduction cell. Channels, the number of cells and the input size
make instances of any scale; the gene list is the same for all of them. ``operations = "s2"`` is the two-operation space of
SPIDER (Mushtaq et al., TMLR 2023), ``"s2n"`` the same with ``none``, for edges that are left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidArchitecture, InvalidConfig
from fedloom.core.settings import setting
from fedloom.spaces.base import SPACES, CellGraph, Cost, Gene, Genes, ImageShape, SearchSpace
from fedloom.spaces.convolutions import halved
from fedloom.spaces.genotype import CONCATENATED, EDGES, INPUTS, KINDS, NODES, OPERATIONS, STATES, Genotype

SETS = {"full": OPERATIONS, "s2": ("skip_connect", "sep_conv_3x3"), "s2n": ("none", "skip_connect", "sep_conv_3x3")}
STEM = 3  # times the channels
# The cells the paper found on CIFAR-10 with its second-order method.
DARTS_V2 = (
    "Genotype(normal=[('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 1), "
    "('skip_connect', 0), ('skip_connect', 0), ('dil_conv_3x3', 2)], normal_concat=range(2, 6), reduce=[('max_pool_3x3', 0), "
    "('max_pool_3x3', 1), ('skip_connect', 2), ('max_pool_3x3', 1), ('max_pool_3x3', 0), ('skip_connect', 2), ('skip_connect', 2), "
    "('max_pool_3x3', 1)], reduce_concat=range(2, 6))"
)


@dataclass(frozen=True)
class DARTSSettings:
    channels: int = setting(16, "channels of a node in the first cells, an even number; each reduction doubles them", low=2, high=512)
    cells: int = setting(8, "number of cells; the cells after one third and two thirds are reduction cells", low=3, high=64)
    operations: str = setting(
        "full", "operations to choose from: all eight, s2 (skip and 3x3 separable), or s2n (s2 and none)", choices=("full", "s2", "s2n")
    )
    input_size: int = setting(0, "resize images inside the network to this side in pixels; 0: keep them", low=0, high=1024)

    @classmethod
    def tiny(cls) -> DARTSSettings:
        """For tests: a normal cell and both reduction cells, maps of 18, 9 and 5 pixels: every entry of a dilated 5x5 kernel meets some."""
        return cls(channels=4, cells=3, input_size=18)


@dataclass(frozen=True)
class Layer:
    """One step of an operation. ``halve``: two 1x1 convolutions of stride 2, the second on the image shifted by one pixel."""

    kind: str  # rectify, convolve, halve, max_pool, average_pool or normalise
    name: str = ""  # of its weights or statistics, inside the operation
    inputs: int = 0
    outputs: int = 0
    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    affine: bool = False  # of a normalisation: with scale and shift

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Its parameters, by name inside the operation."""
        if self.kind == "convolve":
            return {f"{self.name}.weight": (self.outputs, self.inputs // self.groups, self.kernel, self.kernel)}
        if self.kind == "halve":
            return {f"{self.name}.{half}.weight": (self.outputs // 2, self.inputs, 1, 1) for half in ("even", "odd")}
        if self.affine:
            return {f"{self.name}.{half}": (self.outputs,) for half in ("weight", "bias")}
        return {}


Layers = tuple[Layer, ...]


@dataclass(frozen=True)
class Part:
    """The stem, the pre-processing of a cell's input, or an operation on an edge of a cell."""

    name: str
    layers: Layers
    size: int  # side of the map it receives

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.{name}": shape for layer in self.layers for name, shape in layer.shapes.items()}

    @cached_property
    def macs(self) -> int:
        """One multiply-accumulate per weight and output pixel, without normalisations; pools multiply nothing."""
        size, macs = self.size, 0
        for layer in self.layers:
            size = halved(size) if layer.stride == 2 else size
            macs += size**2 * sum(math.prod(shape) for shape in layer.shapes.values()) * (layer.kind != "normalise")
        return macs

    @cached_property
    def norms(self) -> tuple[str, ...]:
        return tuple(f"{self.name}.{layer.name}" for layer in self.layers if layer.kind == "normalise")


@dataclass(frozen=True)
class Cell:
    """A place in the network: what of it does not depend on the architecture."""

    name: str
    kind: int  # 0 normal, 1 reduction: the row of KINDS
    channels: int
    size: int  # side of the map of its inputs after pre-processing
    inputs: tuple[Part, Part]  # pre-processing
    operations: tuple[Mapping[str, Part], ...]  # by edge, without ``none``

    @property
    def stride(self) -> int:
        return 2 if self.kind else 1


@SPACES.add("darts", DARTSSettings, "DARTS: a normal and a reduction cell, 14 edges each, one of 8 operations (or 2) on every edge")
class DARTS(SearchSpace):
    name = "darts"

    def __init__(self, settings: DARTSSettings, image: ImageShape) -> None:
        if settings.channels % 2 or settings.channels < 2:
            raise InvalidConfig(f"darts.channels must be an even number from 2 on, so that layers can halve it; got {settings.channels}")
        if settings.cells < 3:
            raise InvalidConfig(f"darts.cells must be at least 3, one normal and two reduction cells; got {settings.cells}")
        if settings.operations not in SETS:
            raise InvalidConfig(f"darts.operations must be one of {', '.join(SETS)}; got {settings.operations!r}")
        self.settings, self.image = settings, image
        self.operations = SETS[settings.operations]
        self._cost = lru_cache(maxsize=4096)(self._make_cost)

    @cached_property
    def genes(self) -> tuple[Gene, ...]:
        values = tuple(range(len(self.operations)))
        return tuple(
            Gene(f"operation of {STATES[a]} → {STATES[b]} in the {kind} cell", values, self.operations, stage, place)
            for stage, kind in enumerate(KINDS, 1)
            for place, (a, b) in enumerate(EDGES, 1)
        )

    @cached_property
    def follows(self) -> npt.NDArray[np.bool_]:
        """The edge to a node is followed by the edges from this node, in both kinds of cell; no edge follows one of the other kind."""
        source, target = np.array(EDGES).T
        return np.kron(np.eye(len(KINDS), dtype=bool), target[:, None] == source)

    @cached_property
    def named(self) -> Mapping[str, Architecture]:
        """``smallest``: no parameters on any edge where that is possible, and every node connected to both inputs of its cell.

        Of s2n, where nothing but ``none`` halves a map for nothing, architectures that are cut off from their images cost less.
        """

        def everywhere(normal: str, reduction: str, elsewhere: str) -> Architecture:
            """One operation per kind of cell on the edges from its inputs, and one on all other edges."""
            return self._architecture([[op if a < INPUTS else elsewhere for a, _ in EDGES] for op in (normal, reduction)])

        full = self.settings.operations == "full"
        largest, elsewhere = "sep_conv_5x5" if full else "sep_conv_3x3", "none" if "none" in self.operations else "skip_connect"
        named = {
            "smallest": everywhere("skip_connect", "avg_pool_3x3" if full else "skip_connect", elsewhere),
            "medium": everywhere("sep_conv_3x3", "sep_conv_3x3", "skip_connect"),
            "largest": everywhere(largest, largest, largest),
        }
        return {**named, "darts_v2": self.from_genotype(Genotype.parse(DARTS_V2))} if full else named

    @cached_property
    def input_size(self) -> int:
        return self.settings.input_size or self.image.size

    def input_sizes(self, genes: Genes) -> list[int]:
        return [self.settings.input_size] * len(genes)

    def find(self, text: str, rng: np.random.Generator) -> Architecture:
        """Also by the text of a genotype."""
        return self.from_genotype(Genotype.parse(text)) if text.startswith("Genotype(") else super().find(text, rng)

    # -- genotypes ----------------------------------------------------------
    def from_genotype(self, genotype: Genotype) -> Architecture:
        """The architecture with these operations, and ``none`` on all other edges."""
        if "none" not in self.operations:
            chosen = self.settings.operations
            raise InvalidArchitecture(f"A genotype leaves edges out, which darts.operations={chosen} cannot. Use full or s2n")
        return self._architecture(genotype.operations)

    def genotype(self, architecture: Architecture) -> Genotype:
        """An edge per operation other than ``none``; refused unless every node has exactly two."""
        self.check(architecture)
        return Genotype.of(*self.chosen(architecture))

    def _architecture(self, cells: Sequence[Sequence[str]]) -> Architecture:
        names = [name for cell in cells for name in cell]
        missing = sorted(set(names) - set(self.operations))
        if missing:
            offered = ", ".join(self.operations)
            raise InvalidArchitecture(f"There is no operation {missing[0]!r} in darts.operations={self.settings.operations}: {offered}")
        return Architecture(self.name, tuple(self.operations.index(name) for name in names))

    # -- what an architecture is made of --------------------------------------
    @cached_property
    def stem(self) -> Part:
        wide = STEM * self.settings.channels
        layers = Layer("convolve", "conv", self.image.channels, wide, 3), Layer("normalise", "norm", outputs=wide, affine=True)
        return Part("stem", layers, self.input_size)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        count, channels, size = self.settings.cells, self.settings.channels, self.input_size
        before = last = STEM * channels
        size_before, reduced, made = size, False, []
        for index in range(count):
            kind = int(index in (count // 3, 2 * count // 3))
            channels, name = channels * (1 + kind), f"cell{index + 1}"
            first = Part(f"{name}.input0", _preprocessing(before, channels, halve=reduced), size_before)
            second = Part(f"{name}.input1", _preprocessing(last, channels, halve=False), size)
            edges = []
            for a, b in EDGES:
                reduces = bool(kind) and a < INPUTS
                place, side = f"{name}.{STATES[a]}_to_{STATES[b]}".replace(" ", ""), halved(size) if kind and not reduces else size
                layers = {op: operation_layers(op, channels, 2 if reduces else 1) for op in self.operations if op != "none"}
                edges.append({op: Part(f"{place}.{op}", steps, side) for op, steps in layers.items()})
            made.append(Cell(name, kind, channels, size, (first, second), tuple(edges)))
            before, last, size_before, reduced = last, NODES * channels, size, bool(kind)
            size = halved(size) if kind else size
        return tuple(made)

    @property
    def features(self) -> int:
        """What the classifier sees."""
        return NODES * self.cells[-1].channels

    def chosen(self, architecture: Architecture) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The operations on the 14 edges of the normal and of the reduction cell."""
        names = tuple(self.operations[choice] for choice in architecture.choices)
        return names[: len(EDGES)], names[len(EDGES) :]

    def parts(self, architecture: Architecture | None = None) -> Iterator[Part]:
        """What an architecture has besides the classifier; what the supernet has without one."""
        choices = np.arange(len(self.operations))
        every = np.ones((len(KINDS), len(EDGES), len(choices)), bool)
        return self.mixture_parts(every if architecture is None else np.reshape(architecture.choices, (len(KINDS), -1, 1)) == choices)

    # -- cost and drawing -----------------------------------------------------
    def cost(self, architecture: Architecture) -> Cost:
        return self._cost(architecture)

    def _make_cost(self, architecture: Architecture) -> Cost:
        """Counted layer by layer: weights, one multiply-accumulate per weight and output pixel, maps kept for the backward pass.

        Pools multiply nothing. The backward pass keeps what rectifiers, convolutions and pools put out, the places of maxima (two
        numbers each), and once what pools receive. A normalisation keeps what it received, which is among them; a sum keeps nothing.
        """
        return self._cost_of(self.parts(architecture), [[{name} for name in cell] for cell in self.chosen(architecture)])

    def _cost_of(self, parts: Iterable[Part], present: Sequence[Sequence[Collection[str]]]) -> Cost:
        """present: the operations on each edge of the two kinds of cell."""
        classes = self.image.classes
        parameters, macs, activations = (self.features + 1) * classes, self.features * classes, self.features + classes
        for part in parts:
            size, macs = part.size, macs + part.macs
            for layer in part.layers:
                size = halved(size) if layer.stride == 2 else size
                parameters += sum(math.prod(shape) for shape in layer.shapes.values())
                if layer.kind != "normalise":
                    activations += layer.outputs * size**2 * (3 if layer.kind == "max_pool" else 1)
        for cell in self.cells:
            pooled = {a for (a, _), names in zip(EDGES, present[cell.kind], strict=True) if any("pool" in name for name in names)}
            for state in pooled:
                activations += cell.channels * (cell.size if state < INPUTS or not cell.kind else halved(cell.size)) ** 2
        return Cost(parameters, macs, activations)

    # -- mixtures: edges that add up several operations --------------------------
    def mixture_parts(self, present: npt.NDArray[np.bool_]) -> Iterator[Part]:
        """What a mixture has besides the classifier; present: (2, 14, operations) which operations its edges have."""
        yield self.stem
        for cell in self.cells:
            yield from cell.inputs
            for edge, row in zip(cell.operations, present[cell.kind].tolist(), strict=True):
                there = zip(self.operations, row, strict=True)
                yield from (edge[name] for name, is_there in there if is_there and name in edge)

    def mixture_cost(self, present: npt.NDArray[np.bool_]) -> Cost:
        """What a mixture costs: with one operation per edge the same as that architecture. Sums are not counted."""
        names = [[{name for name, there in zip(self.operations, row, strict=True) if there} for row in cell] for cell in present]
        return self._cost_of(self.mixture_parts(present), names)

    def drawing(self, architecture: Architecture) -> tuple[CellGraph, ...]:
        output = tuple((node, len(STATES), "") for node in CONCATENATED)
        graphs = []
        for kind, operations in zip(KINDS, self.chosen(architecture), strict=True):
            edges = tuple((*edge, name) for edge, name in zip(EDGES, operations, strict=True) if name != "none")
            graphs.append(CellGraph(f"{kind} cell", (*STATES, "output"), edges + output))
        return tuple(graphs)


def operation_layers(operation: str, channels: int, stride: int) -> Layers:
    """The steps of an operation, as published; the identity has none. Normalisation has no scale and shift."""
    rectify, norm = Layer("rectify", outputs=channels), Layer("normalise", "norm", outputs=channels)
    if operation == "skip_connect":
        return () if stride == 1 else (rectify, Layer("halve", "halve", channels, channels, stride=2), norm)
    if operation in ("max_pool_3x3", "avg_pool_3x3"):
        return Layer("max_pool" if operation.startswith("max") else "average_pool", outputs=channels, kernel=3, stride=stride), norm
    kernel = int(operation[-1])

    def separable(number: str, stride: int, dilation: int) -> Layers:
        """A depth-wise convolution, then one over the channels."""
        depth = Layer("convolve", f"depth{number}", channels, channels, kernel, stride, dilation, channels)
        point = Layer("convolve", f"point{number}", channels, channels)
        return rectify, depth, point, Layer("normalise", f"norm{number}", outputs=channels)

    if operation.startswith("dil_conv"):
        return separable("", stride, 2)
    return *separable("1", stride, 1), *separable("2", 1, 1)


def _preprocessing(inputs: int, channels: int, halve: bool) -> Layers:
    """Brings an earlier output to a cell's channels, and to its side in pixels when a reduction cell lies between."""
    change = Layer("halve", "halve", inputs, channels, stride=2) if halve else Layer("convolve", "conv", inputs, channels)
    return Layer("rectify", outputs=inputs), change, Layer("normalise", "norm", outputs=channels)
