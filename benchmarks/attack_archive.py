"""How a server reads a client's archive from the entries of the supernet that it trained: a part of benchmarks/attacks.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression

from fedloom.core.architecture import Architecture
from fedloom.core.messages import Report

POOL = 300  # architectures that the server draws
ARCHIVES = 800  # that it makes of them
FEWEST, MOST = 3, 9  # architectures that a client trains in a participation: three iterations, an archive of three in each


@dataclass(frozen=True)
class ArchiveReader:
    """names: of the arrays, in order; group: (entries,) which entries architectures train alike; pairs: all choices of all genes."""

    names: list[str]
    group: np.ndarray
    sizes: np.ndarray  # (groups,) entries
    pairs: list[tuple[int, int]]
    space: Any
    prior: np.ndarray  # (pairs,) how often a choice is in an archive
    alone: list[LogisticRegression | None]  # from the groups that one client trained
    among: list[LogisticRegression | None]  # from how many clients of a round trained each group

    @classmethod
    def of(cls, method: Any, draw: np.random.Generator, clients: int) -> ArchiveReader:
        """clients: of a round."""
        space, supernet = method.tools.space, method.tools.supernet
        pool = [space.sample(draw) for _ in range(POOL)]
        names = list(supernet.shapes)
        used = np.stack([_entries(supernet, names, architecture) for architecture in pool])  # (pool, entries) bool
        patterns, group = np.unique(np.packbits(used, axis=0).T, axis=0, return_inverse=True)
        group = group.reshape(-1)
        first = np.zeros(len(patterns), int)
        first[group[::-1]] = np.arange(len(group))[::-1]  # an entry of each group
        of_pool = used[:, first]  # (pool, groups)
        pairs = [(gene, choice) for gene, size in enumerate(space.sizes) for choice in range(size)]
        held = np.stack([_choices(space, pairs, [architecture]) for architecture in pool])  # (pool, pairs)
        archives = [draw.choice(POOL, int(draw.integers(FEWEST, MOST + 1)), replace=False) for _ in range(ARCHIVES)]
        trained = np.stack([of_pool[archive].any(0) for archive in archives])
        truth = np.stack([held[archive].any(0) for archive in archives])
        rounds = [[number, *draw.choice(ARCHIVES, clients - 1).tolist()] for number in range(ARCHIVES)]
        counted = np.stack([trained[members].sum(0) for members in rounds])
        models = [[_fit(features, truth[:, pair]) for pair in range(len(pairs))] for features in (trained, counted / clients)]
        return cls(names, group, np.bincount(group), pairs, space, truth.mean(0), *models)

    # -- what is seen ------------------------------------------------------------------------
    def mean_of_groups(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """(groups,) of arrays that are as large as the supernet's."""
        flat = np.concatenate([np.asarray(arrays[name], float).ravel() for name in self.names])
        return np.bincount(self.group, flat) / self.sizes

    def trained(self, report: Report, deviation: float) -> np.ndarray:
        """(groups,) which ones a client trained: by what it says, or by its update. deviation: of the noise in it."""
        update, coverage = report.arrays["update"], report.arrays.get("coverage")
        if coverage is not None:
            return self.mean_of_groups({name: np.broadcast_to(coverage[name] > 0, array.shape) for name, array in update.items()}) > 0.5
        return self.energy(update, deviation) if deviation else self.mean_of_groups({n: a != 0 for n, a in update.items()}) > 0

    def energy(self, update: Mapping[str, np.ndarray], deviation: float) -> np.ndarray:
        """(groups,) whether there is more than noise: the mean square exceeds the noise's by two standard errors."""
        square = self.mean_of_groups({name: np.square(array, dtype=np.float64) for name, array in update.items()})
        return (square / deviation**2 - 1) / np.sqrt(2 / self.sizes) > 2

    # -- what is made of it --------------------------------------------------------------------
    def guess(self, trained: np.ndarray) -> np.ndarray:
        """(pairs,) whether a choice is in the archive: where that is more likely than it is for any archive."""
        return self._likely(self.alone, trained)

    def guess_one_of(self, counts: np.ndarray, clients: int) -> np.ndarray:
        """The same for any client of a round of which only sums are known."""
        return self._likely(self.among, counts / clients)

    def _likely(self, models: list[LogisticRegression | None], seen: np.ndarray) -> np.ndarray:
        chances = [prior if m is None else m.predict_proba(seen[None])[0, 1] for m, prior in zip(models, self.prior, strict=True)]
        return np.array(chances) > self.prior

    def score(self, guess: np.ndarray, trained: Counter[Architecture]) -> float:
        """Balanced accuracy over choices that are in some archives and not in others."""
        truth, open_ = _choices(self.space, self.pairs, list(trained)), (self.prior > 0.02) & (self.prior < 0.98)
        truth, guess = truth[open_], guess[open_]
        return float((guess[truth].mean() + (~guess[~truth]).mean()) / 2)


def _entries(supernet: Any, names: list[str], architecture: Architecture) -> np.ndarray:
    """(entries,) which of all entries an architecture trains."""
    own = supernet.coverage({architecture: 1})
    return np.concatenate([np.broadcast_to(own[name].numpy() > 0, supernet.shapes[name]).ravel() for name in names])


def _choices(space: Any, pairs: list[tuple[int, int]], archive: list[Architecture]) -> np.ndarray:
    """(pairs,) choices that have an effect in at least one architecture."""
    choices = np.array([architecture.choices for architecture in archive])
    active = space.active_many(choices)
    return np.array([bool(((choices[:, gene] == choice) & active[:, gene]).any()) for gene, choice in pairs])


def _fit(seen: np.ndarray, there: np.ndarray) -> LogisticRegression | None:
    """Nothing where all archives are alike."""
    return LogisticRegression(C=1.0, solver="liblinear").fit(seen, there) if 0 < there.mean() < 1 else None
