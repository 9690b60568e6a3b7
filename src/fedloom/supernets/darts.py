"""The path-wise DARTS supernet: every operation of every edge of every cell has weights of its own.

Three executions share one skeleton: *sliced* runs the operation chosen on each edge, *masked* runs all and keeps one,
*mixture* adds all up with given coefficients, as the continuous relaxation of the paper does (Liu et al., section 2.2).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.architecture import Architecture
from fedloom.spaces.darts import DARTS, Cell, DARTSSettings, Layer, Part
from fedloom.spaces.genotype import EDGES, INPUTS, KINDS, NODES
from fedloom.supernets.base import SUPERNETS, Region, Supernet, Weights, resized
from fedloom.supernets.darts_many import Plan, Walk
from fedloom.supernets.darts_masked import Edges
from fedloom.supernets.darts_parts import LEAVING, halves, run_part, run_parts
from fedloom.supernets.normalisation import EPS, Statistics

WHOLE = slice(None)
Made = tuple[int, Tensor]  # an edge, and what it adds to the node that it leads to
Edge = Callable[[Cell, int, Tensor], Tensor | None]  # what edge number … of a cell makes of its source; None for nothing
Leaving = Callable[[Cell, int, Tensor], list[Made]]  # what the edges that leave state number … of a cell make of it
Run = Callable[[Part, Tensor], Tensor]


@SUPERNETS.add("darts", DARTSSettings, "path-wise weights: every operation of every edge of every cell has its own")
class DARTSSupernet(Supernet[DARTS]):
    pathwise = True
    in_groups = True
    likes_zeros = True

    def initial(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        weights: dict[str, Tensor] = {}

        def uniform(name: str, shape: tuple[int, ...], connections: int) -> None:
            # torch's own initialisation of convolutions and linear layers, which DARTS uses.
            weights[name] = (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(connections)

        for part in self.space.parts():
            for name, shape in part.shapes.items():
                if len(shape) == 1:  # scale and shift of a normalisation
                    weights[name] = torch.ones(shape) if name.endswith(".weight") else torch.zeros(shape)
                else:
                    uniform(name, shape, math.prod(shape[1:]))
        features, classes = self.space.features, self.space.image.classes
        uniform("classifier.weight", (classes, features), features)
        uniform("classifier.bias", (classes,), features)
        return weights

    def regions(self, architecture: Architecture) -> Mapping[str, Region]:
        shapes = {name: shape for part in self.space.parts(architecture) for name, shape in part.shapes.items()}
        regions: dict[str, Region] = {name: (WHOLE,) * len(shape) for name, shape in shapes.items()}
        return {**regions, "classifier.weight": (WHOLE, WHOLE), "classifier.bias": (WHOLE,)}

    def take_statistics(self, statistics: Statistics, architecture: Architecture) -> Statistics:
        """By the names of the layers: most normalisations have no weights to know them by."""
        names = [name for part in self.space.parts(architecture) for name in part.norms]
        return Statistics({name: statistics[name] for name in names if name in statistics})

    # -- executions ---------------------------------------------------------
    def forward(self, images: Tensor, weights: Weights, architecture: Architecture, statistics: Statistics | None = None) -> Tensor:
        chosen = self.space.chosen(architecture)
        run = partial(run_part, weights=weights, statistics=statistics)

        def edge(cell: Cell, number: int, x: Tensor) -> Tensor | None:
            name = chosen[cell.kind][number]
            return None if name == "none" else run(cell.operations[number][name], x)

        return self._network(resized(images, self.space.settings.input_size), weights, run, one_by_one(edge))

    def many(self, subnets: Sequence[tuple[int, Architecture]], weights: Weights) -> Walk:
        return Walk(Plan(self.space, subnets, len(weights["classifier.bias"])), weights)

    def mixture(
        self,
        images: Tensor,
        weights: Weights,
        coefficients: Tensor | None = None,
        statistics: Statistics | None = None,
        present: npt.NDArray[np.bool_] | None = None,
    ) -> Tensor:
        """(n, classes) logits when every edge adds up all its operations, each times its coefficient; gradients reach both.

        coefficients: (2, 14, operations) for the normal and the reduction cell, in the order of ``space.operations``; without them all
        are one, as in SPIDER. DARTS gives the softmax of its architecture parameters. present, of the same shape, says which operations
        are left: the others are not run at all. An operation that several edges do to one state runs once for all of them.
        """
        run = partial(run_part, weights=weights, statistics=statistics)

        def leaving(cell: Cell, source: int, x: Tensor) -> list[Made]:
            made: dict[int, list[Tensor]] = {number: [] for number in LEAVING[source]}
            for k in self._computing:
                numbers = [number for number in made if present is None or present[cell.kind, number, k]]
                parts = [self._part(cell, number, k) for number in numbers]
                together = run_parts(parts, x, weights) if statistics is None else [run(part, x) for part in parts]
                for number, y in zip(numbers, together, strict=True):
                    made[number].append(y if coefficients is None else coefficients[cell.kind, number, k] * y)
            return [(number, _sum(terms)) for number, terms in made.items() if terms]

        return self._network(resized(images, self.space.settings.input_size), weights, run, leaving)

    def masked(self, images: Tensor, weights: Weights, genes: Tensor, statistics: Statistics | None = None) -> Tensor:
        """The mixture whose coefficients are one for the chosen operation and zero for all others, which leave no statistics.
        In training every edge runs one chain of layers instead."""
        if statistics is None:
            run = partial(run_part, weights=weights, statistics=None)
            return self._network(images, weights, run, Edges(self.space, weights, genes).leaving)
        operations = torch.arange(len(self.space.operations), device=genes.device)
        chosen = genes.reshape(len(KINDS), len(EDGES), 1) == operations  # (2, 14, operations)

        always = torch.ones((), dtype=torch.bool, device=genes.device)
        run = partial(run_part, weights=weights, statistics=statistics, present=always)

        def edge(cell: Cell, number: int, x: Tensor) -> Tensor | None:
            row = chosen[cell.kind, number]
            made: Tensor | float = 0.0
            for k in self._computing:  # what is not chosen is dropped, not multiplied by zero: it may be no number
                made = torch.where(row[k], run_part(self._part(cell, number, k), x, weights, statistics, row[k]), made)
            return cast(Tensor, made)

        return self._network(images, weights, run, one_by_one(edge))

    def among_zeros(self, images: Tensor, weights: Weights, genes: Tensor) -> Tensor:
        run = partial(run_part, weights=weights, statistics=None)
        return self._network(images, weights, run, Edges(self.space, weights, genes, among_zeros=True).leaving)

    def _network(self, images: Tensor, weights: Weights, run: Run, leaving: Leaving) -> Tensor:
        """The skeleton: how cells and nodes are connected."""
        before = last = run(self.space.stem, images)
        for cell in self.space.cells:
            inputs = [run(part, x) for part, x in zip(cell.inputs, (before, last), strict=True)]
            before, last = last, _cell(inputs, cell.stride, lambda source, x, cell=cell: leaving(cell, source, x))  # type: ignore[misc]
        return F.linear(last.mean((2, 3)), weights["classifier.weight"], weights["classifier.bias"])

    @property
    def _computing(self) -> list[int]:
        """The operations that compute something: all but ``none``."""
        return [k for k, name in enumerate(self.space.operations) if name != "none"]

    def _part(self, cell: Cell, edge: int, operation: int) -> Part:
        return cell.operations[edge][self.space.operations[operation]]

    # -- the stand-alone network ------------------------------------------------
    def network(self, architecture: Architecture) -> nn.Module:
        return PlainDARTS(self.space, architecture)


def one_by_one(edge: Edge) -> Leaving:
    def leaving(cell: Cell, source: int, x: Tensor) -> list[Made]:
        made = [(number, edge(cell, number, x)) for number in LEAVING[source]]
        return [(number, y) for number, y in made if y is not None]

    return leaving


def _cell(inputs: Sequence[Tensor], stride: int, leaving: Callable[[int, Tensor], list[Made]]) -> Tensor:
    """Every node is the sum of its edges, zero without any; the output is all nodes side by side."""
    arriving: list[list[Tensor]] = [[] for _ in range(INPUTS + NODES)]  # at each state, in the order of the edges
    states = list(inputs)
    for state in range(INPUTS + NODES):
        if state >= INPUTS:
            # made anew for every empty node
            states.append(_sum(arriving[state]) if arriving[state] else torch.zeros_like(inputs[0][:, :, ::stride, ::stride]))
        for number, y in leaving(state, states[state]):
            arriving[EDGES[number][1]].append(y)
    return torch.cat(states[INPUTS:], 1)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


class PlainDARTS(nn.Module):
    """One architecture as ordinary modules: for export and deployment. Parameter names are those of ``Supernet.plain``."""

    def __init__(self, space: DARTS, architecture: Architecture) -> None:
        super().__init__()
        self.input_size, self.cells = space.settings.input_size, [cell.name for cell in space.cells]
        self.stem = _modules(space.stem)
        for cell in space.cells:
            self.add_module(cell.name, PlainCell(cell, space.chosen(architecture)[cell.kind]))
        self.classifier = nn.Linear(space.features, space.image.classes)

    def forward(self, images: Tensor) -> Tensor:
        before = last = self.stem(resized(images, self.input_size))
        for name in self.cells:
            before, last = last, self.get_submodule(name)(before, last)
        return self.classifier(last.mean((2, 3)))


class PlainCell(nn.Module):
    def __init__(self, cell: Cell, operations: Sequence[str]) -> None:
        super().__init__()
        self.stride = cell.stride
        self.input0, self.input1 = (_modules(part) for part in cell.inputs)
        self.edges: dict[int, str] = {}  # where there is an operation: number -> name of its module
        for number, name in enumerate(operations):
            if name != "none":
                part = cell.operations[number][name]
                self.edges[number] = part.name.split(".")[1]
                self.add_module(self.edges[number], nn.Sequential(OrderedDict({name: _modules(part)})))

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        def leaving(source: int, x: Tensor) -> list[Made]:
            return [(number, self.get_submodule(self.edges[number])(x)) for number in LEAVING[source] if number in self.edges]

        return _cell([self.input0(before), self.input1(last)], self.stride, leaving)


class Halve(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.even, self.odd = (nn.Conv2d(layer.inputs, layer.outputs // 2, 1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        even, odd = halves(x)
        return torch.cat([self.even(even), self.odd(odd)], 1)


def _modules(part: Part) -> nn.Sequential:
    return nn.Sequential(OrderedDict((layer.name or f"{layer.kind}{place}", _module(layer)) for place, layer in enumerate(part.layers)))


def _module(layer: Layer) -> nn.Module:
    reach = layer.dilation * (layer.kernel // 2)
    if layer.kind == "rectify":
        return nn.ReLU()
    if layer.kind == "convolve":
        return nn.Conv2d(layer.inputs, layer.outputs, layer.kernel, layer.stride, reach, layer.dilation, layer.groups, bias=False)
    if layer.kind == "halve":
        return Halve(layer)
    if layer.kind == "max_pool":
        return nn.MaxPool2d(layer.kernel, layer.stride, reach)
    if layer.kind == "average_pool":
        return nn.AvgPool2d(layer.kernel, layer.stride, reach, count_include_pad=False)
    return nn.BatchNorm2d(layer.outputs, eps=EPS, affine=layer.affine)
