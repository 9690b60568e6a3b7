"""Balanced softmax, soft targets and ensembles, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedloom.maths.distillation import balanced_softmax, ensemble, soft_cross_entropy


def random_logits(rows: int, classes: int) -> torch.Tensor:
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_balanced_softmax_is_cross_entropy_where_classes_are_equally_frequent(smoothing: float) -> None:
    logits, labels = random_logits(12, 4), torch.arange(4).repeat(3)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    assert balanced_softmax(logits, labels, label_smoothing=smoothing).item() == pytest.approx(expected.item(), rel=1e-6)


def test_balanced_softmax_by_hand() -> None:
    """Counts 3, 1 and, for the class that is not there, 1: equal logits mean probabilities 3/5, 1/5 and 1/5."""
    loss = balanced_softmax(torch.zeros(4, 3), torch.tensor([0, 0, 0, 1]))
    assert loss.item() == pytest.approx(-(3 * math.log(3 / 5) + math.log(1 / 5)) / 4, rel=1e-6)


def test_balanced_softmax_leaves_nothing_to_learn_from_frequencies() -> None:
    """Logits that know nothing are at the minimum when labels depend on nothing, however unequal they are."""
    logits, labels = torch.zeros(40, 2, requires_grad=True), torch.tensor([0] * 30 + [1] * 10)
    (gradient,) = torch.autograd.grad(balanced_softmax(logits, labels), logits)
    assert gradient.sum(0).abs().max() < 1e-6
    (usual,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits)
    assert usual.sum(0).abs().max() > 0.2


def test_soft_cross_entropy_by_hand() -> None:
    teacher = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    student = torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log()
    by_hand = (math.log(2) - 0.5 * math.log(0.1) - 0.5 * math.log(0.9)) / 2
    assert soft_cross_entropy(student, teacher).item() == pytest.approx(by_hand, rel=1e-6)
    assert soft_cross_entropy(teacher, teacher).item() < soft_cross_entropy(student, teacher).item()


def test_an_ensemble_is_the_mean_of_logits_weighted_by_examples() -> None:
    first, second = torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, -2.0]])
    assert ensemble([first, second], [30, 10]).tolist() == [[2.0, 1.0]]
    assert ensemble([first], [7]).tolist() == [[1.0, 2.0]]
