"""The predictor: how accurate would this (noisy) architecture be on this data set?

Accuracy on a task is split into a level, which the data alone decide, and a gain, what this architecture adds to the task's average
in units of the spread over architectures. The gain is what architectures are worth everywhere, a network of the architecture behind
the noise as the frozen denoiser sees it (shares of symbols, (rows, symbols), and the level of noise), plus what each symbol is worth
on this task: a slope per symbol, linear in the task vector. Only the gain guides.

A task vector is what the Set Transformer says of the task, and mean and spread of its images' features. The latter are ours: labels
are so noisy that the Set Transformer alone did not learn in which condition images were taken. For the same reason slopes see all
labelled architectures of a task in every step. Trained by mean squared error on accuracies of a real supernet (``labels.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.settings import setting
from fedloom.generator.denoiser import SIGMA_MAX, SIGMA_MIN, Denoiser, sinusoid
from fedloom.generator.task_encoder import Grouped, TaskEncoder
from fedloom.generator.tokens import Tokens

TASK = 56  # numbers in a task vector that come from the Set Transformer
USUAL = 96  # tasks whose images tell what features are usual


@dataclass(frozen=True)
class PredictorSettings:
    steps: int = setting(2_000, "training steps", low=1)
    tasks: int = setting(24, "tasks per step", low=1)
    architectures: int = setting(48, "noisy architectures per task and step", low=2)
    rate: float = setting(1e-3, "learning rate of AdamW at its peak", low=0)
    width: int = setting(192, "width of its hidden layers", low=8)
    dropout: float = setting(0.1, "dropout rate", low=0, high=0.9)


class ArchitectureNetwork(nn.Module):
    """A number for an architecture (shares of symbols) and a level of noise."""

    def __init__(self, tokens: Tokens, settings: PredictorSettings) -> None:
        super().__init__()
        width = settings.width
        self.read = nn.Linear(len(tokens) * tokens.symbols, width)
        self.level = nn.Linear(32, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, width)) for _ in range(2))
        self.drop = nn.Dropout(settings.dropout)
        self.write = nn.Linear(width, 1)

    def forward(self, shares: Tensor, sigma: Tensor) -> Tensor:
        """shares: (n, rows, symbols); sigma: (n,) -> (n,)."""
        hidden = self.read(shares.flatten(1)) + self.level(sinusoid(10 * sigma.log(), 32))
        for layer in self.layers:
            hidden = hidden + self.drop(layer(hidden))
        return self.write(hidden)[:, 0]


class Predictor(nn.Module):
    spread: Tensor  # () standard deviation of accuracy over architectures within a task, in the labels
    usual: Tensor  # (rows * symbols,) mean shares of the labelled architectures
    feature_mean: Tensor  # (F,) of the images it learned from
    feature_spread: Tensor  # (F,)
    farthest: Tensor  # () how far from the usual the images of a task were, at most, that it learned from

    def __init__(self, tokens: Tokens, features: int, settings: PredictorSettings) -> None:
        super().__init__()
        symbols, size = len(tokens) * tokens.symbols, TASK + 2 * features
        self.task_encoder = TaskEncoder(features, TASK)
        self.normalise = nn.LayerNorm(TASK)
        self.architecture = ArchitectureNetwork(tokens, settings)
        self.slopes = nn.Linear(size, symbols)
        nn.init.zeros_(self.slopes.weight)
        nn.init.zeros_(self.slopes.bias)
        self.of_level = nn.Sequential(nn.Linear(size, TASK), nn.SiLU(), nn.Linear(TASK, 1))
        self.register_buffer("spread", torch.ones(()))
        self.register_buffer("usual", torch.zeros(symbols))
        self.register_buffer("feature_mean", torch.zeros(features))
        self.register_buffer("feature_spread", torch.ones(features))
        self.register_buffer("farthest", torch.ones(()))

    @property
    def numbers(self) -> int:
        """In a task vector: those of the Set Transformer, means and spreads of features."""
        return self.slopes.in_features

    def task(self, grouped: Grouped) -> Tensor:
        """(tasks, numbers), or (numbers,) of one. Images that are farther from the usual than any it learned from count as if they were
        at the farthest, in their direction: slopes are linear and would follow them anywhere."""
        apart = self._apart(grouped)
        apart = apart * (self.farthest / apart.norm(dim=-1, keepdim=True).clamp_min(1e-6)).clamp_max(1)
        return torch.cat([self.normalise(self.task_encoder.encode(grouped)), apart], -1)

    def _apart(self, grouped: Grouped) -> Tensor:
        """(tasks, 2F) how mean and spread of the images' features differ from the usual."""
        seen = grouped.image_mask[..., None].float()  # (tasks, classes, images, 1)
        count = seen.sum((-3, -2)).clamp_min(1)
        features = (grouped.features - self.feature_mean) / self.feature_spread
        mean = (features * seen).sum((-3, -2)) / count
        spread = ((features - mean[..., None, None, :]).square() * seen).sum((-3, -2)) / count
        return torch.cat([mean, spread.sqrt() - 1], -1)

    def level(self, task: Tensor) -> Tensor:
        """(tasks,) average accuracy of architectures on a task."""
        return torch.sigmoid(self.of_level(task)[..., 0])

    def gain(self, shares: Tensor, sigma: Tensor, task: Tensor) -> Tensor:
        """(n,) what an architecture adds to the average, in units of ``spread``; task: (numbers,) for all or (n, numbers)."""
        return self.architecture(shares, sigma) + ((shares.flatten(1) - self.usual) * self.slopes(task)).sum(-1)

    def accuracy(self, shares: Tensor, sigma: Tensor, task: Tensor) -> Tensor:
        return self.level(task) + self.spread * self.gain(shares, sigma, task)

    def get_used_to(self, seen: Tensor, grouped: Grouped) -> None:
        """What is usual: architectures (n, rows * symbols) and the images of tasks."""
        features = grouped.features[grouped.image_mask]
        self.usual.copy_(seen.mean(0))
        self.feature_mean.copy_(features.mean(0))
        self.feature_spread.copy_(features.std(0).clamp_min(1e-6))
        self.farthest.copy_(self._apart(grouped).norm(dim=-1).max())


def behind_noise(denoiser: Denoiser, clean: Tensor, sigma: Tensor, draw: torch.Generator) -> Tensor:
    """Architectures (n, rows, symbols) made noisy at these levels (n,) and seen by the denoiser: shares of symbols."""
    noise = torch.randn(clean.shape, generator=draw, device=clean.device) * denoiser.mask
    return denoiser.logits(clean + sigma[:, None, None] * noise, sigma).softmax(-1)


def levels(count: int, draw: torch.Generator, device: torch.device) -> Tensor:
    """Noise levels for training; a quarter of them so low that the architecture is certain."""
    share = (torch.rand(count, generator=draw, device=device) * 4 / 3 - 1 / 3).clamp_min(0)
    return SIGMA_MIN * (SIGMA_MAX / SIGMA_MIN) ** share


def falling_rate(step: int, steps: int, rate: float, warm: int = 100) -> float:
    return rate * min(1, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train_predictor(
    tokens: Tokens,
    denoiser: Denoiser,
    symbols: Tensor,
    accuracies: Tensor,
    task_of: Callable[[Sequence[int], torch.Generator], Grouped],
    features: int,
    settings: PredictorSettings,
    seed: int,
    progress: Callable[[int, float], None],
) -> Predictor:
    """symbols: (architectures, rows); accuracies: (architectures, tasks), nan where unknown; ``task_of`` draws their images by number."""
    device = symbols.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        predictor = Predictor(tokens, features, settings)
        known = accuracies.isfinite()
        means = accuracies.nanmean(0)  # (tasks,)
        gains = torch.where(known, accuracies - means, 0.0)
        spreads = (gains.square().sum(0) / (known.sum(0) - 1).clamp_min(1)).sqrt()  # (tasks,)
        gains = gains / spreads.clamp_min(1e-6)
        predictor.spread.copy_(spreads.mean().cpu())
        predictor = predictor.to(device).train()
        draw = torch.Generator(device).manual_seed(seed)
        tasks, count = min(settings.tasks, accuracies.shape[1]), settings.architectures
        seen = tokens.shares(symbols).flatten(1)
        predictor.get_used_to(seen, task_of(list(range(min(USUAL, accuracies.shape[1]))), draw))
        optimiser = torch.optim.AdamW(predictor.parameters(), settings.rate, weight_decay=0.1)
        for step in range(settings.steps):
            for group in optimiser.param_groups:
                group["lr"] = falling_rate(step, settings.steps, settings.rate)
            chosen = torch.randperm(accuracies.shape[1], generator=draw, device=device)[:tasks]
            vectors = predictor.task(task_of(chosen.tolist(), draw))  # (tasks, numbers)
            # Slopes from all architectures that a task has labels of: (architectures, tasks).
            apart = (seen - predictor.usual) @ predictor.slopes(vectors).T - gains[:, chosen]
            loss = (apart.square() * known[:, chosen]).sum() / known[:, chosen].sum()
            # The whole gain from a few, behind noise.
            rows = torch.multinomial(known[:, chosen].T.float(), count, replacement=True, generator=draw).flatten()  # tasks * count
            sigma = levels(len(rows), draw, device)
            with torch.no_grad():
                shares = behind_noise(denoiser, tokens.one_hot(symbols[rows]), sigma, draw)
            predicted = predictor.gain(shares, sigma, vectors.detach().repeat_interleave(count, 0))
            loss = loss + F.mse_loss(predicted, gains[rows, chosen.repeat_interleave(count)])
            loss = loss + F.mse_loss(predictor.level(vectors), means[chosen]) / means.var().clamp_min(1e-6)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(predictor.parameters(), 1.0)
            optimiser.step()
            if step % 100 == 99 or step + 1 == settings.steps:
                progress(step + 1, float(loss.detach()))
    return predictor.eval().requires_grad_(False)
