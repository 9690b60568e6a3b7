"""From noise to data: four samplers of one signature, ``sampler(denoise, x, sigmas, noise)``.

``denoise(x, sigma)`` predicts the data, shaped like x; its score is (denoise(x, sigma) - x) / sigma^2.
``x``: (n, …), the start, noisy at ``sigmas[0]``. ``sigmas``: decreasing levels, one more than steps; only the last may be 0.
``noise()``: fresh standard normal numbers shaped like x. The result is at level ``sigmas[-1]``.

Levels are Python numbers and nothing is read back from the device, so that a whole loop fits into one CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fedloom.core.registry import Registry
from fedloom.maths.sde import score_of

Denoise = Callable[[Tensor, float], Tensor]
Noise = Callable[[], Tensor]
Sampler = Callable[[Denoise, Tensor, Sequence[float], Noise], Tensor]
SAMPLERS: Registry[Sampler] = Registry("sampler")

SIGNAL_TO_NOISE = 0.16  # of a Langevin step; Song et al. and DiffusionNAG for this SDE


@SAMPLERS.add("dpm", meaning="DPM-Solver++(2M), without noise: the fewest steps")
def dpm_solver_2m(denoise: Denoise, x: Tensor, sigmas: Sequence[float], noise: Noise) -> Tensor:
    """DPM-Solver++(2M) (Lu et al., 2022, Algorithm 2, alpha = 1) on the probability-flow ODE; ``noise`` is not used."""
    predictions = _Extrapolated(denoise, sigmas)
    for step, (sigma, following) in enumerate(pairwise(sigmas)):
        kept = following / sigma
        x = kept * x + (1 - kept) * predictions.at(step, x)
    return x


@SAMPLERS.add("dpm_sde", meaning="the same with noise: more diverse at few steps")
def dpm_solver_2m_sde(denoise: Denoise, x: Tensor, sigmas: Sequence[float], noise: Noise) -> Tensor:
    """SDE-DPM-Solver++(2M): the same on the reverse SDE, so that errors are forgotten; more diverse at few steps."""
    predictions = _Extrapolated(denoise, sigmas)
    for step, (sigma, following) in enumerate(pairwise(sigmas)):
        kept = (following / sigma) ** 2
        x = kept * x + (1 - kept) * predictions.at(step, x)
        if following > 0:
            x = x + following * math.sqrt(1 - kept) * noise()
    return x


class _Extrapolated:
    """D_i + (D_i - D_{i-1}) / (2r), the data prediction in the middle of step i; r = h_{i-1} / h_i, h_i = ln(sigma_i / sigma_{i+1}).

    The first step has no predecessor, and a step to 0 has h = infinity: both take D_i alone.
    """

    def __init__(self, denoise: Denoise, sigmas: Sequence[float]) -> None:
        self.denoise, self.sigmas = denoise, sigmas
        self.before: Tensor | None = None

    def at(self, step: int, x: Tensor) -> Tensor:
        sigma, following = self.sigmas[step], self.sigmas[step + 1]
        now, before = self.denoise(x, sigma), self.before
        self.before = now
        if before is None or following <= 0:
            return now
        half = math.log(sigma / following) / math.log(self.sigmas[step - 1] / sigma) / 2  # 1 / (2r)
        return now + half * (now - before)


@SAMPLERS.add("sde", meaning="Euler-Maruyama on the reverse SDE: the papers', in many steps")
def euler_maruyama(denoise: Denoise, x: Tensor, sigmas: Sequence[float], noise: Noise) -> Tensor:
    """Reverse VE-SDE, x <- x + g^2 s dt + g sqrt(dt) z with g^2 dt = sigma_i^2 - sigma_{i+1}^2; the last step adds no noise."""
    last = len(sigmas) - 2
    for step, (sigma, following) in enumerate(pairwise(sigmas)):
        x = _predict(denoise, x, sigma, following)
        if step < last:
            x = x + math.sqrt(sigma**2 - following**2) * noise()
    return x


@SAMPLERS.add("pc", meaning="predictor-corrector: a Langevin step before each of those")
def predictor_corrector(denoise: Denoise, x: Tensor, sigmas: Sequence[float], noise: Noise) -> Tensor:
    """Song et al. (2021, Algorithm 2), as in DiffusionNAG: at every level one Langevin step, then one Euler-Maruyama step.

    Two predictions per step. The Langevin step's size depends on mean norms over the batch.
    """
    last = len(sigmas) - 2
    for step, (sigma, following) in enumerate(pairwise(sigmas)):
        x = _langevin(denoise, x, sigma, noise())
        x = _predict(denoise, x, sigma, following)
        if step < last:
            x = x + math.sqrt(sigma**2 - following**2) * noise()
    return x


def _predict(denoise: Denoise, x: Tensor, sigma: float, following: float) -> Tensor:
    """x + (sigma^2 - following^2) s(x, sigma): the mean of an Euler-Maruyama step."""
    return x + (sigma**2 - following**2) * score_of(denoise(x, sigma), x, sigma)


def _langevin(denoise: Denoise, x: Tensor, sigma: float, z: Tensor) -> Tensor:
    """x + e s + sqrt(2e) z with e = 2 (snr |z| / |s|)^2, norms averaged over the batch."""
    score = score_of(denoise(x, sigma), x, sigma)
    ratio = _mean_norm(z) / _mean_norm(score).clamp_min(1e-12)
    size = 2 * (SIGNAL_TO_NOISE * ratio).square()
    return x + size * score + torch.sqrt(2 * size) * z


def _mean_norm(x: Tensor) -> Tensor:
    return torch.sqrt(x.flatten(1).square().sum(dim=1)).mean()
