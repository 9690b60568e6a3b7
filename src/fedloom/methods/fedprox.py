"""FedProx (Li et al., *Federated Optimization in Heterogeneous Networks*, MLSys 2020, Algorithm 2) on one fixed network of the space.

Clients train on their loss plus a proximal term, mu / 2 |w - w_t|^2, which holds them near the network w_t that they received.

Deviations: clients are drawn evenly and count by their examples (the paper draws them by examples and counts them alike); all of them train
the same number of epochs, none does partial work; SGD has the momentum of ``training``. Each client fine-tunes at the end, without the
term. Normalisation statistics are measured at each client.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedloom.core.settings import setting
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import FixedNetwork, FixedSettings, FixedState, Visit
from fedloom.training.holds import Pull
from fedloom.training.local import NetworkJob


@dataclass(frozen=True)
class FedProxSettings(FixedSettings):
    pull: float = setting(0.01, "mu: how strongly local training is held near the network that was received; 0: fedavg", low=0)


@dataclass(frozen=True)
class FedProxState(FixedState):
    pass


@METHODS.add("fedprox", FedProxSettings, "FedProx: fedavg whose local training is held near the shared network")
@dataclass(frozen=True)
class FedProx(FixedNetwork[FedProxState]):
    settings: FedProxSettings

    state: ClassVar[type[Any]] = FedProxState

    def job(self, visit: Visit) -> NetworkJob:
        return replace(super().job(visit), pull=Pull(visit.received, self.settings.pull))
