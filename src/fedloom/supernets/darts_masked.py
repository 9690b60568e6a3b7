"""Training of DARTS networks at static shapes: which operation an edge has is data, so one captured step serves every architecture.

Nothing runs eight times to keep one. Operations differ little: a separable convolution is a dilated one and a second stage, a 3x3 kernel is
a 5x5 one with zeros around. So an edge runs one chain of layers, with weights picked by its gene, and kernels skip the parts that it
lacks (``reach``, ``active`` and masks in ``elastic.py``). Pools have no weights: they run once for all edges that leave a state.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class Edges:
    """The edges of one network. genes: (28,) on the device; weights: the whole supernet's. Normalised by the moments of the batch."""

    def __init__(self, space: DARTS, weights: Weights, genes: Tensor) -> None:
        self.space, self.weights = space, weights
        # (2, 14, operations)
        self.chosen = genes.reshape(len(KINDS), len(EDGES), 1) == torch.arange(len(space.operations), device=genes.device)

    def leaving(self, cell: Cell, source: int, x: Tensor) -> list[tuple[int, Tensor]]:
        """What the edges that leave a state of a cell make of it."""
        numbers = LEAVING[source]
        if not numbers:
            return []
        stride, rectified = cell.stride if source < INPUTS else 1, F.relu(x)
        made = torch.vmap(lambda *own: self._edge(rectified, stride, *own))(
            self._without_weights(cell, numbers, x, stride), self._weights(cell, numbers, stride), self._flags(cell, numbers)
        )
        return list(zip(numbers, made.unbind(), strict=True))

    def _edge(self, rectified: Tensor, stride: int, y: Tensor, own: Weights, flags: Weights) -> Tensor:
        """One edge: y is what it makes without weights."""
        channels = rectified.shape[1]
        if "even" in own:
            even, odd = halves(rectified)
            halved = torch.cat([pointwise(even, own["even"]), pointwise(odd, own["odd"])], 1)
            y = batch_norm(halved, None, None, "", None, flags["skip"].expand(channels), residual=y)
        separable, reach = flags["separable"], flags["reach"]
        first = convolved(rectified, own["depth1"], stride, 1, reach, channels * separable)
        if "dilated" in own:
            first = first + convolved(rectified, own["dilated"], stride, 2, reach, channels * flags["dilated"])
        first = batch_norm(pointwise(first, own["point1"]), None, None, "", None, flags["convolves"].expand(channels))
        if "dilated" in own:
            y = torch.addcmul(y, first, flags["dilated"].to(y.dtype))
        second = pointwise(convolved(F.relu(first), own["depth2"], 1, 1, reach, channels * separable), own["point2"])
        return batch_norm(second, None, None, "", None, separable.expand(channels), residual=y)

    def _without_weights(self, cell: Cell, numbers: Sequence[int], x: Tensor, stride: int) -> Tensor:
        """(edges, n, c, h, w): pools and identities."""
        parts, names = cell.operations[numbers[0]], [name for name in (*POOLS, "skip_connect") if name in self.space.operations]
        names = [name for name in names if not parts[name].shapes]
        maps = [run_part(parts[name], x, self.weights, None, self._has(cell, numbers, name).any()) for name in names]
        if not maps:
            return torch.zeros_like(x[:, :, ::stride, ::stride]).expand(len(numbers), -1, -1, -1, -1)
        coefficients = torch.stack([self._has(cell, numbers, name) for name in names], 1).to(x.dtype)  # one of a row at most
        last = torch.stack([one.permute(0, 2, 3, 1) for one in maps])  # channels last, as all layers around it like
        return torch.tensordot(coefficients, last, 1).permute(0, 1, 4, 2, 3)

    # -- picked by genes ----------------------------------------------------------
    def _has(self, cell: Cell, numbers: Sequence[int], name: str) -> Tensor:
        """(edges,) which of them have this operation."""
        place = self.space.operations.index(name)
        return torch.stack([self.chosen[cell.kind, number, place] for number in numbers])

    def _any(self, cell: Cell, numbers: Sequence[int], names: Sequence[str]) -> Tensor:
        has = [self._has(cell, numbers, name) for name in names if name in self.space.operations]
        return torch.stack(has).any(0)

    def _flags(self, cell: Cell, numbers: Sequence[int]) -> dict[str, Tensor]:
        """(edges,) each."""
        flags = {"separable": self._any(cell, numbers, SEPARABLE), "skip": self._has(cell, numbers, "skip_connect")}
        flags["convolves"] = self._any(cell, numbers, SEPARABLE + DILATED)
        small = self._any(cell, numbers, (SEPARABLE[0], DILATED[0]))
        if SEPARABLE[1] not in self.space.operations:
            return flags | {"reach": torch.ones_like(small, dtype=torch.long)}
        return flags | {"dilated": self._any(cell, numbers, DILATED), "reach": 2 - small.long()}

    def _weights(self, cell: Cell, numbers: Sequence[int], stride: int) -> dict[str, Tensor]:
        """(edges, …) each; zeros where an edge has nothing of the kind."""
        picked = {name: dict.fromkeys(SEPARABLE, f"{name}.weight") for name in ("depth1", "point1", "depth2", "point2")}
        if DILATED[0] in self.space.operations:
            picked["dilated"] = dict.fromkeys(DILATED, "depth.weight")
            picked["point1"] |= dict.fromkeys(DILATED, "point.weight")
        if stride == 2:
            picked |= {half: {"skip_connect": f"halve.{half}.weight"} for half in ("even", "odd")}
        return {name: self._pick(cell, numbers, names) for name, names in picked.items()}

    def _pick(self, cell: Cell, numbers: Sequence[int], names: dict[str, str]) -> Tensor:
        """names: of a weight inside each operation that has it, of kernels that grow. Weights that no gene asks for may be no numbers."""
        total: Tensor | None = None
        for operation in reversed([name for name in names if name in self.space.operations]):
            stack = torch.stack([self.weights[f"{cell.operations[number][operation].name}.{names[operation]}"] for number in numbers])
            if total is not None and stack.shape != total.shape:
                stack = F.pad(stack, [(total.shape[-1] - stack.shape[-1]) // 2] * 4)
            has = self._has(cell, numbers, operation).reshape(-1, *[1] * (stack.ndim - 1))
            total = torch.where(has, stack, 0.0 if total is None else total)
        assert total is not None
        return total
