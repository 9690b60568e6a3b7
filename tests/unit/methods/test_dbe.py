"""FedDBE: its consensus, its shift and the network that comes of it, by hand. The objective: tests/unit/training/test_objectives.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.methods.dbe import shifted
from fedloom.testing import Played
from fedloom.training.objectives import NearMean

SHIFT, MEAN = NearMean.SHIFT, NearMean.MEAN
STEPS = ("training.batch=100", "training.schedule=constant", "training.rate=0.1", "training.crop=0", "participants=3")


def play(tiny: Callable[..., Settings], *changes: str) -> Played:
    return Played(tiny("method=dbe", *STEPS, *changes))


def test_a_shift_of_features_is_one_of_the_bias() -> None:
    network = {"w": torch.tensor([[1.0, 2.0], [0.0, -1.0]]), "b": torch.tensor([0.5, 0.0]), "other": torch.zeros(1)}
    moved = shifted(network, ("w", "b"), torch.tensor([3.0, 1.0]))
    assert moved["b"].tolist() == [5.5, -1.0] and moved["w"] is network["w"] and moved["other"] is network["other"]


def test_the_first_round_is_fedavg_and_agrees_on_mean_features(tiny: Callable[..., Settings]) -> None:
    """Of the networks that clients have trained, on all of their training images."""
    plainly, played = Played(tiny("method=fedavg", *STEPS)), play(tiny)
    answers, tools = played.round(), played.tools
    assert not played.instructions[0].arrays["consensus"][MEAN].any() and played.instructions[0].facts["agreed"] == 0
    for one, other in zip(plainly.round(), answers, strict=True):
        architecture = Architecture.parse(other.diary.architecture)
        received, train = played.instructions[0].arrays["weights"], played.federation.data_of(other.report.client).train
        trained = {name: torch.tensor(array + other.report.arrays["update"][name]) for name, array in received.items()}
        assert all(np.array_equal(array, other.report.arrays["update"][name]) for name, array in one.report.arrays["update"].items())
        network = tools.supernet.load(architecture, trained, tools.scorer.calibrate(trained, architecture, train))
        network.set_submodule("classifier", torch.nn.Identity())
        with torch.no_grad():
            mean = network(tools.pixels.normalise(train.images)).mean(0)
        assert other.report.arrays["consensus"][MEAN] == pytest.approx(mean.numpy(), abs=1e-4) and other.memory.arrays == {}
    sizes = [answer.report.facts["examples"] for answer in answers]
    expected = np.average([answer.report.arrays["consensus"][MEAN] for answer in answers], axis=0, weights=sizes)
    assert played.state.agreed == 1 and played.state.consensus[MEAN] == pytest.approx(expected, abs=1e-6) and np.abs(expected).max() > 1e-3


def test_later_rounds_learn_a_shift_and_keep_it(tiny: Callable[..., Settings]) -> None:
    played = play(tiny)
    played.round()
    consensus = played.state.consensus[MEAN]
    for answer in played.round():
        assert set(answer.memory.arrays) == {SHIFT} and np.abs(answer.memory.arrays[SHIFT]).max() > 0
        assert np.array_equal(answer.report.arrays["consensus"][MEAN], consensus)  # nothing of the client
        assert set(answer.report.arrays["update"]) == set(played.state.weights)
    assert np.array_equal(played.state.consensus[MEAN], consensus)


def test_a_pull_of_nothing_leaves_only_the_shift(tiny: Callable[..., Settings]) -> None:
    """The first step of the second round, from a shift of zero, is fedavg's; with a pull it is not."""
    free, held = play(tiny, "dbe.pull=0"), play(tiny, "dbe.pull=50")
    plainly = Played(tiny("method=fedavg", *STEPS))
    for one in (free, held, plainly):
        one.round()
    for one, other, usual in zip(free.round(), held.round(), plainly.round(), strict=True):
        pairs = [(one.report.arrays["update"][name], array) for name, array in usual.report.arrays["update"].items()]
        assert all(mine == pytest.approx(theirs, abs=1e-5) for mine, theirs in pairs)
        assert any(
            np.abs(other.report.arrays["update"][name] - array).max() > 1e-4 for name, array in usual.report.arrays["update"].items()
        )


def test_nobody_in_the_first_round_leaves_it_open(tiny: Callable[..., Settings]) -> None:
    played = play(tiny)
    state = played.method.absorb(played.state, [])
    assert state.agreed == 0 and state.round == 1
    assert all(instruction.facts["agreed"] == 0 for instruction in played.method.plan(state, played.federation.names))


def test_the_personal_network_has_the_shift(tiny: Callable[..., Settings]) -> None:
    """Without fine-tuning: the shared network, its bias moved by what the classifier makes of the shift."""
    played = play(tiny, "training.finetune_epochs=0")
    played.round(), played.round()
    client = played.federation.names[0]
    shift, answer = played.memories[client].arrays[SHIFT], played.farewell(client)
    assert answer.model is not None and answer.memory.arrays[SHIFT] is shift
    weight, bias = (played.state.weights[f"classifier.{name}"] for name in ("weight", "bias"))
    assert answer.model.arrays["classifier.bias"] == pytest.approx(bias + weight @ shift, abs=1e-6)
    assert np.array_equal(answer.model.arrays["classifier.weight"], weight) and set(played.instructions[-1].arrays) == {"weights"}
