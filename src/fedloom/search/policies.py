"""Search by a policy that rewards move (PerFedRLNAS, Yao and Li, AAAI 2024), within the budget of the space if it has one.

A policy is (3, genes, widest): logits, one row per gene, and Adam's two moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from fedloom.core.architecture import Architecture
from fedloom.maths import policy
from fedloom.spaces.base import SearchSpace

TRIES = 20  # draws before one over budget is reduced instead

Policy = npt.NDArray[np.float64]
Move = Callable[[Policy, Architecture, float, int], Policy]  # policy, what was tried, its reward, the number of the step -> policy


def uniform(space: SearchSpace) -> Policy:
    """One that knows nothing."""
    return np.stack([policy.uniform(space.sizes)] * 3)


def drawn(space: SearchSpace, logits: policy.Table, rng: np.random.Generator) -> Architecture:
    for _ in range(TRIES):
        chosen = policy.draw(logits, space.sizes, rng)
        if fitting(space, chosen) == space.canonical(chosen):
            break
    return fitting(space, chosen)


def most_likely(space: SearchSpace, logits: policy.Table) -> Architecture:
    return fitting(space, policy.most_likely(logits, space.sizes))


def fitting(space: SearchSpace, chosen: policy.Genes) -> Architecture:
    """Within the budget, if there is one."""
    return space.decode(space.encode(space.canonical(chosen)))


@np.errstate(over="ignore", invalid="ignore")  # whoever asks looks whether it is finite
def moved(space: SearchSpace, known: Policy, architecture: Architecture, reward: float, step: int, rate: float) -> Policy:
    """One step of policy gradient ascent (Eq. 7); a gene without effect in the architecture is not moved."""
    change, moments = policy.adam(known[1:], reward * gradient(space, known[0], architecture), step, rate)
    return np.concatenate([(known[0] + change)[None], moments])


def gradient(space: SearchSpace, logits: policy.Table, architecture: Architecture) -> policy.Table:
    """Of the log-probability of an architecture (Eq. 6); zero for genes that have no effect in it."""
    found = policy.log_gradient(logits, space.sizes, np.array(architecture.choices))
    found[~space.active(architecture.choices)] = 0.0
    return found


def tried_alone(
    space: SearchSpace, known: Policy, score: Callable[[Architecture], float], draws: Iterable[np.random.Generator], move: Move
) -> dict[Architecture, float]:
    """Scores of all that a policy tries which learns from them alone, one draw after the other, and of what is most likely in the end.

    A reward is counted from the mean of the scores so far, since there is nobody to compare with.
    """
    tried: dict[Architecture, float] = {}
    scores: list[float] = []
    for number, draw in enumerate(draws, 1):
        architecture = fitting(space, policy.draw(known[0], space.sizes, draw))
        if architecture not in tried:
            tried[architecture] = score(architecture)
        scores.append(tried[architecture])
        known = move(known, architecture, scores[-1] - float(np.mean(scores)), number)
    last = most_likely(space, known[0])
    return tried if last in tried else {**tried, last: score(last)}
