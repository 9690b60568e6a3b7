"""Guided generation (PerFedSDE-NAS, Eq. 4, in the fast form): architectures that should do well on a client's data.

Unguided, the reverse diffusion draws architectures as the space does. Guidance tilts what the denoiser believes,
``p(a | x) -> p(a | x) exp(strength * gain(a))``, with the gain linearised at the current belief: its gradient is added to the
logits. Where the gain is a sum over genes this samples from ``p(a) exp(strength * gain(a))``.

``AnyGenerator`` is what all models share, ``Generator`` the fast one; ``paper/generator.py`` has the papers'.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.generator.denoiser import SIGMA_MAX, SIGMA_MIN, Denoiser, DenoiserSettings, expectation
from fedloom.generator.features import FeatureExtractor
from fedloom.generator.paper.predictor import PaperTaskPredictor
from fedloom.generator.paper.score import PaperScoreNetwork
from fedloom.generator.predictor import Predictor, PredictorSettings
from fedloom.generator.task_encoder import grouped_features
from fedloom.generator.tokens import Choices, Tokens
from fedloom.maths.samplers import SAMPLERS, Denoise, Noise
from fedloom.maths.sde import karras_levels, ve_levels
from fedloom.supernets.elastic import sent
from fedloom.training.together import together

STEPS = 12  # of the fast sampler
REFERENCE_STEPS = 1000  # of the paper's
RHO = 3.0  # how much finer the levels become towards the end
STRENGTH = 3.0  # of guidance: about how many standard deviations the mean predicted accuracy moves
STRONGEST = 10_000.0
FAINT = 0.1  # a gain that varies less than this (in spreads of accuracy over architectures) guides less: it may be chance
AT_ONCE = 500  # architectures per pass: bounds memory

Parts = Sequence[tuple[int, np.random.Generator]]  # so many architectures, and where their noise comes from
Gain = Callable[[Tensor, Tensor], Tensor]  # (what a model's predictor sees of architectures (n, rows, symbols), sigma (n,)) -> (n,)


def noise_levels(
    sampler: str, steps: int = 0, low: float = SIGMA_MIN, high: float = SIGMA_MAX, reference_steps: int = REFERENCE_STEPS
) -> list[float]:
    """The levels of a sampler: Karras' for the fast ones, those of the VE-SDE for the papers'. steps: 0 is the sampler's own number."""
    if sampler.startswith("dpm"):
        return karras_levels(low, high, steps or STEPS, RHO)
    return ve_levels(low, high, steps or reference_steps)


def tilted(denoiser: Denoiser, gain: Gain | None, strength: float) -> Denoise:
    """The data prediction, guided by a gain of shares of symbols."""

    def denoise(x: Tensor, level: float) -> Tensor:
        sigma = torch.full((len(x),), level, device=x.device)
        logits = denoiser.logits(x, sigma)
        if gain is not None and strength:
            with torch.enable_grad():
                shares = logits.softmax(-1).requires_grad_()
                (slope,) = torch.autograd.grad(gain(shares, sigma).sum(), shares)
            logits = logits + strength * slope
        return expectation(logits, denoiser.mask)

    return denoise


@dataclass(frozen=True)
class Wanted:
    """So many architectures for a task, or of the whole space without one."""

    count: int
    rng: np.random.Generator
    task: Tensor | None
    strength: float


@dataclass(frozen=True)
class AnyGenerator(ABC):
    """A trained generator of one space, frozen."""

    tokens: Tokens
    denoiser: Denoiser | PaperScoreNetwork
    predictor: Predictor | PaperTaskPredictor | None = None
    extractor: FeatureExtractor | None = None
    strength: float = STRENGTH
    sampler: str = "dpm"
    steps: int = 0  # 0: the sampler's own number
    facts: dict[str, Any] = field(default_factory=dict)  # what its file says of itself

    model: ClassVar[str]  # its name in files and settings

    # -- what a model decides ------------------------------------------------------
    @staticmethod
    @abstractmethod
    def networks(tokens: Tokens, settings: Mapping[str, Mapping[str, Any]], features: int) -> tuple[Any, Any]:
        """Denoiser and predictor of these settings, untrained; no predictor (None) if there are no image features (0)."""

    @abstractmethod
    def levels(self) -> list[float]:
        """Noise levels from the start to the end."""

    @abstractmethod
    def start(self, parts: Parts, noise: Noise, guided: Denoise | None) -> Tensor:
        """(count, rows, symbols) noisy at the highest level. guided: the guided data prediction, if there is guidance."""

    @abstractmethod
    def denoise(self, gain: Gain | None, strength: float) -> Denoise:
        """The data prediction, guided by a gain."""

    @abstractmethod
    def certain(self, choices: Choices) -> tuple[Tensor, Tensor]:
        """What the predictor sees of architectures that it is sure of, (n, rows, symbols), and the level of noise, (n,)."""

    # -- what all share ----------------------------------------------------------------
    @property
    def guided(self) -> bool:
        return self.predictor is not None and self.extractor is not None

    @property
    def device(self) -> torch.device:
        return self.denoiser.mask.device

    def sampled_by(self, sampler: str = "", steps: int = 0) -> Self:
        """The same with another sampler ("" is its own) and number of steps (0 is the sampler's own)."""
        chosen = SAMPLERS[sampler or self.sampler].name  # refuses an unknown one
        return replace(self, sampler=chosen, steps=steps)

    @torch.no_grad()
    def task(self, images: Tensor, labels: Tensor) -> Tensor | None:
        """The condition of one client: raw images (n, c, h, w) of 8 bits and labels (n,) -> (numbers,); None without a predictor.

        The first 20 images of each class are looked at. Computed at the client, and it stays there.
        """
        if self.predictor is None or self.extractor is None:
            return None
        return self.predictor.task(grouped_features(self.extractor, images, labels))

    def guide(self, task: Tensor | None) -> Gain | None:
        """What guides towards the architectures of a task."""
        if task is None or self.predictor is None:
            return None
        predictor, vector = self.predictor, task.to(self.device)
        return lambda seen, sigma: predictor.gain(seen, sigma, vector)

    def draw(self, count: int, rng: np.random.Generator, task: Tensor | None = None, strength: float | None = None) -> list[Architecture]:
        """Architectures for a task, or of the whole space without one. Valid by construction; repeats are rare, not impossible."""
        wanted = Wanted(count, rng, task, self.strength if strength is None else strength)
        return together(self._draw, [wanted])[0]

    def _draw(self, requests: Sequence[Wanted]) -> list[list[Architecture]]:
        return [
            self.tokens.architectures(self.draw_choices(own.count, own.rng, self.guide(own.task) if own.strength else None, own.strength))
            for own in requests
        ]

    @torch.no_grad()
    def draw_choices(self, count: int, rng: np.random.Generator, gain: Gain | None = None, strength: float = 0.0) -> Choices:
        """(count, genes), guided by any gain."""
        parts = [self._sampled([(min(AT_ONCE, count - first), rng)], gain, strength) for first in range(0, count, AT_ONCE)]
        return np.concatenate(parts) if parts else np.empty((0, len(self.tokens.space.genes)), np.int64)

    @torch.no_grad()
    def _sampled(self, parts: Parts, gain: Gain | None, strength: float) -> Choices:
        """One batch, (count, genes). parts: how many architectures take their noise from which generator."""
        denoise, places, mask = self.denoise(gain, strength), self.denoiser.mask.shape, self.denoiser.mask
        guided = denoise if gain is not None and strength else None

        def noise() -> Tensor:
            drawn = [rng.standard_normal((count, *places), np.float32) for count, rng in parts]
            return sent(torch.from_numpy(np.concatenate(drawn)), self.device) * mask

        drawn = SAMPLERS[self.sampler].make(denoise, self.start(parts, noise, guided), self.levels(), noise)
        if not drawn.isfinite().all():  # would all become choice 0
            raise InvalidConfig(f"The generator drew values that are not numbers, at strength {strength:g}. Lower it, or train again")
        return self.tokens.decode(drawn)


@dataclass(frozen=True)
class Generator(AnyGenerator):
    """The fast model: a categorical denoiser, and a predictor that sees what the denoiser believes."""

    denoiser: Denoiser
    predictor: Predictor | None = None

    model: ClassVar[str] = "fast"

    @staticmethod
    def networks(tokens: Tokens, settings: Mapping[str, Mapping[str, Any]], features: int) -> tuple[Denoiser, Predictor | None]:
        denoiser = Denoiser(tokens, DenoiserSettings(**settings["denoiser"]))
        return denoiser, Predictor(tokens, features, PredictorSettings(**settings["predictor"])) if features else None

    def levels(self) -> list[float]:
        return noise_levels(self.sampler, self.steps)

    def start(self, parts: Parts, noise: Noise, guided: Denoise | None) -> Tensor:
        """Random architectures under noise of the highest level, which is exact. Guidance moves their mean already there: a deterministic
        sampler does not forget where it starts."""
        random = np.concatenate([self.tokens.space.sample_many(rng, count) for count, rng in parts])
        clean = self.tokens.one_hot(self.tokens.encode(random))
        level = self.levels()[0]
        x = clean.to(self.device) + level * noise()
        return x if guided is None else x + guided(x, level) - self.denoise(None, 0.0)(x, level)

    def denoise(self, gain: Gain | None, strength: float) -> Denoise:
        return tilted(self.denoiser, gain, strength)

    def certain(self, choices: Choices) -> tuple[Tensor, Tensor]:
        return self._certain(self.tokens.shares(self.tokens.encode(choices).to(self.device)))

    @torch.no_grad()
    def guide(self, task: Tensor | None) -> Gain | None:
        """In units of the gain's own spread over random architectures, so that a strength means the same for all tasks."""
        gain = super().guide(task)
        if gain is None:
            return None
        spread = gain(*self._certain(self.tokens.random.to(self.device))).std().clamp_min(FAINT)
        return lambda seen, sigma: gain(seen, sigma) / spread

    def _draw(self, requests: Sequence[Wanted]) -> list[list[Architecture]]:
        """Those of several clients in one batch on a GPU, which would mostly wait for Python. Each client's noise is its own."""
        alike = len({(wanted.count, wanted.strength, wanted.task is None) for wanted in requests}) == 1
        if len(requests) == 1 or not alike or self.device.type == "cpu" or requests[0].count > AT_ONCE:
            return super()._draw(requests)
        count, strength = requests[0].count, requests[0].strength
        tasks = [wanted.task for wanted in requests if wanted.task is not None]
        gain = self._guide_all(torch.stack(tasks).to(self.device), count) if tasks and strength else None
        choices = self._sampled([(count, wanted.rng) for wanted in requests], gain, strength)
        return [self.tokens.architectures(choices[start : start + count]) for start in range(0, len(choices), count)]

    @torch.no_grad()
    def _guide_all(self, tasks: Tensor, count: int) -> Gain | None:
        """``guide`` of several tasks, (tasks, numbers), of ``count`` architectures each, one after the other."""
        if self.predictor is None:
            return None
        predictor, random = self.predictor, self._certain(self.tokens.random.to(self.device))
        spread = torch.stack([predictor.gain(*random, task).std() for task in tasks]).clamp_min(FAINT)
        every, spreads = tasks.repeat_interleave(count, 0), spread.repeat_interleave(count)
        return lambda seen, sigma: predictor.gain(seen, sigma, every) / spreads

    def _certain(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        return shares, torch.full((len(shares),), SIGMA_MIN, device=self.device)
