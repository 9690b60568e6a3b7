"""FedAvg (McMahan et al., AISTATS 2017, Algorithm 1) on one fixed network of the space, fine-tuned by each client at the end.

Both halves are those of ``FixedNetwork``: other methods on a fixed network change parts of it.

Deviation: normalisation statistics are not averaged; every client measures its own on its training images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedloom.methods.base import METHODS
from fedloom.methods.fixed import FixedNetwork, FixedSettings, FixedState


@dataclass(frozen=True)
class FedAvgSettings(FixedSettings):
    pass


@dataclass(frozen=True)
class FedAvgState(FixedState):
    pass


@METHODS.add("fedavg", FedAvgSettings, "one fixed network averaged over clients, fine-tuned locally at the end")
@dataclass(frozen=True)
class FedAvg(FixedNetwork[FedAvgState]):
    settings: FedAvgSettings

    state: ClassVar[type[Any]] = FedAvgState
