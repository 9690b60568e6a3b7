"""Samplers: first steps by hand, the order of convergence, and distributions whose exact denoiser is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fedloom.maths.samplers import SAMPLERS, dpm_solver_2m, dpm_solver_2m_sde, euler_maruyama, predictor_corrector
from fedloom.maths.sde import karras_levels, prior, ve_levels

COUNT = 20_000


def normal(shape: tuple[int, ...], seed: int = 0) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(shape, generator=generator, dtype=torch.float64)


def ones(x: Tensor) -> Callable[[], Tensor]:
    return lambda: torch.ones_like(x)


# ------------------------------------------------------------------------------------------ by hand


def test_the_first_steps_of_2m_by_hand() -> None:
    x = torch.tensor([[8.0]], dtype=torch.float64)
    predictions = {4.0: 1.0, 2.0: 2.0, 0.5: 0.5}

    def denoise(x: Tensor, sigma: float) -> Tensor:
        return torch.full_like(x, predictions[sigma])

    # 4 -> 2: 8 / 2 + 1 / 2 = 4.5. 2 -> 0.5: h doubles, so 1 / (2r) = 1 and D' = 2 + (2 - 1) = 3: 4.5 / 4 + 3 * 3 / 4 = 3.375
    assert dpm_solver_2m(denoise, x, [4.0, 2.0, 0.5], ones(x)).item() == pytest.approx(3.375)
    assert dpm_solver_2m(denoise, x, [4.0, 2.0, 0.5, 0.0], ones(x)).item() == pytest.approx(0.5)  # a step to 0 takes D alone
    # squares of the ratios, and noise sigma' sqrt(1 - ratio^2): 8 / 4 + 3 / 4 + 2 sqrt(3 / 4), then / 16 and 15 / 16 * 3
    first = 2 + 0.75 + 2 * math.sqrt(0.75)
    second = first / 16 + 3 * 15 / 16 + 0.5 * math.sqrt(15 / 16)
    assert dpm_solver_2m_sde(denoise, x, [4.0, 2.0, 0.5], ones(x)).item() == pytest.approx(second)
    assert dpm_solver_2m_sde(denoise, x, [4.0, 2.0, 0.5, 0.0], ones(x)).item() == pytest.approx(0.5)


def test_euler_maruyama_by_hand_and_its_last_step_is_a_mean() -> None:
    x = torch.tensor([[8.0]], dtype=torch.float64)

    def denoise(x: Tensor, sigma: float) -> Tensor:
        return torch.zeros_like(x)  # score -x / sigma^2

    one = 8 - 12 * 8 / 16  # sigma^2 from 16 to 4
    assert euler_maruyama(denoise, x, [4.0, 2.0], ones(x)).item() == pytest.approx(one)
    noisy = one + math.sqrt(12)
    assert euler_maruyama(denoise, x, [4.0, 2.0, 1.0], ones(x)).item() == pytest.approx(noisy - 3 * noisy / 4)


def test_the_corrector_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 5.0]], dtype=torch.float64)

    def denoise(x: Tensor, sigma: float) -> Tensor:
        return torch.zeros_like(x)

    # at sigma 1 the score is -x, of norm 5 in both rows; the noise (1, 1) has norm sqrt(2)
    size = 2 * (0.16 * math.sqrt(2) / 5) ** 2
    corrected = x - size * x + math.sqrt(2 * size)
    torch.testing.assert_close(predictor_corrector(denoise, x, [1.0, 0.5], ones(x)), corrected - 0.75 * corrected)


# ---------------------------------------------------------------------------------- order of the solver


def test_2m_is_of_second_order() -> None:
    """On the ODE of N(0.3, 0.5^2), whose paths are mean + (x - mean) sqrt((c^2 + sigma'^2) / (c^2 + sigma^2))."""
    x, mean, variance = torch.tensor([[-3.0], [1.0], [4.0]], dtype=torch.float64), 0.3, 0.25
    first, last = 5.0, 0.1
    exact = mean + (x - mean) * math.sqrt((variance + last**2) / (variance + first**2))

    def denoise(x: Tensor, sigma: float) -> Tensor:
        return (variance * x + sigma**2 * mean) / (variance + sigma**2)

    def error(steps: int) -> float:
        levels = [first * (last / first) ** (i / steps) for i in range(steps + 1)]
        return (dpm_solver_2m(denoise, x, levels, ones(x)) - exact).abs().max().item()

    errors = [error(steps) for steps in (20, 40, 80, 160)]
    for coarse, fine in pairwise(errors):
        assert 3.5 < coarse / fine < 4.5, errors


# ------------------------------------------------------------------------------------- distributions


def levels(name: str) -> list[float]:
    """Enough steps that what is left is the error of 20,000 draws."""
    return karras_levels(0.02, 20.0, 60, rho=5.0) if name.startswith("dpm") else ve_levels(0.02, 20.0, 600)


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_recovers_a_gaussian(name: str) -> None:
    """Mean within 0.03, covariance entries within 0.05 (standard errors of 20,000 draws: 0.009 and 0.016)."""
    mean = torch.tensor([0.5, -1.0], dtype=torch.float64)
    covariance = torch.tensor([[1.0, 0.6], [0.6, 0.5]], dtype=torch.float64)

    def denoise(x: Tensor, sigma: float) -> Tensor:
        gain = covariance @ torch.linalg.inv(covariance + sigma**2 * torch.eye(2, dtype=torch.float64))
        return mean + (x - mean) @ gain.T

    noise = normal((COUNT, 2))
    x = SAMPLERS[name].make(denoise, prior(noise(), 20.0), levels(name), noise)
    torch.testing.assert_close(x.mean(0), mean, atol=0.03, rtol=0)
    torch.testing.assert_close(x.T.cov(), covariance, atol=0.05, rtol=0)


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_recovers_the_share_of_two_points(name: str) -> None:
    """+-1 with probability 0.3 and 0.7; within 0.015 (standard error 0.003), and every draw at one of the points."""
    share = 0.3

    def denoise(x: Tensor, sigma: float) -> Tensor:
        return torch.tanh(x / sigma**2 + 0.5 * math.log(share / (1 - share)))

    noise = normal((COUNT, 1))
    x = SAMPLERS[name].make(denoise, prior(noise(), 20.0), levels(name), noise)
    assert (x > 0).double().mean().item() == pytest.approx(share, abs=0.015)
    torch.testing.assert_close(x.abs(), torch.ones_like(x), atol=0.15, rtol=0)
