"""Training of DARTS networks at static shapes: which operation an edge has is data, so one captured step serves every architecture.

Nothing runs eight times to keep one. Operations differ little: a separable convolution is a dilated one and a second stage, a 3x3 kernel is
a 5x5 one with zeros around. So an edge runs one chain of layers, with weights picked by its gene, and kernels skip the parts that it
lacks (``reach``, ``active`` and masks in ``elastic.py``). Pools have no weights: they run once for all edges that leave a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.spaces.darts import DARTS, Cell
from fedloom.spaces.genotype import EDGES, INPUTS, KINDS
from fedloom.supernets.base import Weights
from fedloom.supernets.darts_parts import LEAVING, halves, run_part
from fedloom.supernets.elastic import batch_norm, convolved, pointwise

SEPARABLE, DILATED = ("sep_conv_3x3", "sep_conv_5x5"), ("dil_conv_3x3", "dil_conv_5x5")
POOLS = ("max_pool_3x3", "avg_pool_3x3")
MANY = 2**16  # channels, more than there are: all matter
ORDER = tuple(number for numbers in LEAVING for number in numbers)  # edges by the state that they leave


class Edges:
    """The edges of one network. genes: (28,) on the device; weights: the whole supernet's. Normalised by the moments of the batch.
    among_zeros: weights that no gene asks for are zero.

    What genes pick is picked for all edges of a cell at once, in few launches.
    """

    def __init__(self, space: DARTS, weights: Weights, genes: Tensor, among_zeros: bool = False) -> None:
        self.space, self.weights, self.among_zeros = space, weights, among_zeros
        operations = torch.arange(len(space.operations), device=genes.device)
        chosen = genes.reshape(len(KINDS), len(EDGES), 1) == operations
        columns = (torch.stack([row[number] for number in ORDER]).unbind(1) for row in chosen)
        self.has = [dict(zip(space.operations, column, strict=True)) for column in columns]  # by kind of cell: (edges,) which have it
        self.flags = [self._flags(has) for has in self.has]
        self.picked: tuple[str, list[dict[str, Tensor]]] = "", []  # the cell that runs, and the weights of edges by their level

    def leaving(self, cell: Cell, source: int, x: Tensor) -> list[tuple[int, Tensor]]:
        """What the edges that leave a state of a cell make of it. Those of both inputs run together, when the second is there."""
        if self.picked[0] != cell.name:
            self.picked = cell.name, self._weights(cell)
        if source == 0:
            self.first = x
        numbers, level = (LEAVING[0] + LEAVING[1], 0) if source < INPUTS else (LEAVING[source], source - 1)
        if source == 0 or not numbers:
            return []
        own, flags = self.picked[1][level], self.flags[cell.kind][level]
        stride = cell.stride if source < INPUTS else 1
        own = own if stride == 2 else {name: weight for name, weight in own.items() if name not in ("even", "odd")}
        run = partial(self._of_source, cell, LEAVING[source], stride)
        if source < INPUTS:  # both inputs have equally many edges
            both = torch.stack([one.permute(0, 2, 3, 1) for one in (self.first, x)]).permute(0, 1, 4, 2, 3)  # channels stay last
            halved = ({name: part.unflatten(0, (INPUTS, -1)) for name, part in parts.items()} for parts in (own, flags))
            made = torch.vmap(run)(both, *halved).flatten(0, 1)
        else:
            made = run(x, own, flags)
        return list(zip(numbers, made.unbind(), strict=True))

    def _of_source(self, cell: Cell, numbers: Sequence[int], stride: int, x: Tensor, own: Weights, flags: Weights) -> Tensor:
        """(edges, n, c, h, w): those that leave one state."""
        rectified, base = F.relu(x), self._without_weights(cell, numbers, x, stride, flags)
        return torch.vmap(lambda *one: self._edge(rectified, stride, *one))(base, own, flags)

    def _edge(self, rectified: Tensor, stride: int, y: Tensor, own: Weights, flags: Weights) -> Tensor:
        """One edge: y is what it makes without weights."""
        channels = rectified.shape[1]
        if "even" in own:
            even, odd = halves(rectified)
            halved = torch.cat([pointwise(even, own["even"]), pointwise(odd, own["odd"])], 1)
            y = batch_norm(halved, None, None, "", None, flags["skip_connect"].expand(channels), residual=y)
        separable, reach, active = flags["separable"], flags["reach"], flags["active"]
        first = convolved(rectified, own["depth1"], stride, 1, reach, active)
        if "dilated" in own:
            first = first + convolved(rectified, own["dilated"], stride, 2, reach, flags["active_dilated"])
        first = batch_norm(pointwise(first, own["point1"]), None, None, "", None, flags["convolves"].expand(channels))
        if "dilated" in own:
            y = torch.addcmul(y, first, flags["dilated"].to(y.dtype))
        second = pointwise(convolved(F.relu(first), own["depth2"], 1, 1, reach, active), own["point2"])
        return batch_norm(second, None, None, "", None, separable.expand(channels), residual=y)

    def _without_weights(self, cell: Cell, numbers: Sequence[int], x: Tensor, stride: int, flags: Weights) -> Tensor:
        """(edges, n, c, h, w): pools and identities."""
        parts = cell.operations[numbers[0]]
        names = [name for name in (*POOLS, "skip_connect") if name in parts and not parts[name].shapes]
        maps = [run_part(parts[name], x, self.weights, None, flags[name].any() if parts[name].layers else None) for name in names]
        if not maps:
            return torch.zeros_like(x[:, :, ::stride, ::stride]).expand(len(numbers), -1, -1, -1, -1)
        coefficients = torch.stack([flags[name] for name in names], 1).to(x.dtype)  # one of a row at most
        last = torch.stack([one.permute(0, 2, 3, 1) for one in maps])  # channels last, as all layers around it like
        return torch.tensordot(coefficients, last, 1).permute(0, 1, 4, 2, 3)

    # -- picked by genes ----------------------------------------------------------
    def _flags(self, has: Weights) -> list[dict[str, Tensor]]:
        """(edges,) each, by level."""

        def any_of(names: Sequence[str]) -> Tensor:
            return torch.stack([has[name] for name in names if name in has]).any(0)

        flags = {name: has[name] for name in (*POOLS, "skip_connect") if name in has}
        flags |= {"separable": any_of(SEPARABLE), "convolves": any_of(SEPARABLE + DILATED)}
        flags["active"] = MANY * flags["separable"]
        flags["reach"] = 2 - any_of((SEPARABLE[0], DILATED[0])).long() if SEPARABLE[1] in has else torch.ones_like(flags["active"])
        if DILATED[0] in has:
            flags["dilated"] = any_of(DILATED)
            flags["active_dilated"] = MANY * flags["dilated"]
        return _by_level(flags)

    def _weights(self, cell: Cell) -> list[dict[str, Tensor]]:
        """(edges, …) each, by level; zeros where an edge has nothing of the kind."""
        picked = {name: dict.fromkeys(SEPARABLE, f"{name}.weight") for name in ("depth1", "point1", "depth2", "point2")}
        if DILATED[0] in self.space.operations:
            picked["dilated"] = dict.fromkeys(DILATED, "depth.weight")
            picked["point1"] |= dict.fromkeys(DILATED, "point.weight")
        if cell.stride == 2:
            picked |= {half: {"skip_connect": f"halve.{half}.weight"} for half in ("even", "odd")}
        return _by_level({name: self._pick(cell, names) for name, names in picked.items()})

    def _pick(self, cell: Cell, names: Mapping[str, str]) -> Tensor:
        """names: of a weight inside each operation that has it, of kernels that grow. Weights that no gene asks for may be no numbers."""
        total: Tensor | None = None
        for operation in reversed([name for name in names if name in self.space.operations]):
            parts = [cell.operations[number][operation] for number in ORDER]
            weights = [self.weights.get(f"{part.name}.{names[operation]}") for part in parts]
            some = next(weight for weight in weights if weight is not None)  # in a reduction cell some skips are identities
            stack = torch.stack([some if weight is None else weight for weight in weights])
            if total is not None and stack.shape != total.shape:
                stack = F.pad(stack, [(total.shape[-1] - stack.shape[-1]) // 2] * 4)
            if self.among_zeros:
                total = stack if total is None else total + stack
                continue
            has = self.has[cell.kind][operation].reshape(-1, *[1] * (stack.ndim - 1))
            total = torch.where(has, stack, stack.new_zeros(()) if total is None else total)
        assert total is not None
        return total


def _by_level(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Of the edges that leave the inputs of a cell, then of those that leave its first node, and so on."""
    counts = [len(LEAVING[0] + LEAVING[1]), *(len(numbers) for numbers in LEAVING[INPUTS:])]
    parts = {name: tensor.split(counts) for name, tensor in tensors.items()}
    return [{name: part[level] for name, part in parts.items()} for level in range(len(counts))]
