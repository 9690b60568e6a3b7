"""A network that makes weights, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.core.messages import Arrays
from fedloom.training.hypernetwork import Wanted, initial, made, moved

SHAPES = {"a": (2,), "b": (1, 1)}
NETWORK: Arrays = {  # one layer of two units on an embedding of one number
    "layer0.weight": np.array([[1.0], [-1.0]], np.float32),
    "layer0.bias": np.array([0.5, 0.0], np.float32),
    "out.weight": np.array([[1.0, 0.0], [2.0, 5.0], [0.0, 1.0]], np.float32),
    "out.bias": np.array([0.0, 0.0, 7.0], np.float32),
}


def test_weights_are_made_by_layers_with_rectifiers() -> None:
    """At 2 the layer gives (2.5, 0); at -1 it gives (0, 1)."""
    at_two, at_minus_one = (made(NETWORK, np.array([number], np.float32), SHAPES) for number in (2, -1))
    assert at_two["a"].tolist() == [2.5, 5.0] and at_two["b"].tolist() == [[7.0]]
    assert at_minus_one["a"].tolist() == [0.0, 5.0] and at_minus_one["b"].tolist() == [[8.0]]


def test_a_step_follows_the_derivative() -> None:
    """One client at 2 with the way (1, 0, -1), another at -1 with (0, 0, 2), a quarter and three quarters."""
    ways: list[Arrays] = [
        {"a": np.array([1.0, 0.0], np.float32), "b": np.array([[-1.0]], np.float32)},
        {"a": np.array([0.0, 0.0], np.float32), "b": np.array([[2.0]], np.float32)},
    ]
    wanted = [Wanted(np.array([2], np.float32), ways[0], 0.25), Wanted(np.array([-1], np.float32), ways[1], 0.75)]
    after, embeddings = moved(NETWORK, wanted, 0.1)
    changed = {name: (after[name] - array) / 0.1 for name, array in NETWORK.items()}
    assert changed["out.bias"] == pytest.approx([0.25, 0.0, 0.25 * -1 + 0.75 * 2], abs=1e-5)
    assert changed["out.weight"] == pytest.approx(np.array([[0.25 * 2.5, 0], [0, 0], [0.25 * -2.5, 0.75 * 2 * 1]]), abs=1e-5)
    # back through the rectifier: the first client through the first unit, out.weight' way = 1; the second through the second, 2
    assert changed["layer0.weight"] == pytest.approx(np.array([[0.25 * 1 * 2], [0.75 * 2 * -1]]), abs=1e-5)
    assert changed["layer0.bias"] == pytest.approx([0.25, 1.5], abs=1e-5)
    assert [float(own[0]) for own in embeddings] == pytest.approx([2 + 0.1 * 1, -1 + 0.1 * -2])
    assert NETWORK["out.bias"].tolist() == [0, 0, 7]


def test_first_outputs_are_near_the_targets_and_differ() -> None:
    targets = {"a": np.linspace(-1, 1, 30, dtype=np.float32).reshape(5, 6), "b": np.ones(4, np.float32)}
    network = initial(np.random.default_rng(0), [8, 6, 6], targets)
    assert {name: array.shape for name, array in network.items() if name.endswith("weight")} == {
        "layer0.weight": (6, 8),
        "layer1.weight": (6, 6),
        "out.weight": (34, 6),
    }
    draw, shapes = np.random.default_rng(1), {name: array.shape for name, array in targets.items()}
    one, other = (made(network, draw.normal(size=8).astype(np.float32), shapes) for _ in range(2))
    assert one["a"] == pytest.approx(targets["a"], abs=0.2) and one["b"].shape == (4,)
    assert not np.array_equal(one["a"], other["a"])
