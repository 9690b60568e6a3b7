"""The papers' generator (PerFedSDE-NAS, supplement B-D) as methods use it: the score network and its predictor behind the same interface.

What differs from the papers is listed in ``generator/paper/training.py``. Its own sampler is Euler-Maruyama with 1000 steps (``sde``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedloom.generator.generator import AnyGenerator, Gain, Parts, noise_levels
from fedloom.generator.paper.predictor import PaperTaskPredictor, guided
from fedloom.generator.paper.score import PaperScoreNetwork, PaperSettings
from fedloom.generator.tokens import Choices, Tokens
from fedloom.maths.samplers import Denoise, Noise


@dataclass(frozen=True)
class PaperGenerator(AnyGenerator):
    denoiser: PaperScoreNetwork
    predictor: PaperTaskPredictor | None = None
    strength: float = PaperSettings.strength
    sampler: str = "sde"

    model: ClassVar[str] = "paper"

    @staticmethod
    def networks(
        tokens: Tokens, settings: Mapping[str, Mapping[str, Any]], features: int
    ) -> tuple[PaperScoreNetwork, PaperTaskPredictor | None]:
        own = PaperSettings(**settings["paper"])
        score = PaperScoreNetwork(tokens.mask, tokens.follows, tokens.places, own)
        return score, PaperTaskPredictor(tokens.mask, tokens.follows, features, own) if features else None

    def levels(self) -> list[float]:
        own = self.denoiser.settings
        return noise_levels(self.sampler, self.steps, own.sigma_min, own.sigma_max, own.sampling_steps)

    def start(self, parts: Parts, noise: Noise, guided: Denoise | None) -> Tensor:
        return self.denoiser.start(noise())

    def denoise(self, gain: Gain | None, strength: float) -> Denoise:
        return guided(self.denoiser.denoise, gain, strength) if gain is not None and strength else self.denoiser.denoise

    def certain(self, choices: Choices) -> tuple[Tensor, Tensor]:
        clean = self.tokens.one_hot(self.tokens.encode(choices).to(self.device))
        return clean, torch.full((len(clean),), self.denoiser.settings.sigma_min, device=self.device)
