"""Weights in training at fixed places in memory, and steps on them that a GPU replays without waiting for Python."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from fedloom.supernets.base import Weights
from fedloom.training.packed import Packed, flattened

Input = Tensor | float


class Workplace:
    """Packed weights, their momenta and decay. ``run`` makes a step, on a GPU by replaying a CUDA graph captured at its first call.

    A step is known by its key: what it computes and the shapes of its inputs. Inputs are copied to fixed tensors, because a
    graph reads and writes fixed addresses.
    """

    def __init__(self, weights: Weights, decay: float) -> None:
        self.weights = Packed.of(weights)
        self.momenta = torch.zeros_like(self.weights.flat)
        # (entries,) no decay for biases and normalisation
        self.decay = flattened(torch.full_like(tensor, decay if tensor.ndim > 1 else 0.0) for tensor in weights.values())
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}

    def load(self, weights: Weights) -> None:
        """Start again from these weights."""
        for name, tensor in weights.items():
            self.weights.views[name].copy_(tensor)
        self.momenta.zero_()

    def run(self, step: Callable[..., None], key: Hashable, *inputs: Input) -> None:
        if not self.weights.flat.is_cuda:
            step(self, *inputs)
            return
        if key not in self._captured:
            self._captured[key] = self._capture(step, inputs)
        graph, fixed = self._captured[key]
        for place, given in zip(fixed, inputs, strict=True):
            if isinstance(given, Tensor):
                place.copy_(given)
            else:
                place.fill_(given)
        graph.replay()

    def _capture(self, step: Callable[..., None], inputs: tuple[Input, ...]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
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
            with torch.cuda.graph(graph):
                step(self, *fixed)
        self.weights.flat.copy_(before[0])  # the warm-up moved them
        self.momenta.copy_(before[1])
        return graph, fixed
