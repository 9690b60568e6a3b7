"""A supernet in training at a client, epoch by epoch, so that a method can do something in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientSite
from fedloom.supernets.base import Weights
from fedloom.training.holds import Part
from fedloom.training.local import Draw, Trainer


@dataclass
class Epochs:
    """Weights as they are now, how many steps trained each architecture, and the forward multiply-accumulates spent.

    taught, slope, part: see ``SupernetJob``. restarts: momentum starts at zero in every epoch, else it goes on.
    """

    trainer: Trainer
    site: ClientSite
    weights: Weights
    taught: float = 0.0
    restarts: bool = True
    slope: Weights | None = None
    part: Part = "whole"
    steps: Counter[Architecture] = field(default_factory=Counter)
    macs: int = 0
    _momenta: Tensor | None = None

    def train(self, subnets: Draw, rate: float, draw: np.random.Generator) -> Weights:
        """The weights after one more epoch."""
        train = self.site.data.train
        with self.site.clock("train"):
            how = self.taught, self._momenta, self.slope, self.part
            trained = self.trainer.train_supernet(self.weights, subnets, train, [rate], draw, *how)
        self.weights, self.steps, self.macs = trained.weights, self.steps + trained.steps, self.macs + trained.macs
        self._momenta = None if self.restarts else trained.momenta
        return self.weights
