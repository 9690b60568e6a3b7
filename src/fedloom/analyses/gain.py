"""The personalisation gain of a finished run (SPIDER, Mushtaq et al., TMLR 2023, Eq. 6 and Fig. 3).

Every client's final network is fine-tuned at every client, 30 epochs in the paper, and the best epoch counts, the one before the first
included: by validation accuracy under protocol clean, where p_ij is the test accuracy of that epoch; by test accuracy under protocol
paper, as there. The paper does not say which weights this starts from. Here it is ``personal``, the weights that client j ended with,
which favours p_ii: they were trained on client i's data already. ``shared`` starts from client j's part of the shared supernet as it was
after the last round, so that the architecture alone makes the difference.

Nothing of this leaves a client in a federation: only a simulation can try one client's network on another's data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.analyses.resumed import is_share, known_of
from fedloom.assemble import Reopened
from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.seeds import rng
from fedloom.files import read_arrays, write_file
from fedloom.maths.gain import personal_gains
from fedloom.models.personal import load_model
from fedloom.supernets.base import Weights
from fedloom.training.local import NetworkJob
from fedloom.training.recipe import falling

SCHEMA, EPOCHS, STARTS = "fedloom.gain/1", 30, ("personal", "shared")
Progress = Callable[[int, int, str, str, float], None]  # done, of all, client i, client j, p_ij


@dataclass(frozen=True)
class Network:
    """What a client ended with."""

    architecture: Architecture
    weights: Weights


@dataclass(frozen=True)
class Gain:
    """A matrix of accuracies (rows: whose data, columns: whose architecture), whole or in the making, and what it was made with."""

    run: Reopened
    clients: tuple[str, ...]
    epochs: int
    rate: float
    start: str

    @cached_property
    def networks(self) -> dict[str, Network]:
        found = {client: _network(self.run, client) for client in self.clients}
        if len({network.architecture for network in found.values()}) == 1:
            told = f"All {len(found)} clients of {self.run.store.folder} have the same architecture ({self.run.settings.method})"
            raise InvalidConfig(f"{told}: there is nothing personal to gain. Give a run of a method that searches for every client")
        if self.start == "personal":
            return found
        shared = self._shared()
        plain = self.run.tools.supernet.plain
        return {client: Network(one.architecture, plain(shared, one.architecture)) for client, one in found.items()}

    def _shared(self) -> Weights:
        weights = self.run.method.supernet_of(self.run.state())
        if not weights:
            raise InvalidConfig(f"{self.run.settings.method} has no shared supernet at its server. Use --start personal")
        return self.run.tools.tensors(weights)

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "method": self.run.settings.method,
            **self.run.facts,
            "start": self.start,
            "epochs": self.epochs,
            "rate": self.rate,
            "clients": list(self.clients),
            "architectures": [self.networks[client].architecture.id for client in self.clients],
        }

    def to_table(self, accuracies: Mapping[tuple[str, str], float]) -> dict[str, Any]:
        """For JSON; gains are there when the matrix is whole."""
        matrix = [[accuracies.get((i, j)) for j in self.clients] for i in self.clients]
        table = {**self.facts, "accuracies": matrix}
        if len(accuracies) < len(self.clients) ** 2:
            return table
        gains = personal_gains(np.array(matrix, float))
        return {**table, "gains": gains.tolist(), "gain": float(gains.mean())}

    def measure(self, file: Path, progress: Progress) -> dict[str, Any]:
        """The whole table; every accuracy is written to the file as soon as it is known, and one that is there is not measured again."""
        known = known_of(file, self.facts, self._cells)
        pairs = [(i, j) for i in self.clients for j in self.clients]
        for i, j in pairs:
            if (i, j) not in known:
                known[i, j] = self._tuned(i, self.networks[j])
                write_file(file, (json.dumps(self.to_table(known), indent=2) + "\n").encode())
                progress(len(known), len(pairs), i, j, known[i, j])
        return self.to_table(known)

    def _cells(self, table: Mapping[str, Any]) -> dict[tuple[str, str], float]:
        rows = dict(zip(self.clients, table["accuracies"], strict=True))
        cells = {(i, j): value for i, row in rows.items() for j, value in zip(self.clients, row, strict=True) if value is not None}
        if not all(map(is_share, cells.values())):
            raise ValueError("an accuracy is no share")
        return cells

    def _tuned(self, client: str, network: Network) -> float:
        """p_ij: the best epoch's accuracy. The order of images is the client's, the same for all architectures."""
        tools, data = self.run.tools, self.run.federation.data_of(client)
        best: list[tuple[tuple[float, float], float]] = []  # rank on the selecting data, test accuracy

        def look(weights: Weights) -> None:
            statistics = tools.scorer.calibrate(weights, network.architecture, data.train)
            rank = tools.scorer.score_network(weights, network.architecture, statistics, tools.selecting(data)).rank
            if not best or rank < best[0][0]:
                best[:] = [(rank, tools.scorer.score_network(weights, network.architecture, statistics, data.test).accuracy)]

        look(network.weights)
        rates = [falling(self.rate, epoch / self.epochs, "cosine") for epoch in range(self.epochs)]
        draw = rng(self.run.settings.seed, "gain", client)
        tools.trainer.watch_network(NetworkJob(network.weights, network.architecture, data.train, rates, draw), look)
        return best[0][1]


def gain_of(run: Reopened, clients: int, epochs: int, rate: float | None, start: str) -> Gain:
    """Refuses what has no personal networks. clients: the first so many, all if 0."""
    folder, names = run.store.folder, run.federation.names
    if not run.finished:
        raise InvalidConfig(f"{folder} is not finished. Finish it with `fedloom resume {folder}`")
    if start not in STARTS:
        raise InvalidConfig(f"--start must be {' or '.join(STARTS)}, got {start!r}")
    chosen = tuple(names[: clients or None])
    if len(chosen) < 2 or clients > len(names):
        raise InvalidConfig(f"The gain compares clients: {folder} has {len(names)}, and 2 or more of them are needed", clients=clients)
    usual = run.settings.training.finetune_rates
    return Gain(run, chosen, epochs, (usual[0] if usual else run.settings.training.rate) if rate is None else rate, start)


def _network(run: Reopened, client: str) -> Network:
    path = run.store.model_path(client)
    _, facts = load_model(path)  # refuses what is missing, damaged or does not fit
    arrays, _ = read_arrays(path)
    measured = ("running_mean", "running_var")  # statistics, which are measured anew
    weights = run.tools.tensors({name: array for name, array in arrays.items() if not name.endswith(measured)})
    architecture = Architecture.parse(facts["architecture"])
    run.tools.supernet.space.check(architecture)
    return Network(architecture, weights)
