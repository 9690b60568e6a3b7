"""A training step captured once as a CUDA graph and replayed: the GPU does not wait for Python between small kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.supernets.base import Weights

Step = Callable[[Weights, Weights, Architecture, Tensor, Tensor, Tensor], None]
Key = tuple[Architecture, tuple[tuple[str, tuple[int, ...]], ...], int]


class GraphedStep:
    """One network, one batch shape. Weights, momenta, images, labels and rate live in fixed tensors that the graph reads and writes."""

    @staticmethod
    def key_of(architecture: Architecture, weights: Weights, batch: int) -> Key:
        return architecture, tuple((name, tuple(tensor.shape)) for name, tensor in weights.items()), batch

    def __init__(self, step: Step, weights: Weights, architecture: Architecture, images: Tensor, labels: Tensor) -> None:
        self.key = self.key_of(architecture, weights, len(labels))
        self._weights = {name: tensor.clone() for name, tensor in weights.items()}
        self._momenta = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        self._images, self._labels = images.clone(), labels.clone()
        self._rate = torch.zeros((), device=labels.device)
        arguments = (self._weights, self._momenta, architecture, self._images, self._labels, self._rate)
        # Shapes are fixed here, so let the convolution library look for its fastest kernels.
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=torch.backends.cudnn.allow_tf32):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):  # warm-up: libraries allocate and choose kernels outside the capture
                    step(*arguments)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                step(*arguments)

    def load(self, weights: Weights) -> None:
        for name, tensor in weights.items():
            self._weights[name].copy_(tensor)
            self._momenta[name].zero_()

    def step(self, images: Tensor, labels: Tensor, rate: float) -> None:
        self._images.copy_(images)
        self._labels.copy_(labels)
        self._rate.fill_(rate)
        self._graph.replay()

    def weights_now(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._weights.items()}
