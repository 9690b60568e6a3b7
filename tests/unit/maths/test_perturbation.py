"""Deciding edges and pruning nodes, on tables that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.core.seeds import rng
from fedloom.maths.perturbation import Kept, Rank, decide_edges, decided, prune_nodes

# Two inputs and three nodes: edges 0-1 lead to node 2, edges 2-4 to node 3, edges 5-8 to node 4.
TARGETS = (2, 2, 3, 3, 3, 4, 4, 4, 4)


def one_each(kinds: int = 2) -> Kept:
    kept = np.zeros((kinds, len(TARGETS), 3), bool)
    kept[..., 1] = True
    return kept


def test_equal_accuracies_are_told_apart_by_loss() -> None:
    """Without the first operation the loss is least, so the second one is missed most."""
    kept, tried = decide_edges(np.ones((2, 3, 2), bool), 3, lambda kept: (0.5, float(kept[..., 1].sum())), rng(0))
    assert kept[..., 1].all() and not kept[..., 0].any() and tried == 12


def test_edges_are_decided_up_to_a_number_and_no_further() -> None:
    kept, tried = decide_edges(np.ones((2, 9, 3), bool), 4, lambda kept: (0.0, 0.0), rng(0))
    assert decided(kept).sum(1).tolist() == [4, 4] and tried == 2 * 4 * 3
    again, tried = decide_edges(kept, 4, lambda kept: (0.0, 0.0), rng(1))
    assert np.array_equal(again, kept) and tried == 0


def test_the_inputs_that_are_missed_least_go() -> None:
    """What an edge is worth: 0.1, 0.2, … in order; the two most useful inputs of each node stay."""
    worth = np.array([0.1, 0.2, 0.3, 0.1, 0.2, 0.2, 0.4, 0.3, 0.1])

    def score(kept: Kept) -> Rank:
        return float((kept.any(-1) * worth).sum()), 0.0

    kept, tried = prune_nodes(one_each(), TARGETS, 2, score, rng(0))
    assert kept.any(-1)[0].tolist() == kept.any(-1)[1].tolist() == [True, True, True, False, True, False, True, True, False]
    assert tried == 2 * (3 + 4 + 3)  # of three inputs one goes, of four two
    assert kept[kept.any(-1)].sum(-1).tolist() == [1] * 12 and one_each().all((0, 1))[1]


@pytest.mark.parametrize("due", [0, 1, 2, 9])
def test_only_nodes_with_more_than_two_inputs_are_pruned_and_as_many_as_are_due(due: int) -> None:
    kept, _ = prune_nodes(one_each(), TARGETS, due, lambda kept: (0.0, 0.0), rng(3))
    for kind in kept:
        inputs = [int(kind[np.array(TARGETS) == node].any(-1).sum()) for node in (2, 3, 4)]
        assert inputs[0] == 2 and [inputs[1] < 3, inputs[2] < 4].count(True) == min(due, 2)
        assert {inputs[1], inputs[2]} <= {2, 3, 4}
    again, tried = prune_nodes(kept, TARGETS, due, lambda kept: (0.0, 0.0), rng(4))
    assert np.array_equal(again, kept) and tried == 0
