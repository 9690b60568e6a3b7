"""A server's momentum and its mean of the last weights, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.maths.server_steps import running_mean, with_momentum


def of(*values: float) -> dict[str, np.ndarray]:
    return {"w": np.array(values, np.float32)}


def test_momentum_by_hand() -> None:
    """v: 1, then 0.5 · 1 + 2 = 2.5, then 0.5 · 2.5 - 1 = 0.25."""
    velocity: dict[str, np.ndarray] = {}
    for change, expected in ((1.0, 1.0), (2.0, 2.5), (-1.0, 0.25)):
        step, velocity = with_momentum(of(change), velocity, 0.5)
        assert step["w"].tolist() == velocity["w"].tolist() == [expected] and step["w"].dtype == np.float32


def test_an_entry_that_nobody_trained_does_not_move_and_its_velocity_waits() -> None:
    _, velocity = with_momentum(of(4.0, 4.0, 0.0), {}, 0.5)
    step, waiting = with_momentum(of(0.0, 1.0, 0.0), velocity, 0.5)
    assert step["w"].tolist() == [0.0, 3.0, 0.0] and waiting["w"].tolist() == [4.0, 3.0, 0.0]
    step, _ = with_momentum(of(1.0, 0.0, 2.0), waiting, 0.5)
    assert step["w"].tolist() == [3.0, 0.0, 2.0]


def test_what_comes_in_stays_as_it_is() -> None:
    change, velocity = of(1.0, 0.0), of(2.0, 2.0)
    with_momentum(change, velocity, 0.5)
    assert change["w"].tolist() == [1.0, 0.0] and velocity["w"].tolist() == [2.0, 2.0]


def test_a_running_mean_is_the_mean() -> None:
    weights = [of(*row) for row in ((1.0, -3.0), (2.0, 0.5), (6.0, 1.0))]
    mean: dict[str, np.ndarray] = {}
    for number, own in enumerate(weights, 1):
        mean = running_mean(mean, own, number)
    assert mean["w"] == pytest.approx([3.0, -0.5]) and mean["w"].dtype == np.float32
