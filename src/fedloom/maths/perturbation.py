"""Which operations and edges of a mixture stay, by what their loss costs (Wang et al., *Rethinking architecture selection in
differentiable NAS*, ICLR 2021; SPIDER, Mushtaq et al., TMLR 2023, Algorithm 2).

Pure functions of a table, (kinds of cell, edges, operations), of what is still there, and of a score of such tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Kept = npt.NDArray[np.bool_]  # (kinds of cell, edges, operations) which operations are left
Rank = tuple[float, float]  # accuracy, minus the loss: the smaller, the worse
Score = Callable[[Kept], Rank]


def decided(kept: Kept) -> Kept:
    """(kinds, edges) whether one operation is left, or none."""
    alone: Kept = kept.sum(-1) <= 1
    return alone


def decide_edges(kept: Kept, due: int, score: Score, draw: np.random.Generator) -> tuple[Kept, int]:
    """Random open edges of each kind of cell are decided until ``due`` are: the operation that is missed most stays. Also how many
    mixtures were scored."""
    kept, tried = kept.copy(), 0
    for kind in range(len(kept)):
        open_edges = np.flatnonzero(~decided(kept)[kind])
        wanted = max(0, due - (kept.shape[1] - len(open_edges)))
        for edge in draw.permutation(open_edges)[:wanted]:
            present = np.flatnonzero(kept[kind, edge])
            ranks = [score(_without(kept, kind, edge, int(operation))) for operation in present]
            kept[kind, edge] = False
            kept[kind, edge, present[ranks.index(min(ranks))]] = True
            tried += len(present)
    return kept, tried


def prune_nodes(kept: Kept, targets: Sequence[int], due: int, score: Score, draw: np.random.Generator, inputs: int = 2) -> tuple[Kept, int]:
    """Random nodes of each kind of cell lose input edges until ``due`` have but so many: one edge after the other, each time the one
    without which accuracy is highest. targets: the node that each edge leads to. Also how many mixtures were scored."""
    kept, tried, target = kept.copy(), 0, np.array(targets)
    wide = [node for node in np.unique(target) if (target == node).sum() > inputs]
    for kind in range(len(kept)):

        def arriving(node: int, kind: int = kind) -> npt.NDArray[np.intp]:
            return np.flatnonzero((target == node) & kept[kind].any(-1))

        waiting = [node for node in wide if len(arriving(node)) > inputs]
        wanted = max(0, due - (len(wide) - len(waiting)))
        for node in draw.permutation(waiting)[:wanted]:
            while len(present := arriving(node)) > inputs:
                ranks = [score(_without(kept, kind, edge)) for edge in present]
                kept[kind, present[ranks.index(max(ranks))]] = False
                tried += len(present)
    return kept, tried


def _without(kept: Kept, kind: int, edge: int, operation: int | slice = slice(None)) -> Kept:
    """Without an operation of an edge, or the whole edge."""
    less = kept.copy()
    less[kind, edge, operation] = False
    return less
