"""kNN-Per (Marfoq, Neglia, Kameni and Vidal, *Personalized Federated Learning through Local Memorization*, ICML 2022, Algorithm 1).

The network is trained and averaged as in FedAvg, and no client fine-tunes it. At the end each client stores the features and labels of its
training images. Its personal model gives lambda times what the nearest of them say plus 1 - lambda times what the network says. Validation
images choose lambda.

Deviations: lambda comes from a grid of eleven values; statistics of normalisation, which the features depend on, are measured at each
client; all training images are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples, PersonalModel
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import Report
from fedloom.core.method import Answer
from fedloom.core.settings import setting
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import FixedNetwork, FixedSettings, FixedState, Visit
from fedloom.supernets.base import Weights
from fedloom.supernets.neighbours import has_room, with_neighbours
from fedloom.supernets.normalisation import Statistics
from fedloom.training.scoring import Score, score_of

SHARES = [number / 10 for number in range(11)]  # lambda; 0 is the shared network alone


@dataclass(frozen=True)
class KNNPerSettings(FixedSettings):
    neighbours: int = setting(10, "k: how many stored examples are asked", low=1)
    scale: float = setting(1.0, "sigma: neighbours count by exp(-distance² / (features · this)); larger: more alike", low=1e-6)


@dataclass(frozen=True)
class KNNPerState(FixedState):
    pass


@dataclass(frozen=True)
class Store:
    """A network and the examples that are stored beside it."""

    network: Weights
    statistics: Statistics
    keys: Tensor  # (examples, features)
    values: Tensor  # (examples, classes)


@METHODS.add("knnper", KNNPerSettings, "kNN-Per: fedavg's network, and at each client its nearest training images beside it")
@dataclass(frozen=True)
class KNNPer(FixedNetwork[KNNPerState]):
    settings: KNNPerSettings

    state: ClassVar[type[Any]] = KNNPerState

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> KNNPerState:
        state, supernet = super().start(seed), self.tools.supernet
        place = supernet.classifier(self.tools.tensors(state.weights))[0].removesuffix(".weight")  # refuses a head of another kind
        with torch.random.fork_rng(devices=()):  # torch draws weights for a new module, and nobody uses these
            network = supernet.network(Architecture.parse(state.architecture))
        if not has_room(network, place):
            what = f"{place} of the stand-alone networks of {self.tools.space.name} is no nn.Linear, beside which knnper stores examples"
            raise InvalidConfig(f"{what}. Choose another space or method", key="space")
        return state

    # -- client ---------------------------------------------------------------
    def finish(self, visit: Visit) -> Answer:
        tools, data, stored = self.tools, visit.site.data, visit.site.data.train
        with visit.site.clock("neighbours"):
            store = self._stored(visit, stored)
            selecting = self._asked(visit, store, tools.selecting(data))
            share = min(SHARES, key=lambda share: selecting(share).rank)
        seen = len(stored)
        validation = self._asked(visit, store, data.validation)(share)
        if tools.training.rejoin:
            stored = tools.rejoined(visit.site)
            with visit.site.clock("rejoin"):
                store = self._stored(visit, stored)
            seen += len(stored)
        test = self._asked(visit, store, data.test)(share)
        diary, _ = tools.test(visit.site, visit.architecture, visit.received, seen * tools.space.cost(visit.architecture).macs, stored)
        diary = replace(diary, validation_accuracy=validation.accuracy, test_accuracy=test.accuracy, notes={"neighbours_share": share})
        model = PersonalModel(visit.architecture.id, self._arrays(store, share))
        return Answer(Report(visit.instruction.client, visit.instruction.round), diary=diary, model=model)

    def _stored(self, visit: Visit, examples: Examples) -> Store:
        tools = self.tools
        statistics = tools.scorer.calibrate(visit.received, visit.architecture, examples)
        values = F.one_hot(examples.labels, tools.space.image.classes).to(next(iter(visit.received.values())).dtype)
        return Store(visit.received, statistics, tools.scorer.features(visit.received, visit.architecture, statistics, examples), values)

    def _asked(self, visit: Visit, store: Store, examples: Examples) -> Callable[[float], Score]:
        """How good a share is on examples."""
        weight, bias = (store.network[name] for name in self.tools.supernet.classifier(store.network))
        features = self.tools.scorer.features(store.network, visit.architecture, store.statistics, examples)
        logits, scale = F.linear(features, weight, bias), features.new_tensor(self.settings.scale)

        def score(share: float) -> Score:
            asked = features, logits, store.keys, store.values, self._count(store), features.new_tensor(share), scale
            return score_of(with_neighbours(*asked), examples.labels)

        return score

    def _count(self, store: Store) -> int:
        return min(self.settings.neighbours, len(store.keys))

    def _arrays(self, store: Store, share: float) -> dict[str, Any]:
        """The personal model's: those of the network, its statistics, and what is stored beside its classifier."""
        place = self.tools.supernet.classifier(store.network)[0].removesuffix(".weight")
        moments = {
            f"{name}.{moment}": tensor
            for name, both in store.statistics.items()
            for moment, tensor in zip(("running_mean", "running_var"), both, strict=True)
        }
        numbers = {"count": self._count(store), "share": share, "scale": self.settings.scale}
        beside = {"keys": store.keys, "values": store.values, **{name: store.keys.new_tensor([value]) for name, value in numbers.items()}}
        return self.tools.arrays({**store.network, **moments, **{f"{place}.{name}": tensor for name, tensor in beside.items()}})
