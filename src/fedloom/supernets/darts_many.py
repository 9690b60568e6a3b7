"""Many DARTS networks at once, of one client or of several, in which everything that they have in common is computed once.

What a cell's state holds depends on the client, on what enters the cell and on the operations on the way to it. Networks that agree in
that share the state: a *row*. A plan finds the rows of all cells with numpy, before anything is computed. In a cell the edges that leave
its inputs run first, then those that leave its first node, and so on: four levels. On each, an operation runs in one call
for all rows and edges that have it, with weights of the row's client and edge; kernels of 3x3 run as 5x5 with zeros around.

Maps are (rows, n, h, w, channels), so a row is dense, and rows of a cell lie in one tensor: a call gathers its inputs from it, and a node
is a sum over rows of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.spaces.convolutions import halved
from fedloom.spaces.darts import DARTS, Cell, Part
from fedloom.spaces.genotype import EDGES, INPUTS, NODES
from fedloom.supernets.base import Weights, resized
from fedloom.supernets.darts_parts import add_rows, pick_rows, run_part
from fedloom.supernets.normalisation import Statistics

Rows = npt.NDArray[np.int64]
Moments = dict[str, tuple[Tensor, Tensor]]  # (rows, channels) means and variances by layer

# Operations that one call serves: they differ in the size of their kernel only, the last has the largest.
ALIKE = (("sep_conv_3x3", "sep_conv_5x5"), ("dil_conv_3x3", "dil_conv_5x5"), ("max_pool_3x3",), ("avg_pool_3x3",), ("skip_connect",))
LEVELS = ((0, 1), *((state,) for state in range(INPUTS, INPUTS + NODES - 1)))  # states whose leaving edges run together
CALL_BYTES = 4e9  # activations inside one call; it changes memory and speed, not results
INSIDE = 5  # maps of a row that are alive inside a call, at most


# -- what there is to compute ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Call:
    """An operation on several rows. alike: which of ALIKE; source: the rows that it reads."""

    alike: int
    part: Part  # of one of its edges, with the largest kernel
    operation: Rows  # of ``alike``, by its place there
    source: Rows
    own: Rows  # where its weights are, of all operations that are alike, edges and clients
    reach: Rows | None  # of its kernels, where they differ
    first: int  # row that it writes first
    enters: bool  # whether it reads inputs of the cell, which may be larger

    def arrays(self) -> list[Rows]:
        return [self.source, self.own, *([] if self.reach is None else [self.reach])]


@dataclass(frozen=True)
class Sum:
    """A node: row after row, the rows that are added up, of which there may be none. starts: where each row's begin in ``terms``."""

    terms: Rows
    starts: Rows
    first: int

    def arrays(self) -> list[Rows]:
        return [self.terms, self.starts]


@dataclass
class CellPlan:
    cell: Cell
    clients: tuple[Rows, Rows]  # of the rows of both inputs
    steps: list[Call | Sum] = field(default_factory=list)
    rows: int = 0
    outputs: Rows = field(default_factory=lambda: np.zeros((0, NODES), np.int64))  # (rows of the output, nodes)
    output_clients: Rows = field(default_factory=lambda: np.zeros(0, np.int64))

    def arrays(self) -> list[Rows]:
        return [*self.clients, self.nodes, *(array for step in self.steps for array in step.arrays())]

    @cached_property
    def nodes(self) -> Rows:
        """The rows that the output consists of: for each of its rows, those of all nodes."""
        return self.outputs.reshape(-1)

    @cached_property
    def calls(self) -> list[Call]:
        return [step for step in self.steps if isinstance(step, Call)]

    @property
    def beside(self) -> bool:
        """Whether inputs lie among the cell's other rows; in a reduction cell they are larger."""
        return self.cell.stride == 1

    @property
    def side(self) -> int:
        """Of the map of a node."""
        return self.cell.size if self.beside else halved(self.cell.size)

    @property
    def held(self) -> int:
        """Numbers of an image, besides what the cell receives and gives."""
        entering = 0 if self.beside else sum(map(len, self.clients)) * self.cell.size**2
        return self.cell.channels * (self.rows * self.side**2 + entering)


class Plan:
    """What networks need. subnets: the client, by its place among the images, and the architecture of each. several: how many clients
    have weights of their own; 1 if all have the same."""

    def __init__(self, space: DARTS, subnets: Sequence[tuple[int, Architecture]], several: int = 1) -> None:
        self.space, self.several = space, several
        self.clients = np.array([client for client, _ in subnets], np.int64)
        choices = np.array([architecture.choices for _, architecture in subnets], np.int64).reshape(len(subnets), -1, len(EDGES))
        self.stems, row = np.unique(self.clients, return_inverse=True)  # clients that occur
        before, last, self.cells = (row, self.stems), (row, self.stems), list[CellPlan]()
        for cell in space.cells:
            plan, rows = self._plan(cell, before, last, choices[:, cell.kind])
            self.cells.append(plan)
            before, last = last, (rows, plan.output_clients)
        self.last = last[0]  # the row of the last cell's output, of each network

    def _plan(self, cell: Cell, before: tuple[Rows, Rows], last: tuple[Rows, Rows], chosen: Rows) -> tuple[CellPlan, Rows]:
        """before, last: each network's row of what enters, and the clients of these rows. Also each network's row of the output."""
        plan = CellPlan(cell, (before[1], last[1]))
        states = [before[0], len(before[1]) + last[0]]
        plan.rows = len(before[1]) + len(last[1]) if plan.beside else 0
        made = np.full(chosen.shape, -1)  # (networks, edges) the row that an edge adds to its node
        for level in LEVELS:
            edges = [number for number, (source, _) in enumerate(EDGES) if source in level]
            sources = np.stack([states[EDGES[number][0]] for number in edges], 1)
            for call, where, rows in self._calls(plan, cell, np.array(edges), sources, chosen[:, edges]):
                made[:, edges] = np.where(where, rows, made[:, edges])
                if call is not None:
                    plan.steps.append(call)
                    plan.rows += len(call.source)
            into = [number for number, (_, target) in enumerate(EDGES) if target == level[-1] + 1]
            found, row = _distinct(np.column_stack([self.clients, made[:, into]]))
            terms = found[:, 1:]
            present = terms >= 0
            plan.steps.append(Sum(terms[present], np.cumsum(present.sum(1)) - present.sum(1), plan.rows))
            states.append(plan.rows + row)
            plan.rows += len(found)
        found, row = _distinct(np.column_stack([self.clients, *states[INPUTS:]]))
        plan.outputs, plan.output_clients = found[:, 1:], found[:, 0]
        return plan, row

    def _calls(
        self, plan: CellPlan, cell: Cell, edges: Rows, sources: Rows, chosen: Rows
    ) -> Iterator[tuple[Call | None, npt.NDArray[np.bool_], Rows]]:
        """Of the edges of one level; where a network has it, and its rows there. An identity is no call. All arrays: (networks, edges)."""
        operations = self.space.operations
        for number, names in enumerate(alike(self.space)):
            where = np.isin(chosen, [operations.index(name) for name in names])
            if not names or not where.any():
                continue
            part = cell.operations[edges[0]][names[-1]]
            if not part.layers:
                yield None, where, sources
                continue
            client = np.broadcast_to(self.clients[:, None], where.shape)[where]
            edge = np.broadcast_to(edges, where.shape)[where]
            edge = edge if part.shapes else edges[0] + 0 * edge  # without weights all edges that leave a state do the same
            found, row = _distinct(np.column_stack([client, edge, chosen[where], sources[where]]))
            rows = np.full(where.shape, -1)
            rows[where] = plan.rows + row
            places = np.array([names.index(name) if name in names else -1 for name in operations])
            operation = places[found[:, 2]]
            own = (operation * len(EDGES) + found[:, 1]) * self.several + (found[:, 0] if self.several > 1 else 0)
            reach = operation + 1 if len(names) > 1 else None
            yield Call(number, part, operation, found[:, 3], own, reach, plan.rows, EDGES[edges[0]][0] < INPUTS), where, rows

    def arrays(self) -> list[Rows]:
        return [self.clients, self.stems, self.last, *(array for plan in self.cells for array in plan.arrays())]

    @property
    def calls(self) -> int:
        """Of operations, stem and pre-processing included."""
        return 1 + sum(INPUTS + len(plan.calls) for plan in self.cells)

    @property
    def parts(self) -> Iterator[tuple[Part, int]]:
        """Everything that is computed, and for how many rows."""
        yield self.space.stem, len(self.stems)
        for plan in self.cells:
            yield from zip(plan.cell.inputs, map(len, plan.clients), strict=True)
            for call in plan.calls:
                names = alike(self.space)[call.alike]
                for place, name in enumerate(names):
                    edge = next(edge for edge in plan.cell.operations if edge[names[-1]].name == call.part.name)
                    yield edge[name], int((call.operation == place).sum())

    @property
    def macs(self) -> int:
        """Of one image, for all networks."""
        return sum(part.macs * rows for part, rows in self.parts) + len(self.clients) * self.space.features * self.space.image.classes

    @cached_property
    def held(self) -> int:
        """Numbers of an image that are in memory at once, at most, besides those inside a call."""
        most, outputs = 0, [len(self.stems) * self.space.stem.layers[0].outputs * self.space.input_size**2] * 2
        for plan in self.cells:
            made = plan.outputs.size * plan.cell.channels * plan.side**2
            most = max(most, sum(outputs) + plan.held + made)
            outputs = [outputs[1], made]
        return most


def alike(space: DARTS) -> list[tuple[str, ...]]:
    """ALIKE without what a space lacks."""
    return [tuple(name for name in names if name in space.operations) for names in ALIKE]


def _distinct(rows: Rows) -> tuple[Rows, Rows]:
    """The distinct rows of a matrix in order, and which of them each row is."""
    found, place = np.unique(rows, axis=0, return_inverse=True)
    return found, place.reshape(-1)


def _slices(rows: Tensor, count: int) -> Iterator[slice]:
    """So many of these rows, those of a call at a time."""
    several = max(1, int(CALL_BYTES // (INSIDE * rows[0].numel() * rows.element_size())))
    for start in range(0, count, several):
        yield slice(start, min(start + several, count))


# -- computing it ---------------------------------------------------------------------------------------------------------
class Walk:
    """Runs a plan. weights: (clients or 1, …), of the whole supernet."""

    def __init__(self, plan: Plan, weights: Weights) -> None:
        self.plan, self.weights = plan, weights
        self.device = next(iter(weights.values())).device
        self._measured: list[Moments] = []  # by call
        self._known: Iterator[Moments] | None = None
        self._there: dict[int, Tensor] = {}

    @property
    def held(self) -> int:
        return self.plan.held

    def run(self, images: Tensor, rows: int) -> Tensor:
        """(networks, n, classes) logits. images: (clients, n, c, h, w), whose first ``rows`` measure; with 0 the last moments serve."""
        plan, space = self.plan, self.plan.space
        self.rows = rows
        self._known = None if rows else iter(self._measured)
        self._measured = [] if rows else self._measured
        pixels = resized(images.flatten(0, 1), space.settings.input_size).unflatten(0, images.shape[:2]).movedim(2, -1)
        before = last = self._call(space.stem, pixels[self._index(plan.stems)], self._own(space.stem, plan.stems))
        for cell in plan.cells:
            before, last = last, self._cell(cell, before, last)
        features = last.mean((2, 3))[self._index(plan.last)]
        weight, bias = (self._chosen(self.weights[f"classifier.{name}"], plan.clients) for name in ("weight", "bias"))
        return torch.baddbmm(bias[:, None], features, weight.mT)

    def _cell(self, plan: CellPlan, before: Tensor, last: Tensor) -> Tensor:
        cell, n = plan.cell, before.shape[1]
        rows = before.new_empty(plan.rows, n, plan.side, plan.side, cell.channels)
        inputs = rows
        if not plan.beside:
            inputs = before.new_empty(sum(map(len, plan.clients)), n, cell.size, cell.size, cell.channels)
        at = 0
        for part, x, clients in zip(cell.inputs, (before, last), plan.clients, strict=True):
            own = self._own(part, clients)
            for some in _slices(x, len(x)):
                inputs[at + some.start : at + some.stop] = self._call(part, x[some], {name: weight[some] for name, weight in own.items()})
            at += len(x)
        del before, last, x
        banks = {number: self._bank(plan, alike(self.plan.space)[number]) for number in {call.alike for call in plan.calls}}
        for step in plan.steps:
            if isinstance(step, Sum):
                add_rows(rows, self._index(step.terms), self._index(step.starts), step.first)
                continue
            sources = inputs if step.enters else rows
            for some in _slices(sources, len(step.source)):
                place = self._index(step.own)[some]
                own = {f"{step.part.name}.{name}": bank[place] for name, bank in banks[step.alike].items()}
                reach = None if step.reach is None else self._index(step.reach)[some]
                rectify = step.part.layers[0].kind == "rectify"
                x = pick_rows(sources, self._index(step.source)[some], rectify=rectify)
                made = self._call(step.part, x, own, reach, rectify)
                rows[step.first + some.start : step.first + some.stop] = made
        return pick_rows(rows, self._index(plan.nodes), NODES)

    def _call(self, part: Part, x: Tensor, own: Weights, reach: Tensor | None = None, rectified: bool = False) -> Tensor:
        """A part on many rows, each with its weights: (rows, n, h, w, c)."""
        statistics = Statistics({} if self._known is None else next(self._known), self.rows)
        y = run_part(part, x.movedim(-1, 2), own, statistics, reach=reach, rectified=rectified)
        if self.rows:
            self._measured.append(dict(statistics))
        return y.movedim(2, -1)

    # -- weights ------------------------------------------------------------------
    def _own(self, part: Part, clients: Rows) -> dict[str, Tensor]:
        """A part's weights for rows of these clients."""
        return {name: self._chosen(self.weights[name], clients) for name in part.shapes}

    def _chosen(self, weight: Tensor, clients: Rows) -> Tensor:
        return weight.expand(len(clients), *weight.shape[1:]) if len(weight) == 1 else weight[self._index(clients)]

    def _bank(self, plan: CellPlan, names: Sequence[str]) -> dict[str, Tensor]:
        """For calls of a cell the weights of all their edges, (operations * edges * clients, …), by their names inside an operation."""
        parts = [plan.cell.operations[number] for number in range(len(EDGES))]
        found: dict[str, Tensor] = {}
        for layer in parts[0][names[-1]].layers:
            for name, shape in layer.shapes.items():
                stacks = []
                for operation in names:
                    edges = [self.weights.get(f"{edge[operation].name}.{name}") for edge in parts]
                    some = next(weight for weight in edges if weight is not None)
                    # in a reduction cell some skips are identities
                    stack = torch.stack([some if weight is None else weight for weight in edges])
                    lacking = (shape[-1] - stack.shape[-1]) // 2
                    stacks.append(F.pad(stack, [lacking] * 4) if lacking else stack)
                found[name] = torch.cat(stacks).flatten(0, 1)
        return found

    def _index(self, rows: Rows) -> Tensor:
        """An array of the plan on the device; all of them go there in one transfer."""
        if not self._there:
            arrays = self.plan.arrays()
            there = torch.from_numpy(np.concatenate(arrays)).to(self.device).split([len(array) for array in arrays])
            self._there = dict(zip(map(id, arrays), there, strict=True))
        return self._there[id(rows)]
