"""Per-FedAvg (Fallah, Mokhtari and Ozdaglar, *Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach*, NeurIPS 2020, Algorithm 1) on one fixed network of the space.

Clients train a network to be good after a step on its client's own data, not before it. Every local step looks at the loss behind such an
inner step (``training/adaptation.py``); the averages are those of FedAvg. At the end each client fine-tunes what came of it.

Deviations: a batch of ``training.batch`` images is cut into the two or three batches of a step; outer steps have the momentum and the
falling rates of ``training``; at the end clients fine-tune for epochs instead of one step. Normalisation uses the statistics of each part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.core.settings import setting
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import FixedNetwork, FixedSettings, FixedState, Visit
from fedloom.training.adaptation import Adaptation
from fedloom.training.local import NetworkJob
from fedloom.training.recipe import computing


@dataclass(frozen=True)
class PerFedAvgSettings(FixedSettings):
    step: float = setting(0.01, "alpha: the rate of the inner step; 0: fedavg on half of each batch", low=0)
    order: str = setting(
        "first", "derivative of the inner step: left out, or measured without a Hessian", choices=("first", "hessian_free")
    )
    probe: float = setting(1e-3, "order=hessian_free: delta, how far along the gradient differences are measured", low=1e-8)


@dataclass(frozen=True)
class PerFedAvgState(FixedState):
    pass


@METHODS.add("perfedavg", PerFedAvgSettings, "Per-FedAvg: one fixed network that is good after a step on a client's own data")
@dataclass(frozen=True)
class PerFedAvg(FixedNetwork[PerFedAvgState]):
    settings: PerFedAvgSettings

    state: ClassVar[type[Any]] = PerFedAvgState

    # -- client ---------------------------------------------------------------
    def job(self, visit: Visit) -> NetworkJob:
        settings, training, images = self.settings, self.tools.training, len(visit.site.data.train)
        adaptation = Adaptation(settings.step, settings.probe if settings.order == "hessian_free" else 0.0)
        if min(training.batch, images) < adaptation.parts:
            what = (
                f"a step of perfedavg needs {adaptation.parts} images, and {visit.site.name} has {images}, training.batch {training.batch}"
            )
            raise InvalidData(f"{what}. Raise split.size or training.batch", client=visit.site.name)
        some = next(iter(visit.received.values()))
        if adaptation.probe and computing(training, some) != some.dtype:
            what = "perfedavg.order=hessian_free measures differences that half precision rounds away"
            raise InvalidConfig(f"{what}. Set training.precision=full", key="training.precision")
        return replace(super().job(visit), adaptation=adaptation)
