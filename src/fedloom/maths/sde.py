"""The variance-exploding SDE (Song et al., ICLR 2021; PerFedSDE-NAS, supplement B), its noise levels and its loss.

dx = g(t) dw with sigma(t) = smin (smax / smin)^t and g(t) = sigma(t) sqrt(2 ln(smax / smin)), so that x(t) = x0 + sigma(t) z.
Networks and samplers only see the level sigma; t is how levels are drawn in training and spaced in sampling.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Score = Callable[[Tensor, Tensor], Tensor]  # (x: (n, …), sigma: (n,)) -> gradient of log p_sigma at x, shaped like x
FIRST_TIME = 1e-5  # the end of the reverse process; t = 0 is left out, as in Song et al.


def sigma_at(t: Tensor, smin: float, smax: float) -> Tensor:
    """sigma(t) = smin (smax / smin)^t."""
    return smin * torch.pow(smax / smin, t)


def ve_levels(smin: float, smax: float, steps: int) -> list[float]:
    """sigma(t) at steps + 1 even times from 1 to 1e-5: smax first, and last just above smin."""
    times = torch.linspace(1.0, FIRST_TIME, steps + 1, dtype=torch.float64)
    return [float(level) for level in sigma_at(times, smin, smax)]


def karras_levels(smin: float, smax: float, steps: int, rho: float) -> list[float]:
    """Karras et al. (NeurIPS 2022, Eq. 5): even in sigma^(1 / rho) from smax to smin, then 0: steps + 1 levels."""
    if steps == 1:
        return [smax, 0.0]
    roots = torch.linspace(smax ** (1 / rho), smin ** (1 / rho), steps, dtype=torch.float64)
    return [float(level) for level in roots**rho] + [0.0]


def prior(noise: Tensor, sigma: float, mean: Tensor | float = 0.0, deviation: Tensor | float = 0.0) -> Tensor:
    """A start at level sigma from standard normal noise: the Gaussian with the data's mean and deviation, widened by sigma.

    Mean and deviation 0 give N(0, sigma^2), which the papers use; it is off by the data's mean where sigma is small.
    """
    return mean + (deviation**2 + sigma**2) ** 0.5 * noise


def score_of(data: Tensor, x: Tensor, sigma: float | Tensor) -> Tensor:
    """The score that a data prediction means: (D(x, sigma) - x) / sigma^2 (Tweedie). A tensor sigma broadcasts to x."""
    return (data - x) / sigma**2


def data_of(score: Tensor, x: Tensor, sigma: float | Tensor) -> Tensor:
    """The data prediction that a score means: x + sigma^2 s(x, sigma). A tensor sigma broadcasts to x."""
    return x + sigma**2 * score


def score_matching_loss(score: Score, x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Mean over all entries of (sigma s(x0 + sigma z, sigma) + z)^2, denoising score matching weighted by sigma^2.

    x0 and noise: (n, …), sigma: (n,).
    """
    level = sigma.view(-1, *[1] * (x0.ndim - 1))
    return (level * score(x0 + level * noise, sigma) + noise).square().mean()
