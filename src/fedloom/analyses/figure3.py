"""Are generated candidates better than those of crossover and mutation? (PerFedSDE-NAS, Fig. 3 and Sec. 4.5)

At the end of a run every client has a population, and the supernet is trained. From there, for one client:

* diffusion: 500 architectures of the generator, of which a surrogate of the population's scores picks as many as the population has;
* evolution: as many architectures by crossover and mutation, two parents giving two children;
* evolution_rbf: 500 by crossover and mutation, picked like the generator's. Not in the paper: it tells the generator from the surrogate.

No candidate is in the population or comes twice. All are scored with the same supernet, on the client's validation data and on its test
data. The paper did the latter; the surrogate sees only what the run itself selects by. Nothing of another client is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedloom.assemble import Reopened
from fedloom.core.architecture import Architecture
from fedloom.core.errors import DamagedRun, InvalidConfig
from fedloom.core.registry import did_you_mean
from fedloom.core.seeds import rng
from fedloom.generator.generator import AnyGenerator
from fedloom.search.base import choose, predicted
from fedloom.search.draws import children, new_ones
from fedloom.search.rbf import fit_rbf
from fedloom.spaces.base import SearchSpace
from fedloom.training.scoring import Scored

CANDIDATES = 500  # what the surrogate picks from, as in the paper
DIFFUSION, EVOLUTION, EVOLUTION_RBF = "diffusion", "evolution", "evolution_rbf"
DATA = ("test", "validation")


@dataclass(frozen=True)
class Comparison:
    """One client's figure. Accuracies are shares, in ascending order: strategy -> data -> accuracies."""

    client: str
    population: int
    candidates: int  # made for the surrogate to pick from
    accuracies: Mapping[str, Mapping[str, tuple[float, ...]]]

    def mean(self, strategy: str, data: str) -> float:
        return float(np.mean(self.accuracies[strategy][data]))

    def best(self, strategy: str, data: str) -> float:
        return self.accuracies[strategy][data][-1]

    def difference(self, data: str, other: str = EVOLUTION) -> float:
        """How much better candidates by diffusion are in the mean."""
        return self.mean(DIFFUSION, data) - self.mean(other, data)

    def to_table(self) -> dict[str, Any]:
        """For JSON."""
        strategies = {
            name: {
                data: {"mean": self.mean(name, data), "best": self.best(name, data), "accuracies": list(accuracies)}
                for data, accuracies in by_data.items()
            }
            for name, by_data in self.accuracies.items()
        }
        differences = {data: {other: self.difference(data, other) for other in (EVOLUTION, EVOLUTION_RBF)} for data in DATA}
        numbers = {key: value for key, value in asdict(self).items() if key != "accuracies"}
        return {**numbers, "strategies": strategies, "diffusion_better_by": differences}


def check_run(run: Reopened, clients: Sequence[str]) -> None:
    """Refuse a run without populations, one that is not over, and clients it has not got."""
    folder, names = run.store.folder, run.federation.names
    if run.settings.method != "perfedsde":
        raise InvalidConfig(f"{folder} is a run of {run.settings.method}, which keeps no populations. Give a run with method=perfedsde")
    if not run.finished:
        raise InvalidConfig(f"{folder} is not finished. Finish it with `fedloom resume {folder}`")
    if not clients:
        raise InvalidConfig(f"Say whose candidates: --client NAME, once or more. The names run from {names[0]} to {names[-1]}")
    for client in clients:
        if client not in names:
            raise InvalidConfig(f"{folder} has no client {client!r}. {did_you_mean(client, names)}", client=client)


def compare(run: Reopened, client: str, source: AnyGenerator, candidates: int = CANDIDATES) -> Comparison:
    """The figure of one client of a finished run of perfedsde."""
    tools, space, data = run.tools, run.tools.space, run.federation.data_of(client)
    weights = tools.tensors(dict(run.state().weights))
    members = _population(run, client)
    population = tools.scorer.score_subnets(weights, members, tools.selecting(data), data.train)
    settings, seed, count = run.settings.components["perfedsde"], run.settings.seed, len(members)

    def offspring(wanted: int, name: str) -> list[Architecture]:
        source = children(space, members, settings.mutation, rng(seed, client, "figure 3", name), twins=True)
        return new_ones(space, source, wanted, set(members))

    task = source.task(data.train.images, data.train.labels) if settings.guidance else None
    strength = None if settings.guidance < 0 else settings.guidance  # the generator's own
    generated = source.draw(candidates, rng(seed, client, "figure 3", DIFFUSION), task, strength)
    strategies = {
        DIFFUSION: picked(space, [one for one in generated if space.fits(one)], population, count),
        EVOLUTION: offspring(count, EVOLUTION),
        EVOLUTION_RBF: picked(space, offspring(candidates, EVOLUTION_RBF), population, count),
    }
    for name, architectures in strategies.items():
        if not architectures:
            raise InvalidConfig(f"{client}: {name} found no architecture that is not in the population already", client=client)

    def accuracies(architectures: Sequence[Architecture], which: str) -> tuple[float, ...]:
        scored = tools.scorer.score_subnets(weights, architectures, getattr(data, which), data.train)
        return tuple(sorted(one.score.accuracy for one in scored))

    figures = {name: {which: accuracies(architectures, which) for which in DATA} for name, architectures in strategies.items()}
    return Comparison(client, count, candidates, figures)


def picked(space: SearchSpace, candidates: Sequence[Architecture], population: Sequence[Scored], count: int) -> list[Architecture]:
    """The best by the surrogate of the population's scores."""
    members, scores = [member.architecture for member in population], [member.score.accuracy for member in population]
    return choose(candidates, members, predicted(space, fit_rbf, members, scores, candidates), count)


# -- what the folder holds ---------------------------------------------------------------------
def _population(run: Reopened, client: str) -> list[Architecture]:
    rows = run.store.load_memory(client, run.settings.rounds + 1).arrays.get("population", ())
    if not len(rows):
        raise DamagedRun(f"{run.store.client_folder(client)} holds no population; the run folder is incomplete", client=client)
    return [Architecture(run.tools.space.name, tuple(int(choice) for choice in row)) for row in rows]
