"""Policies over architectures, by hand-computed values (PerFedRLNAS, Eq. 5-8)."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.core.seeds import rng
from fedloom.maths import policy

SIZES = np.array([3, 2, 1])
LOGITS = np.log(np.array([[1.0, 2.0, 5.0], [1.0, 3.0, 1.0], [7.0, 1.0, 1.0]]))  # the last of the second and two of the third are padding


def test_a_policy_that_knows_nothing_is_uniform() -> None:
    logits = policy.uniform(SIZES)
    assert logits.shape == (3, 3) and not logits.any()
    expected = np.array([[1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0], [1, 0, 0]])
    assert policy.probabilities(logits, SIZES) == pytest.approx(expected)
    drawn = np.array([policy.draw(logits, SIZES, rng("uniform", number)) for number in range(3000)])
    shares = np.stack([np.bincount(column, minlength=3) / len(drawn) for column in drawn.T])
    assert np.abs(shares - expected).max() < 0.03


def test_probabilities_by_hand() -> None:
    found = policy.probabilities(LOGITS, SIZES)
    assert found == pytest.approx(np.array([[1 / 8, 2 / 8, 5 / 8], [1 / 4, 3 / 4, 0], [1, 0, 0]]))
    assert policy.probabilities(LOGITS + 1000, SIZES) == pytest.approx(found)  # nothing overflows
    assert policy.most_likely(LOGITS, SIZES).tolist() == [2, 1, 0]
    assert policy.most_likely(policy.uniform(SIZES), SIZES).tolist() == [0, 0, 0]


def test_draws_follow_the_probabilities() -> None:
    drawn = np.array([policy.draw(LOGITS, SIZES, rng("draws", number)) for number in range(4000)])
    assert np.bincount(drawn[:, 0]) / 4000 == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.03)
    assert np.bincount(drawn[:, 1]) / 4000 == pytest.approx([1 / 4, 3 / 4], abs=0.03)
    assert not drawn[:, 2].any()


def test_the_gradient_is_one_hot_minus_probabilities() -> None:
    gradient = policy.log_gradient(LOGITS, SIZES, np.array([2, 0, 0]))
    assert gradient == pytest.approx(np.array([[-1 / 8, -2 / 8, 3 / 8], [3 / 4, -3 / 4, 0], [0, 0, 0]]))
    assert gradient.sum(1) == pytest.approx(np.zeros(3))
    moved = LOGITS.copy()
    moved[0, 2] += 1e-6
    ratio = np.log(policy.probabilities(moved, SIZES)[0, 2] / policy.probabilities(LOGITS, SIZES)[0, 2])
    assert ratio / 1e-6 == pytest.approx(3 / 8, rel=1e-4)


def test_adam_by_hand() -> None:
    gradient, moments = np.array([[2.0, -0.5, 0.0]]), np.zeros((2, 1, 3))
    change, moments = policy.adam(moments, gradient, 1, 0.5)
    assert change == pytest.approx(np.array([[0.5, -0.5, 0.0]]), abs=1e-6)  # the first step has the size of the rate
    assert moments == pytest.approx(np.stack([0.5 * gradient, 0.001 * gradient**2]))
    change, moments = policy.adam(moments, np.array([[0.0, -0.5, 1.0]]), 2, 0.5)
    # mean 0.5 * 1 + 0 = 0.5, over 1 - 0.25; square 0.999 * 0.004, over 1 - 0.999^2 = 0.001999
    assert change[0, 0] == pytest.approx(0.5 * (0.5 / 0.75) / np.sqrt(0.999 * 0.004 / 0.001999), rel=1e-6)
    assert change[0, 1] == pytest.approx(-0.5, rel=1e-6)


def test_rewards_by_hand() -> None:
    given = np.array([0.8, 0.6]), 0.65, np.array([10.0, 30.0])
    used = np.array([0.25, 1.0])
    assert policy.rewards(*given, 0.001, used, 0.0) == pytest.approx([0.15, -0.07])
    assert policy.rewards(*given, 0.0, used, 0.0) == pytest.approx([0.15, -0.05])
    assert policy.rewards(*given, 0.001, used, 1.0) == pytest.approx([-0.1, -1.07])  # Eq. 9


def visited(reward: float, visits: int = 1) -> np.ndarray:
    """Probabilities after some rewards for the same choice."""
    logits, moments = policy.uniform(SIZES), np.zeros((2, 3, 3))
    for visit in range(visits):
        change, moments = policy.adam(moments, reward * policy.log_gradient(logits, SIZES, np.array([1, 0, 0])), visit + 1, 0.5)
        logits = logits + change
    return policy.probabilities(logits, SIZES)


def test_a_reward_makes_what_was_chosen_likelier() -> None:
    before = policy.probabilities(policy.uniform(SIZES), SIZES)
    assert visited(0.1)[0, 1] > before[0, 1] and visited(0.1)[1, 0] > before[1, 0]
    assert visited(-0.1)[0, 1] < before[0, 1] and visited(-0.1)[1, 0] < before[1, 0]
    assert visited(0.1, 10)[0, 1] > 0.9 and visited(0.1)[2].tolist() == [1, 0, 0]


@pytest.mark.parametrize(("seed", "rate", "right"), [(0, 0.1, 1.0), (1, 0.1, 1.0), (0, 0.5, 0.9), (1, 0.5, 0.9)])
def test_policies_find_the_best_of_a_known_reward(seed: int, rate: float, right: float) -> None:
    """Accuracy is the share of genes chosen right. The paper's rate, 0.5, decides so early that some genes end wrong."""
    sizes, best = np.array([3, 4, 2, 5, 3]), np.array([2, 0, 1, 3, 1])
    clients = 4
    tables = np.stack([np.stack([policy.uniform(sizes)] * 3)] * clients)
    latest = np.zeros(clients)
    for visit in range(1, 301):
        chosen = [policy.draw(table[0], sizes, rng(seed, visit, client)) for client, table in enumerate(tables)]
        latest[:] = [(one == best).mean() for one in chosen]
        for client, reward in enumerate(policy.rewards(latest, latest.mean(), *2 * (np.zeros(clients), 0.0))):
            gradient = reward * policy.log_gradient(tables[client, 0], sizes, chosen[client])
            change, tables[client, 1:] = policy.adam(tables[client, 1:], gradient, visit, rate)
            tables[client, 0] += change
    found = [(policy.most_likely(table[0], sizes) == best).mean() for table in tables]
    assert np.mean(found) >= right
