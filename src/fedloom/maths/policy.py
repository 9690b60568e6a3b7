"""Policies over architectures: an independent softmax for every gene, moved by rewards (PerFedRLNAS, Yao and Li, AAAI 2024, Eq. 5-7).

Pure functions of arrays (genes, widest): one row per gene, padded where a gene has fewer choices than the widest. Padding has
probability 0 and gradient 0 and never moves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]  # (genes, widest)
Sizes = npt.NDArray[np.int64]  # (genes,) choices of each gene
Genes = npt.NDArray[np.int64]  # (genes,) one choice of each
Numbers = npt.NDArray[np.float64]

BETAS, EPSILON = (0.5, 0.999), 1e-8  # of Adam, as in the authors' code


def uniform(sizes: Sizes) -> Table:
    """Logits of a policy that knows nothing."""
    return np.zeros((len(sizes), int(sizes.max())))


def probabilities(logits: Table, sizes: Sizes) -> Table:
    """Rows sum to 1."""
    there = np.arange(logits.shape[1]) < sizes[:, None]
    raised = np.where(there, np.exp(logits - np.where(there, logits, -np.inf).max(1, keepdims=True)), 0.0)
    shares: Table = raised / raised.sum(1, keepdims=True)
    return shares


def draw(logits: Table, sizes: Sizes, rng: np.random.Generator) -> Genes:
    """One choice of every gene."""
    upto = probabilities(logits, sizes).cumsum(1)
    drawn: Genes = (rng.random((len(sizes), 1)) >= upto / upto[:, -1:]).sum(1)
    return drawn


def most_likely(logits: Table, sizes: Sizes) -> Genes:
    """The first of those that are equally likely."""
    likely: Genes = probabilities(logits, sizes).argmax(1)
    return likely


def log_gradient(logits: Table, sizes: Sizes, chosen: Genes) -> Table:
    """Of the log-probability of what was chosen, with respect to the logits: one-hot minus probabilities (Eq. 6)."""
    return np.eye(logits.shape[1])[chosen] - probabilities(logits, sizes)


def adam(moments: npt.NDArray[np.float64], gradient: Table, step: int, rate: float) -> tuple[Table, npt.NDArray[np.float64]]:
    """What Adam (Kingma and Ba, 2015) adds in order to climb, and the new moments (2, genes, widest); steps count from 1."""
    first, second = BETAS
    mean = first * moments[0] + (1 - first) * gradient
    square = second * moments[1] + (1 - second) * gradient**2
    change: Table = rate * (mean / (1 - first**step)) / (np.sqrt(square / (1 - second**step)) + EPSILON)
    return change, np.stack([mean, square])


def rewards(accuracies: Numbers, average: float, seconds: Numbers, per_second: float, memory: Numbers, per_memory: float) -> Numbers:
    """Eq. 8 and 9: better than the average client, not much slower than the fastest of this round, and with memory to spare.

    accuracies, seconds and memory, the share of it that was used: (participants,).
    """
    found: Numbers = accuracies - average - per_second * (seconds - seconds.min()) - per_memory * memory
    return found
