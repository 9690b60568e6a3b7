"""The variance-exploding SDE: levels, conversions and loss against hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.maths.sde import data_of, karras_levels, prior, score_matching_loss, score_of, sigma_at, ve_levels


def test_sigma_grows_geometrically_from_smin_to_smax() -> None:
    times = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(sigma_at(times, 0.1, 10.0), torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64))


def test_ve_levels_are_even_in_the_logarithm() -> None:
    levels = ve_levels(0.1, 10.0, 2)
    assert levels == pytest.approx([10.0, 0.1 * 100 ** ((1 + 1e-5) / 2), 0.1 * 100**1e-5], rel=1e-12)
    assert levels[-1] > 0.1 and all(isinstance(level, float) for level in levels)


def test_karras_levels_are_even_in_the_root_and_end_at_nothing() -> None:
    assert karras_levels(1.0, 16.0, 3, rho=2.0) == pytest.approx([16.0, 2.5**2, 1.0, 0.0])  # roots 4, 2.5, 1
    assert karras_levels(1.0, 16.0, 1, rho=2.0) == [16.0, 0.0]


def test_score_and_data_prediction_are_two_views_of_one_thing() -> None:
    x, data = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0])
    score = score_of(data, x, 0.5)
    torch.testing.assert_close(score, torch.tensor([-4.0, 8.0]))  # (1 - 2) / 0.25, (1 + 1) / 0.25
    torch.testing.assert_close(data_of(score, x, 0.5), data)


def test_the_loss_by_hand() -> None:
    x0, noise, sigma = torch.tensor([[1.0, -1.0], [0.0, 2.0]]), torch.tensor([[1.0, 2.0], [-1.0, 0.0]]), torch.tensor([0.5, 2.0])
    # x = [[1.5, 0], [-2, 2]]; with s(x, sigma) = -x: (0.5 * -1.5 + 1)^2, (0 + 2)^2, (2 * 2 - 1)^2, (2 * -2 + 0)^2
    loss = score_matching_loss(lambda x, sigma: -x, x0, noise, sigma)
    assert loss.item() == pytest.approx((0.0625 + 4 + 9 + 16) / 4)


def test_the_loss_is_nothing_for_the_true_score_of_one_point() -> None:
    x0, noise, sigma = torch.full((3, 2), 0.7), torch.randn(3, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0.1, 1.0, 5.0])
    loss = score_matching_loss(lambda x, sigma: (0.7 - x) / sigma[:, None] ** 2, x0, noise, sigma)
    assert loss.item() == pytest.approx(0, abs=1e-9)


def test_the_prior_has_the_moments_of_noisy_data() -> None:
    noise = torch.tensor([[1.0, -1.0]])
    torch.testing.assert_close(prior(noise, 3.0), 3 * noise)
    start = prior(noise, 3.0, mean=torch.tensor([1.0, -0.5]), deviation=torch.tensor([4.0, 0.0]))
    torch.testing.assert_close(start, torch.tensor([[1 + math.sqrt(9 + 16), -0.5 - 3]]))
