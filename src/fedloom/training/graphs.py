"""Weights in training at fixed places in memory, and steps on them that a GPU replays without waiting for Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from functools import cached_property

import torch
from torch import Tensor

from fedloom.supernets.base import Weights
from fedloom.training.packed import Packed, flattened
from fedloom.training.recipe import TrainingSettings, optimiser_of

Input = Tensor | float


# Calls of a step before it is captured. A capture takes about as long as this many eager steps (its warm-up, and the search for fast
# convolutions), so whoever trains briefly does not pay for it, and nobody pays more than twice.
WORTH_A_GRAPH = 4
KEPT = 8  # captured steps


class WeightsInTraining:
    """Packed weights, their optimiser, its moments and decay. ``run`` makes a step; on a GPU, one made often becomes a CUDA graph.

    moves: the parameters that training moves; none: all of them.

    A step is known by its key: what it computes and the shapes of its inputs. Inputs are copied to fixed tensors, because a
    graph reads and writes fixed addresses. Graphs share memory: they never run at the same time, and leave nothing in it.
    """

    def __init__(self, weights: Packed, settings: TrainingSettings, captures: bool = True, moves: Collection[str] | None = None) -> None:
        self.weights, self.moves, self.optimiser = weights, moves, optimiser_of(settings)
        self.mask = None if moves is None else self._marked(moves)  # (entries,)
        self._pull: tuple[Tensor, ...] = ()  # like the weights; () or (rows, 1); a slope if there is one, like the weights
        self.momenta, decay = self.optimiser.start(weights.flat), settings.weight_decay
        # (entries,) no decay for biases and normalisation
        by_name = (torch.full(shape, decay if len(shape) > 1 else 0.0, dtype=weights.flat.dtype) for shape in weights.shapes.values())
        self.decay = flattened(by_name).to(weights.flat.device)
        self._captures = captures and weights.flat.is_cuda
        self._calls: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], Callable[..., None]]] = {}
        self._memory = torch.cuda.graph_pool_handle() if self.weights.flat.is_cuda else None

    @cached_property
    def total(self) -> Packed:
        """Room for the sum of several gradients."""
        return Packed.zeros(self.weights.shapes, self.weights.flat.dtype, self.weights.flat.device)

    def load(self, weights: Weights, momenta: Tensor | None = None) -> None:
        """Start again from these weights, and from these momenta or zero."""
        self.weights.load(weights)
        if momenta is None:
            self.momenta.zero_()
        else:
            self.momenta.copy_(momenta)

    def pull(self, towards: Tensor, strength: Tensor, *slope: Tensor) -> None:
        """From now on gradients have the terms of a ``Pull``. towards, slope: like the weights; strength: (), or (rows, 1)."""
        given = (towards, strength, *slope)
        if not self._pull:
            self._pull = tuple(one.clone() for one in given)
        else:  # in place: captured steps read it there
            for kept, one in zip(self._pull, given, strict=True):
                kept.copy_(one)

    def pulled(self, gradient: Tensor) -> Tensor:
        if not self._pull:
            return gradient
        towards, strength, *slope = self._pull
        return sum(slope, torch.addcmul(gradient, strength, self.weights.flat - towards))

    def at(self, flat: Tensor) -> Packed:
        """Other weights of the same layout; those in training where it is theirs, whose views exist."""
        return self.weights if flat is self.weights.flat else Packed(flat, self.weights.shapes)

    def move(self, gradient: Tensor, rate: Input, mask: Tensor | None) -> None:
        """A step of the optimiser. gradient: like the weights; mask: the entries that move, or all of them."""
        self.optimiser.step(self.weights.flat, self.momenta, gradient, self.decay, rate, mask)

    def _marked(self, moves: Collection[str]) -> Tensor:
        shapes = self.weights.shapes
        return flattened(torch.full(shape, name in moves) for name, shape in shapes.items()).to(self.weights.flat.device)

    def run(self, step: Callable[..., None], key: Hashable, *inputs: Input) -> None:
        self._calls[key] += 1
        if not self._captures or self._calls[key] < WORTH_A_GRAPH:
            step(self, *inputs)
            return
        if key not in self._captured:
            if len(self._captured) >= KEPT:
                del self._captured[next(iter(self._captured))]
            self._captured[key] = self._capture(step, inputs)
        graph, fixed, _ = self._captured[key]
        for place, given in zip(fixed, inputs, strict=True):
            if isinstance(given, Tensor):
                place.copy_(given)
            else:
                place.fill_(given)
        graph.replay()

    def _capture(
        self, step: Callable[..., None], inputs: tuple[Input, ...]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Callable[..., None]]:
        """The graph, its inputs, and the step itself: whatever that holds must live as long as the graph."""
        device = self.weights.flat.device
        fixed = [given.clone() if isinstance(given, Tensor) else torch.full((), given, device=device) for given in inputs]
        before = self.weights.flat.clone(), self.momenta.clone()
        # Shapes are fixed here, so let the convolution library look for its fastest kernels.
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=torch.backends.cudnn.allow_tf32):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):  # warm-up: libraries allocate and choose kernels outside the capture
                    step(self, *fixed)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):  # others may draw meanwhile
                step(self, *fixed)
        self.weights.flat.copy_(before[0])  # the warm-up moved them
        self.momenta.copy_(before[1])
        return graph, fixed, step
