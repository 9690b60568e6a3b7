"""FedProx: the proximal term, by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedloom.config import Settings
from fedloom.core.seeds import rng
from fedloom.testing import Played

TWO_STEPS = ("training.batch=100", "training.epochs=2", "training.schedule=constant", "training.rate=0.1")  # an epoch is one batch


def test_the_second_step_is_pulled_back(tiny: Callable[..., Settings]) -> None:
    """In the first step the client is where it started. In the second it is pulled by mu times the way it has gone."""
    plainly, held = Played(tiny("method=fedavg", *TWO_STEPS)), Played(tiny("method=fedprox", "fedprox.pull=0.5", *TWO_STEPS))
    for one, other in zip(plainly.round(), held.round(), strict=True):
        client = one.report.client
        (instruction,) = (given for given in held.instructions if given.client == client)
        received, architecture = instruction.arrays["weights"], instruction.facts["architecture"]
        tools, site = held.tools, held.site(client)
        network = tools.space.find(str(architecture), rng(0))
        first = tools.trainer.train_network(tools.tensors(received), network, site.data.train, [0.1], rng(instruction.seed, "train"))
        gone = tools.update(first.weights, tools.tensors(received))
        for name, way in gone.items():
            difference = other.report.arrays["update"][name] - one.report.arrays["update"][name]
            assert difference == pytest.approx(-0.1 * 0.5 * way, abs=2e-6), name
        assert max(np.abs(way).max() for way in gone.values()) > 1e-3


def test_without_a_pull_it_is_fedavg(tiny: Callable[..., Settings]) -> None:
    plainly, free = Played(tiny("method=fedavg", *TWO_STEPS)), Played(tiny("method=fedprox", "fedprox.pull=0", *TWO_STEPS))
    for one, other in zip(plainly.round(), free.round(), strict=True):
        assert one.report.facts == other.report.facts and one.diary == other.diary
        assert all(np.array_equal(array, other.report.arrays["update"][name]) for name, array in one.report.arrays["update"].items())
