"""FedTP (Li et al., *FedTP: Federated Learning by Transformer Personalization*, IEEE TNNLS 2023, Algorithm 1) on one fixed network.

The projections of self-attention, which make queries, keys and values, are personal. A hypernetwork at the server makes them from an
embedding of each client. A client trains the whole network and sends its update. The server averages all but the projections; from the
projections' updates it moves the hypernetwork and the client's embedding, by the derivative of what it had made.

Deviations: the hypernetwork's first outputs are near the projections that the space starts with; it moves by plain gradient steps, without
momentum and decay; biases of the projections are shared; a client that was never drawn gets the mean embedding; each client fine-tunes at
the end. Normalisation statistics are measured at each client.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import FINISH, Array, Arrays, Instruction, Report, frozen
from fedloom.core.method import per_client
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import FixedNetwork, FixedSettings, FixedState
from fedloom.training.hypernetwork import Wanted, initial, made, moved

PROJECTION = re.compile(r"(\.attention\.(query|key|value)|\.parts)\.weight$")  # in `networks` all three are one array


@dataclass(frozen=True)
class FedTPSettings(FixedSettings):
    embedding: int = setting(128, "length of the vector that stands for a client", low=1)
    hidden: int = setting(32, "units in each layer of the hypernetwork; it has this times the entries of all projections", low=1)
    layers: int = setting(3, "layers of the hypernetwork before its last", low=1)
    server_rate: float = setting(0.5, "learning rate of the hypernetwork and the embeddings", low=0)

    @classmethod
    def tiny(cls) -> Self:
        return cls(architecture="smallest", embedding=4, hidden=5, layers=1)


@dataclass(frozen=True)
class FedTPState(FixedState):
    """weights: of all but the projections."""

    projections: Arrays = field(default_factory=dict)  # as the space starts them: their names and shapes
    hypernetwork: Arrays = field(default_factory=dict)
    typical: Arrays = field(default_factory=dict)  # the mean of the embeddings
    embeddings: Arrays = per_client()  # of clients that took part


@METHODS.add("fedtp", FedTPSettings, "FedTP: a hypernetwork at the server makes every client's attention projections")
@dataclass(frozen=True)
class FedTP(FixedNetwork[FedTPState]):
    settings: FedTPSettings

    state: ClassVar[type[Any]] = FedTPState
    spaces: ClassVar[tuple[str, ...]] = ("nasvit", "networks")  # those with attention

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> FedTPState:
        state, settings = super().start(seed), self.settings
        projections = {name: array for name, array in state.weights.items() if PROJECTION.search(name)}
        if not projections:
            what = f"{state.architecture} has no self-attention, whose projections fedtp makes"
            cure = (
                "Set fedtp.architecture=vit"
                if self.tools.space.name == "networks"
                else "Choose another fedtp.architecture, or space=nasvit"
            )
            raise InvalidConfig(f"{what}. {cure}", key="fedtp.architecture")
        hypernetwork = initial(rng(seed, "hypernetwork"), [settings.embedding, *[settings.hidden] * settings.layers], projections)
        return replace(
            state,
            weights=frozen({name: array for name, array in state.weights.items() if name not in projections}),
            projections=frozen(projections),
            hypernetwork=frozen(hypernetwork),
            typical=frozen({"embedding": self._first(seed, "typical")}),
        )

    def instruct(self, state: FedTPState, client: str, action: str) -> Instruction:
        """A client that takes part for the first time begins with a random embedding; at the end it has the mean of the others'."""
        usual = super().instruct(state, client, action)
        embedding = state.typical["embedding"] if action == FINISH and client not in state.embeddings else self._embedding(state, client)
        own = made(state.hypernetwork, embedding, {name: array.shape for name, array in state.projections.items()})
        return replace(usual, arrays={"weights": frozen({**state.weights, **own})})

    def absorb(self, state: FedTPState, reports: Sequence[Report]) -> FedTPState:
        after = super().absorb(state, [self._part(report, state.weights) for report in reports])
        total = sum(float(report.facts["examples"]) for report in reports)
        if not reports:
            return after
        wanted = [
            Wanted(
                self._embedding(state, report.client),
                self._part(report, state.projections).arrays["update"],
                float(report.facts["examples"]) / total,
            )
            for report in reports
        ]
        hypernetwork, embeddings = moved(state.hypernetwork, wanted, self.settings.server_rate)
        known = {**state.embeddings, **{report.client: own for report, own in zip(reports, embeddings, strict=True)}}
        typical = np.stack([known[client] for client in sorted(known)]).mean(0, dtype=np.float64).astype(np.float32)
        return replace(after, hypernetwork=frozen(hypernetwork), embeddings=frozen(known), typical=frozen({"embedding": typical}))

    def _embedding(self, state: FedTPState, client: str) -> Array:
        known = state.embeddings.get(client)
        return self._first(state.seed, client) if known is None else known

    def _first(self, seed: int, whose: str) -> Array:
        return rng(seed, "embedding", whose).normal(size=self.settings.embedding).astype(np.float32)

    @staticmethod
    def _part(report: Report, names: Arrays) -> Report:
        """A report of some of the weights."""
        return replace(report, arrays={"update": {name: report.arrays["update"][name] for name in names}})
