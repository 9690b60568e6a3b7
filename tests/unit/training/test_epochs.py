"""A supernet in training, epoch by epoch: what it comes to, and when momentum begins anew."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.client_site import ClientData, ClientSite
from fedloom.core.errors import ClientFailed
from fedloom.core.seeds import rng
from fedloom.spaces.base import ImageShape
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from fedloom.supernets.mobilenetv3 import MobileNetV3Supernet
from fedloom.supernets.reach import Reach
from fedloom.testing.executions import PIXELS, SLICED, examples_of
from fedloom.testing.nets import weights_of
from fedloom.training.epochs import Epochs
from fedloom.training.local import one_of
from fedloom.training.tools import Tools

SUPERNET = MobileNetV3Supernet(MobileNetV3(MobileNetV3Settings.tiny(), ImageShape(1, 8, 3)))
TOOLS = Tools(SUPERNET.space, SUPERNET, SLICED, PIXELS, 3, 3, "clean", torch.device("cpu"))
SMALL, LARGE = (SUPERNET.space.named[name] for name in ("smallest", "largest"))


def epochs_of(tools: Tools = TOOLS, **more: Any) -> Epochs:
    train = examples_of(SUPERNET, 16)  # two batches
    return Epochs(tools, ClientSite("client-000", ClientData(train, train, train)), weights_of(SUPERNET), **more)


def test_steps_multiply_accumulates_and_changes_add_up() -> None:
    course = epochs_of()
    assert course.weights is course.received
    for architecture in (SMALL, LARGE, LARGE):
        course.train(one_of([architecture]), 0.01, rng("epochs"))
    assert course.steps == {SMALL: 2, LARGE: 4}
    assert course.macs == 16 * sum(SUPERNET.space.cost(one).macs for one in (SMALL, LARGE, LARGE))
    assert set(course.site.clock.seconds) == {"train"}
    for name, change in course.update().items():
        assert np.array_equal(change, (course.weights[name] - course.received[name]).numpy()), name


@pytest.mark.parametrize("restarts", [True, False])
def test_with_restarts_epochs_are_trainings_of_their_own(restarts: bool) -> None:
    course, draw, (one, other) = epochs_of(restarts=restarts), one_of([LARGE]), (rng("epoch", number) for number in range(2))
    course.train(draw, 0.01, one)
    halfway, train = course.weights, course.site.data.train
    course.train(draw, 0.02, other)
    alone = TOOLS.trainer.train_supernet(halfway, draw, train, [0.02], rng("epoch", 1)).weights
    assert all(torch.equal(tensor, alone[name]) for name, tensor in course.weights.items()) == restarts


def test_coverage_counts_steps_or_says_whether_there_were_any() -> None:
    course = epochs_of()
    for architecture in (SMALL, LARGE):
        course.train(one_of([architecture]), 0.01, rng("epochs"))
    steps, trained = course.coverage(effort=True), course.coverage(effort=False)
    expected = SUPERNET.coverage({SMALL: 2, LARGE: 2})
    assert {array.dtype for array in trained.values()} == {np.dtype(bool)}
    for name, counts in expected.items():
        assert np.array_equal(steps[name], counts.numpy()) and np.array_equal(trained[name], counts.numpy() > 0), name
    assert max(array.max() for array in steps.values()) == 4


def test_peak_memory_is_that_of_the_largest_step() -> None:
    course = epochs_of()
    for architecture in (LARGE, SMALL):
        course.train(one_of([architecture]), 0.01, rng("epochs"))
    stored = sum(tensor.numel() for tensor in course.received.values())
    assert course.peak_memory_mb == TOOLS.training_memory_mb(LARGE, stored, 16) > TOOLS.training_memory_mb(SMALL, stored, 16)


def test_what_a_client_has_not_received_is_not_stored_and_must_not_be_trained() -> None:
    reach = Reach(SUPERNET.regions(SMALL), SUPERNET.shapes)
    tier: Any = SimpleNamespace(reach=reach)
    course = epochs_of(replace(TOOLS, tier=tier))
    course.train(one_of([SMALL]), 0.01, rng("epochs"))
    assert course.peak_memory_mb == TOOLS.training_memory_mb(SMALL, reach.entries, 16)
    assert set(course.update()) == set(SUPERNET.shapes)
    course.train(one_of([LARGE]), 0.01, rng("epochs"))
    with pytest.raises(ClientFailed, match="outside the part of the supernet that its client received"):
        course.update()
