"""A supernet in training at a client, epoch by epoch, so that a method can do something in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientSite
from fedloom.core.messages import Array
from fedloom.supernets.base import Weights
from fedloom.training.holds import Part
from fedloom.training.local import Draw
from fedloom.training.tools import Tools


@dataclass
class Epochs:
    """Weights as they are now, how many steps trained each architecture, and the forward multiply-accumulates spent.

    received: the weights before; taught, slope, part: see ``SupernetJob``. restarts: momentum starts at zero in every epoch, else it goes
    on.
    """

    tools: Tools
    site: ClientSite
    received: Weights
    taught: float = 0.0
    restarts: bool = True
    slope: Weights | None = None
    part: Part = "whole"
    weights: Weights = field(init=False)
    steps: Counter[Architecture] = field(default_factory=Counter)
    macs: int = 0
    _momenta: Tensor | None = None

    def __post_init__(self) -> None:
        self.weights = self.received

    def train(self, subnets: Draw, rate: float, draw: np.random.Generator) -> None:
        """One more epoch."""
        train, trainer = self.site.data.train, self.tools.trainer
        with self.site.clock("train"):
            how = self.taught, self._momenta, self.slope, self.part
            trained = trainer.train_supernet(self.weights, subnets, train, [rate], draw, *how)
        self.weights, self.steps, self.macs = trained.weights, self.steps + trained.steps, self.macs + trained.macs
        self._momenta = None if self.restarts else trained.momenta

    def update(self) -> dict[str, Array]:
        """What all epochs changed; refused if they went beyond what the client has received."""
        self.tools.check_reach(self.steps)
        return self.tools.update(self.weights, self.received)

    def coverage(self, effort: bool) -> dict[str, Array]:
        """Per entry the steps that trained it; without ``effort`` only whether there were any, which says less."""
        return {name: count.numpy() for name, count in self.tools.supernet.coverage(self.steps, counted=effort).items()}

    @property
    def peak_memory_mb(self) -> float:
        """Of the largest step, with what the client stores of the supernet."""
        reach, examples = self.tools.reach, len(self.site.data.train)
        stored = reach.entries if reach else sum(tensor.numel() for tensor in self.weights.values())
        return max(self.tools.training_memory_mb(one, stored, examples) for one in self.steps)
