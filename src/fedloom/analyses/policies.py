"""Do clients with unlike labels get unlike policies? (PerFedRLNAS, Yao and Li, AAAI 2024, Theorem 1, looked at in a run)

The theorem: equal distributions P(y|x) give equal expected policies p, and as D_KL(P1 || P2) grows, <p1, p2> falls. Here, for every
pair of clients that took part: the mean of both Kullback-Leibler divergences, of the shares of labels in their training data, which
stand for P; and the mean over genes of the inner product of their policies, the ones they have learned standing for expected ones.
Labels are read in this simulation only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedloom.analyses.newcomers import check_method
from fedloom.assemble import Reopened
from fedloom.core.errors import InvalidConfig
from fedloom.core.seeds import rng
from fedloom.maths import policy
from fedloom.maths.ranking import Matrix, above_diagonal, mantel

RELABELLINGS = 999
GROUPS = 5  # of pairs, by divergence
FEWEST = 4  # clients; with three there are six relabellings


@dataclass(frozen=True)
class Group:
    """Pairs of about the same divergence."""

    pairs: int
    divergence: float
    likeness: float


@dataclass(frozen=True)
class PolicyLikeness:
    clients: tuple[str, ...]
    divergences: tuple[float, ...]  # of pairs of clients, in the order (0, 1), (0, 2), …, (1, 2), …
    likenesses: tuple[float, ...]  # of the same pairs
    groups: tuple[Group, ...]
    correlation: float | None  # Spearman's, over pairs; None where all are alike
    p: float | None  # of one as low or lower when clients swap their policies at random (Mantel's test)


def policy_likeness(run: Reopened, seed: int = 0) -> PolicyLikeness:
    check_method(run)
    known, federation = run.state().policies, run.federation
    clients = [name for name in federation.names if name in known]
    if len(clients) < FEWEST:
        raise InvalidConfig(f"{run.store.folder} has policies of {len(clients)} clients; comparing pairs needs {FEWEST}. Run more rounds")
    sizes, classes = run.tools.space.sizes, run.tools.space.image.classes
    labels = [federation.data_of(name).train.labels.cpu().numpy() for name in clients]
    divergence = divergences([np.bincount(own, minlength=classes) for own in labels])
    alike = likenesses([policy.probabilities(known[name][0], sizes) for name in clients])
    correlation, p = mantel(divergence, alike, RELABELLINGS, rng(seed, "relabellings"))
    pairs = above_diagonal(divergence), above_diagonal(alike)
    divergent, likeness = (tuple(values.round(6).tolist()) for values in pairs)
    return PolicyLikeness(tuple(clients), divergent, likeness, grouped(*pairs), correlation, p)


def divergences(counts: Sequence[npt.NDArray[np.int64]]) -> Matrix:
    """(clients, clients) mean of D_KL both ways between label distributions, in nats; a count of one is added to every class, without
    which a class that one client lacks would make it infinite."""
    shares = np.stack([(own + 1) / (own + 1).sum() for own in counts])  # (clients, classes)
    one_way: Matrix = (shares[:, None] * (np.log(shares[:, None]) - np.log(shares[None]))).sum(-1)
    return (one_way + one_way.T) / 2


def likenesses(policies: Sequence[policy.Table]) -> Matrix:
    """(clients, clients) mean over genes of the inner product of two clients' probabilities."""
    stacked = np.stack(policies)  # (clients, genes, widest)
    return np.einsum("igc,jgc->ij", stacked, stacked) / stacked.shape[1]


def grouped(divergence: npt.NDArray[np.float64], likeness: npt.NDArray[np.float64]) -> tuple[Group, ...]:
    """Pairs in order of divergence, in groups of about the same number."""
    parts = [part for part in np.array_split(np.argsort(divergence, kind="stable"), GROUPS) if len(part)]
    return tuple(Group(len(part), float(divergence[part].mean()), float(likeness[part].mean())) for part in parts)
