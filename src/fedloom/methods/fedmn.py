"""FedMN (Wang et al., *Personalized Federated Learning via Heterogeneous Modular Networks*, ICDM 2022).

The body of one fixed network is the shared encoder. In place of one classifier there is a pool of modules. Each client chooses some of them
by gates that it learns with the network, and its classifier is their mean. The server averages the body over all clients, and each module
over the clients that chose it.

Deviations: one modular layer, of linear modules, so that a client's network folds into an ordinary one; gates are each client's own
parameters instead of the output of a shared routing network; they open by a threshold with straight-through gradients, without Gumbel
noise; the encoder is not trained beforehand; each client fine-tunes at the end. Normalisation statistics are measured at each client.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from fedloom.core.boundary import Manifest, Upload
from fedloom.core.client_site import ClientMemory
from fedloom.core.messages import Array, Report, frozen
from fedloom.core.method import Answer
from fedloom.core.seeds import derive_seed, rng
from fedloom.core.settings import setting
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import EXAMPLES, FixedNetwork, FixedState, Visit
from fedloom.supernets.base import Weights
from fedloom.training.local import NetworkJob
from fedloom.training.objectives import Modules

GATES = Modules.GATES
FIRST = 0.1  # standard deviation of a client's first gates
RULES = ("coverage", "clipped", "median", "trimmed_mean")  # all read which modules a client chose


@dataclass(frozen=True)
class FedMNSettings:
    architecture: str = setting("medium", "the network: smallest, medium, largest, random, or an architecture's id")
    modules: int = setting(4, "classifiers in the pool, of which every client takes the mean of some", low=2, high=64)
    averaging: str = setting("coverage", "how updates are combined; all but coverage resist a few hostile clients", choices=RULES)

    @classmethod
    def tiny(cls) -> Self:
        return cls(architecture="smallest", modules=3)


@dataclass(frozen=True)
class FedMNState(FixedState):
    """weights: those of the body, and of each module with the number of the module before its name."""


@METHODS.add("fedmn", FedMNSettings, "FedMN: one body for all, and a pool of classifiers from which every client chooses some")
@dataclass(frozen=True)
class FedMN(FixedNetwork[FedMNState]):
    settings: FedMNSettings

    state: ClassVar[type[Any]] = FedMNState
    uploads: ClassVar[Manifest] = {
        "update": Upload("what local training changed in the body and in the modules that the client chose", like="weights"),
        "coverage": Upload("which modules the client chose", like="weights", counts=True),
        "examples": EXAMPLES,
    }

    @property
    def modules(self) -> Modules:
        return Modules(self.settings.modules)

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> FedMNState:
        state, in_head = super().start(seed), self.tools.supernet.in_head
        architecture = self.tools.space.find(state.architecture, rng(seed))
        pool = {
            self.modules.name(number, name): array
            for number in range(self.settings.modules)
            for name, array in self.tools.initial_network(derive_seed(seed, "module", number), architecture).items()
            if in_head(name)
        }
        return replace(state, weights=frozen({**{name: array for name, array in state.weights.items() if not in_head(name)}, **pool}))

    # -- client ---------------------------------------------------------------
    def job(self, visit: Visit) -> NetworkJob:
        first = rng(visit.instruction.seed, "gates").normal(0, FIRST, self.settings.modules).astype(np.float32)
        own = self.tools.own({GATES: visit.site.memory.arrays.get(GATES, first)})
        return replace(super().job(visit), plain={**visit.received, **own}, objective=self.modules)

    def train(self, visit: Visit) -> Answer:
        tools = self.tools
        with visit.site.clock("train"):
            (trained,) = tools.trainer.train_networks([self.job(visit)])
            gates = tools.arrays({GATES: trained.weights[GATES]})
            report = self._chosen(self.report(visit, trained.weights), gates[GATES])
        diary, _ = tools.test(visit.site, visit.architecture, self._network(trained.weights), trained.macs)
        return Answer(report, ClientMemory(gates), diary)

    def finish(self, visit: Visit) -> Answer:
        """A client that was never drawn takes the mean of all modules."""
        gates = visit.site.memory.arrays.get(GATES, np.zeros(self.settings.modules, np.float32))
        network = self._network({**visit.received, **self.tools.own({GATES: gates})})
        return replace(super().finish(visit._replace(received=network)), memory=visit.site.memory)

    def _network(self, weights: Weights) -> Weights:
        return {name: tensor.detach() for name, tensor in self.modules.assembled(weights).items()}

    def _chosen(self, report: Report, gates: Array) -> Report:
        """The report without what weight decay did to modules that the client did not choose."""
        active = gates >= min(0.0, gates.max())
        closed = tuple(f"module{number}/" for number in np.flatnonzero(~active))
        update = {name: np.zeros_like(array) if name.startswith(closed) else array for name, array in report.arrays["update"].items()}
        steps = {name: np.full((1,) * array.ndim, not name.startswith(closed), np.int32) for name, array in update.items()}
        return replace(report, arrays={"update": update, "coverage": steps})
