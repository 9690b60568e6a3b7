"""FedNAS: what is averaged, the steps of a client, and the two phases, by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import Instruction, Report
from fedloom.testing import Played

Tiny = Callable[..., Settings]
PLAIN = ("training.momentum=0", "training.weight_decay=0", "training.label_smoothing=0", "training.crop=0", "fednas.clip=0")


def play(tiny: Tiny, *more: str) -> Played:
    return Played(tiny("method=fednas", "rounds=4", "participants=2", *more))


def reported(instruction: Instruction, change: float, of_alphas: float, examples: int) -> Report:
    arrays = {
        group: {name: np.full_like(array, by) for name, array in instruction.arrays[group].items()}
        for group, by in (("weights", change), ("alphas", of_alphas))
    }
    return Report(instruction.client, instruction.round, {"update": arrays["weights"], "alphas": arrays["alphas"]}, {"examples": examples})


def test_weights_and_alphas_are_averaged_by_examples(tiny: Tiny) -> None:
    played = play(tiny)
    one, other = played.method.plan(played.state, played.federation.names)
    assert set(one.arrays["weights"]) == set(played.tools.supernet.shapes)
    after = played.method.absorb(played.state, [reported(one, 1.0, 0.2, 30), reported(other, 5.0, 0.6, 10)])
    assert after.alphas["alphas"] == pytest.approx(np.full((2, 14, 2), (30 * 0.2 + 10 * 0.6) / 40))
    for name, before in played.state.weights.items():
        assert np.allclose(after.weights[name] - before, 2.0, atol=1e-5), name


def test_one_step_of_a_client(tiny: Tiny) -> None:
    """w by the training loss; alpha by the training loss and half of the validation loss, through the softmax."""
    played = play(tiny, *PLAIN, "training.batch=100", "training.schedule=constant", "fednas.rate=0.5", "fednas.weight=0.5")
    tools, instruction = played.tools, played.method.plan(played.state, played.federation.names)[0]
    report, data = played.answer(instruction).report, played.federation.data_of(instruction.client)
    leaves = {name: torch.tensor(array).requires_grad_() for name, array in instruction.arrays["weights"].items()}
    alphas = torch.zeros(2, 14, 2, requires_grad=True)

    def loss(part: str) -> torch.Tensor:
        images, labels = getattr(data, part).images, getattr(data, part).labels
        return F.cross_entropy(tools.supernet.mixture(tools.pixels.normalise(images), leaves, alphas.softmax(-1)), labels)

    names, (on_train,) = list(leaves), torch.autograd.grad(loss("train"), [alphas], retain_graph=True)
    found = torch.autograd.grad(loss("train"), list(leaves.values()), allow_unused=True)
    (on_validation,) = torch.autograd.grad(loss("validation"), [alphas])
    expected = -0.5 * (on_train + 0.5 * on_validation).numpy()
    assert np.abs(expected).max() > 1e-4 and report.arrays["alphas"]["alphas"] == pytest.approx(expected, abs=1e-5)
    rate = tools.training.rate
    for name, gradient in zip(names, found, strict=True):
        moved = np.zeros_like(report.arrays["update"][name]) if gradient is None else -rate * gradient.numpy()
        assert np.allclose(report.arrays["update"][name], moved, atol=1e-4), name


def test_validation_images_move_alphas_only(tiny: Tiny) -> None:
    one, other = play(tiny, "fednas.weight=0"), play(tiny, "fednas.weight=3")
    first, second = (played.answer(played.method.plan(played.state, played.federation.names)[0]).report for played in (one, other))
    assert not np.array_equal(first.arrays["alphas"]["alphas"], second.arrays["alphas"]["alphas"])
    steps = len(one.federation.data_of(first.client).train) // 8
    assert steps == 1  # of two the second would see other alphas
    assert all(np.array_equal(array, second.arrays["update"][name]) for name, array in first.arrays["update"].items())


def test_after_the_search_the_strongest_operations_are_trained(tiny: Tiny) -> None:
    played = play(tiny)
    for _ in range(2):
        instructions = played.method.plan(played.state, played.federation.names)
        assert all(one.arrays["alphas"] and "architecture" not in one.facts for one in instructions)
        wanted = {"alphas": np.eye(2)[np.arange(28) % 2].reshape(2, 14, 2)}
        reports = [
            Report(one.client, one.round, {**reported(one, 0, 0, 9).arrays, "alphas": wanted}, {"examples": 9}) for one in instructions
        ]
        played.state = played.method.absorb(played.state, reports)
    found = played.tools.space.canonical(np.arange(28) % 2)
    before = played.state
    answers = played.round()
    for instruction in played.instructions:
        assert Architecture.parse(str(instruction.facts["architecture"])) == found and not instruction.arrays["alphas"]
        assert set(instruction.arrays["weights"]) == set(played.tools.supernet.regions(found))
    assert all(answer.report.arrays["alphas"] == {} and answer.diary.architecture == found.id for answer in answers)
    assert np.array_equal(played.state.alphas["alphas"], before.alphas["alphas"])
    moved = {name for name, array in played.state.weights.items() if not np.array_equal(array, before.weights[name])}
    assert moved and moved <= set(played.tools.supernet.regions(found))
    assert played.farewell(played.federation.names[-1]).diary.architecture == found.id


def test_a_budget_is_refused(tiny: Tiny) -> None:
    with pytest.raises(InvalidConfig, match=r"fednas trains all operations at once.*Remove budget"):
        play(tiny, "budget.parameters=1e6")
