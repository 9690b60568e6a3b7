"""FedBABU: the head stays as it was drawn until the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom.config import Settings
from fedloom.core.messages import frozen
from fedloom.testing import Played

HEAD = ["classifier.bias", "classifier.weight"]
TUNED = ("training.choice=evidence", "training.evidence=1e9")  # whatever the validation images say
MOVED = {"whole": (True, True), "head": (True, False), "body": (False, True)}  # the head, the body


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], names: list[str]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in names)


@pytest.mark.parametrize("tune", MOVED)
def test_the_head_is_random_in_all_rounds_and_tuned_at_the_end(tune: str, tiny: Callable[..., Settings]) -> None:
    played = Played(tiny("method=fedbabu", f"fedbabu.tune={tune}", *TUNED))
    start, body = played.state, sorted(played.state.weights)
    assert sorted(start.head) == HEAD and not set(body) & set(HEAD)
    initial = played.tools.initial_network(start.seed, played.tools.space.named["smallest"])
    assert same(start.weights, initial, body) and same(start.head, initial, HEAD[:1])
    weight = start.head["classifier.weight"]
    bound = weight.shape[1] ** -0.5  # as the framework draws a linear layer, whatever the space does
    assert 0.9 * bound < np.abs(weight).max() <= bound and weight.std() == pytest.approx(bound / 3**0.5, rel=0.1)
    for _ in range(2):
        for answer in played.round():
            assert sorted(answer.report.arrays["update"]) == body and not answer.memory.arrays
    assert all(same(instruction.arrays["head"], start.head, HEAD) for instruction in played.instructions)
    assert not same(played.state.weights, start.weights, body)
    model = played.farewell(played.federation.names[0]).model
    assert model is not None
    assert (not same(model.arrays, start.head, HEAD), not same(model.arrays, played.state.weights, body)) == MOVED[tune]


def test_a_round_moves_the_body_as_training_under_this_head_does(tiny: Callable[..., Settings]) -> None:
    """One step on all images, by hand: the gradient of fedavg on the same network, without that of its head."""
    one_step = ("training.batch=100", "training.rate=0.1")
    babu, plainly = Played(tiny("method=fedbabu", *one_step)), Played(tiny("method=fedavg", *one_step))
    plainly.state = replace(plainly.state, weights=frozen({**plainly.state.weights, **babu.state.head}))
    for own, whole in zip(babu.round(), plainly.round(), strict=True):
        update = whole.report.arrays["update"]
        assert set(update) - set(own.report.arrays["update"]) == set(HEAD) and np.abs(update["classifier.bias"]).max() > 0
        assert all(part == pytest.approx(update[name], abs=1e-6) for name, part in own.report.arrays["update"].items())


def test_a_classifier_that_the_run_was_given_is_not_drawn_anew(tiny: Callable[..., Settings]) -> None:
    tools = Played(tiny("method=fedbabu")).method.tools
    weights = tools.initial_supernet(0)
    (head,) = (name for name, array in weights.items() if tools.supernet.in_head(name) and array.ndim > 1)
    given = replace(tools, start={head: torch.ones(weights[head].shape)}, _sent={}, _cut={}, _of={})
    assert not np.array_equal(tools.with_random_classifier(weights, 0)[head], weights[head])
    assert np.array_equal(given.with_random_classifier(given.initial_supernet(0), 0)[head], np.ones(weights[head].shape))
