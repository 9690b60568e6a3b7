"""The papers' generator, kept as the reference: how its score network and its predictor are trained.

PerFedSDE-NAS (supplement B-D, Tables A and B), which follows DiffusionNAG (An et al., ICLR 2024): denoising score matching on the
variance-exploding SDE, sampled with 1000 steps of Euler-Maruyama or predictor-corrector (``maths/samplers.py``), guided by the raw
gradient of a predictor trained on noisy architectures. ``generator/denoiser.py`` is the faster one that is used by default.

Deviations, each for a reason:

- A token is a gene, not a block, and a gene without effect has a symbol of its own for that; DiffusionNAG marks absent blocks by a row
  without any symbol in one network and by operation 0 in the other. Several tokens share a place, so each adds a learned vector
  (0 at first) to the code of its place, and in the predictor the symbols of each token have vectors of their own.
- An architecture is read off by the largest number of each token (``Tokens.decode``), not by a threshold, so it is always valid.
- Samples start around the mean of the training architectures, not around 0, which differs where the largest noise level is small.
- Both networks see the same noise levels, 0.1 to 5; DiffusionNAG's score network for MobileNetV3 stops at 1.
- A token sees itself besides those that follow it, so that no row of attention is empty.
- The graph convolution against the arrows averages over the nodes that a node follows; DiffusionNAG's code weighs these unevenly.
- The accuracies to predict are standardised and not divided by 100 on top, so guidance needs a hundredth of DiffusionNAG's strength.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fedloom.generator.paper.predictor import PaperTaskPredictor
from fedloom.generator.paper.score import PaperScoreNetwork, PaperSettings
from fedloom.generator.task_encoder import Grouped
from fedloom.maths.sde import FIRST_TIME, score_matching_loss, sigma_at

Progress = Callable[[int, float], None]  # steps done, loss of the last one
REPORT_EVERY = 100  # steps


def train_score(
    mask: Tensor,
    follows: Tensor,
    places: Sequence[tuple[int, int]],
    data: Tensor,
    settings: PaperSettings,
    seed: int,
    device: torch.device,
    progress: Progress,
) -> PaperScoreNetwork:
    """Unsupervised score matching. data: (n, tokens, symbols) of any type, +1, -1, and 0 outside the mask."""
    with _seeded(seed, device):
        network = PaperScoreNetwork(mask, follows, places, settings).to(device)
    data = data.to(device)
    network.data_mean.copy_(data.float().mean(0))
    network.data_deviation.copy_(data.float().std(0, correction=0))
    entries = network.mask.float().mean()  # share of entries to learn; the others are known and cost nothing

    def loss(draw: torch.Generator) -> Tensor:
        clean = data[torch.randint(len(data), (settings.batch,), generator=draw, device=device)].float()
        noise = torch.randn(clean.shape, generator=draw, device=device)
        return score_matching_loss(network, clean, noise, _levels(settings, draw, device)) / entries

    _optimise(network, loss, settings.score_steps, settings.score_rate, settings, seed, device, progress)
    return network


def train_predictor(
    mask: Tensor,
    follows: Tensor,
    data: Tensor,
    accuracies: Tensor,
    task_of: Callable[[Sequence[int], torch.Generator], Grouped],
    features: int,
    settings: PaperSettings,
    seed: int,
    device: torch.device,
    progress: Progress,
) -> PaperTaskPredictor:
    """Mean squared error on noisy architectures and random tasks, accuracies standardised; the encoder of tasks is trained along.

    data: (architectures, tokens, symbols) of any type; accuracies: (architectures, tasks), nan where unknown; ``task_of`` draws images of
    tasks by number.
    """
    with _seeded(seed, device):
        predictor = PaperTaskPredictor(mask, follows, features, settings).to(device)
    data, accuracies = data.to(device), accuracies.to(device)
    known = torch.nonzero(accuracies.isfinite())  # (labels, 2) architecture and task
    labels = accuracies[known[:, 0], known[:, 1]]
    predictor.mean.copy_(labels.mean())
    predictor.spread.copy_(labels.std(correction=0).clamp_min(1e-6))
    labels = (labels - predictor.mean) / predictor.spread

    def loss(draw: torch.Generator) -> Tensor:
        chosen = torch.randint(len(labels), (settings.batch,), generator=draw, device=device)
        rows, tasks = known[chosen].unbind(1)
        sigma = _levels(settings, draw, device)
        clean = data[rows].float()
        noisy = clean + sigma[:, None, None] * torch.randn(clean.shape, generator=draw, device=device)
        vectors = predictor.task(task_of(tasks.tolist(), draw))  # (batch, 56)
        return F.mse_loss(predictor.gain(noisy, sigma, vectors), labels[chosen])

    _optimise(predictor, loss, settings.predictor_steps, settings.predictor_rate, settings, seed, device, progress)
    return predictor


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Initial weights and dropout can only draw from the global generators: seeded inside, as they were afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _levels(settings: PaperSettings, draw: torch.Generator, device: torch.device) -> Tensor:
    """(batch,) noise levels sigma(t), t uniform between 1e-5 and 1."""
    t = FIRST_TIME + (1 - FIRST_TIME) * torch.rand(settings.batch, generator=draw, device=device)
    return sigma_at(t, settings.sigma_min, settings.sigma_max)


def _optimise(
    network: nn.Module,
    loss: Callable[[torch.Generator], Tensor],
    steps: int,
    rate: float,
    settings: PaperSettings,
    seed: int,
    device: torch.device,
    progress: Progress,
) -> None:
    """Adam with a linear warm-up and clipped gradients; the network ends with the moving average of its weights, frozen."""
    draw = torch.Generator(device).manual_seed(seed)
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    kept = [parameter.detach().clone() for parameter in parameters]
    optimiser = torch.optim.Adam(parameters, rate, betas=(0.9, 0.999), fused=device.type == "cuda")
    network.train()
    with _seeded(seed, device):
        for step in range(steps):
            for group in optimiser.param_groups:
                group["lr"] = rate * min(1, (step + 1) / settings.warmup)
            value = loss(draw)
            optimiser.zero_grad(set_to_none=True)
            value.backward()
            nn.utils.clip_grad_norm_(parameters, settings.clip)
            optimiser.step()
            decay = min(settings.average, (step + 1) / (step + 10))  # short trainings forget their start too
            get_ema_multi_avg_fn(decay)(kept, parameters, None)
            if (step + 1) % REPORT_EVERY == 0 or step + 1 == steps:
                progress(step + 1, float(value.detach()))
    with torch.no_grad():
        for parameter, average in zip(parameters, kept, strict=True):
            parameter.copy_(average)
    network.eval().requires_grad_(False)
