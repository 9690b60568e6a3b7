"""The papers' predictor of accuracy from a noisy architecture and a task: directed graph convolutions (DiGCN) and a small head.

PerFedSDE-NAS, supplement D, which follows DiffusionNAG (An et al., ICLR 2024). What differs is listed in ``generator/paper/training.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from fedloom.generator.paper.score import LevelCode, PaperSettings, checked
from fedloom.generator.task_encoder import Grouped, TaskEncoder
from fedloom.maths.samplers import Denoise

TASK = 56  # numbers of a task vector
ARCHITECTURE = 128  # numbers of an architecture's vector
HEAD = 32  # hidden width of the head


class DirectedConvolution(nn.Module):
    """(relu(A x U) + relu(B x V)) / 2: A averages over a node and the nodes that follow it, B over it and those it follows."""

    forwards: Tensor  # (nodes, nodes) A
    backwards: Tensor  # (nodes, nodes) B

    def __init__(self, follows: Tensor, inputs: int, outputs: int) -> None:
        super().__init__()
        linked = (follows | torch.eye(len(follows), dtype=torch.bool, device=follows.device)).float()
        self.register_buffer("forwards", linked / linked.sum(1, keepdim=True), persistent=False)
        self.register_buffer("backwards", linked.T / linked.T.sum(1, keepdim=True), persistent=False)
        self.along = nn.Linear(inputs, outputs, bias=False)
        self.against = nn.Linear(inputs, outputs, bias=False)
        nn.init.xavier_uniform_(self.along.weight)
        nn.init.xavier_uniform_(self.against.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: (n, nodes, inputs) -> (n, nodes, outputs)."""
        along = torch.relu(self.forwards @ self.along(x))
        against = torch.relu(self.backwards @ self.against(x))
        return (along + against) / 2


class PaperPredictor(nn.Module):
    """mask: (tokens, symbols) bool, the symbols each token has; follows: (tokens, tokens) bool."""

    mask: Tensor

    def __init__(self, mask: Tensor, follows: Tensor, settings: PaperSettings | None = None) -> None:
        super().__init__()
        settings = checked(settings or PaperSettings())
        width = settings.graph_width
        self.register_buffer("mask", mask, persistent=False)
        self.symbol = nn.Parameter(torch.randn(*mask.shape, width) / width**0.5)  # (tokens, symbols, width)
        widths = [width] * (settings.graph_layers + 1)
        self.layers = nn.ModuleList(DirectedConvolution(follows, inputs, outputs) for inputs, outputs in pairwise(widths))
        self.level = LevelCode(width)
        self.dropout = nn.Dropout(settings.dropout)
        self.summary = nn.Linear(width, ARCHITECTURE, bias=False)
        self.head = nn.Sequential(nn.Linear(TASK + ARCHITECTURE, HEAD), nn.Tanh(), nn.Linear(HEAD, 1))

    def forward(self, x: Tensor, sigma: Tensor, task: Tensor) -> Tensor:
        """x: (n, tokens, symbols) noisy, sigma: (n,), task: (n, 56) or (56,) -> (n,) standardised accuracy."""
        nodes = torch.einsum("nts,tsw->ntw", x * self.mask, self.symbol)
        for layer in self.layers:
            nodes = self.dropout(layer(nodes))
        architecture = self.dropout(self.summary(nodes.mean(1) + self.level(sigma)))
        joined = torch.cat([task.expand(len(x), -1), architecture], -1)
        return self.head(joined)[:, 0]


class PaperTaskPredictor(nn.Module):
    """The predictor together with the encoder of tasks that was trained with it."""

    mean: Tensor  # () of the accuracies it learned from, over tasks and architectures
    spread: Tensor  # () their standard deviation

    def __init__(self, mask: Tensor, follows: Tensor, features: int, settings: PaperSettings) -> None:
        super().__init__()
        self.task_encoder = TaskEncoder(features, TASK)
        self.network = PaperPredictor(mask, follows, settings)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))

    def task(self, grouped: Grouped) -> Tensor:
        """(tasks, 56), or (56,) of one."""
        return self.task_encoder.encode(grouped)

    def gain(self, x: Tensor, sigma: Tensor, task: Tensor) -> Tensor:
        """(n,) standardised accuracy of noisy architectures."""
        return self.network(x, sigma, task)

    def accuracy(self, x: Tensor, sigma: Tensor, task: Tensor) -> Tensor:
        return self.mean + self.spread * self.gain(x, sigma, task)


def guided(denoise: Denoise, gain: Callable[[Tensor, Tensor], Tensor], strength: float) -> Denoise:
    """Eq. 4 of PerFedSDE-NAS as reconstructed: the score plus strength times the gradient of the predicted accuracy.

    As a data prediction: D(x, sigma) + strength sigma^2 grad f(x, sigma). gain: f, (x (n, tokens, symbols), sigma (n,)) -> (n,).
    """

    def towards_accuracy(x: Tensor, sigma: float) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            predicted = gain(x, x.new_full((len(x),), sigma)).sum()
        (gradient,) = torch.autograd.grad(predicted, x)
        return denoise(x.detach(), sigma) + strength * sigma**2 * gradient

    return towards_accuracy
