"""What teaches a supernet on images without labels (HAPFNAS, Yang and Liu, Entropy 2025): an ensemble of clients' networks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.messages import Arrays
from fedloom.core.server_site import ServerImages
from fedloom.maths.distillation import ensemble
from fedloom.spaces.base import SearchSpace
from fedloom.training.local import Draw, Teacher
from fedloom.training.tools import Tools


def ensemble_of(
    tools: Tools, models: Sequence[Arrays], architecture: Architecture, images: ServerImages, examples: Sequence[float]
) -> Teacher:
    """The mean of the models' logits, weighted by examples; their statistics are those of the images."""
    members = [tools.tensors(model) for model in models]
    statistics = [tools.scorer.calibrate(member, architecture, images) for member in members]

    @torch.no_grad()
    def teach(images: Tensor) -> Tensor:
        known = zip(members, statistics, strict=True)
        return ensemble([tools.supernet.forward(images, member, architecture, own) for member, own in known], examples)

    return teach


def sandwich(space: SearchSpace, random: int) -> Draw:
    """The subnets of a step: the largest, which learns from the teacher, then the smallest and random ones, which learn from it."""

    def draw(rng: np.random.Generator) -> list[Architecture]:
        return [space.named["largest"], space.named["smallest"], *(space.sample(rng) for _ in range(random))]

    return draw
