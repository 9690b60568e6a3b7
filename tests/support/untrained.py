"""A generator that needs no training, in place of the shipped one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.search import diffusion
from fedloom.spaces.base import SearchSpace


class FakeGenerator:
    """Draws evenly; with a task, each gene's choice is moved by the client's mean pixel of one class, so that other data give others."""

    def __init__(self, space: SearchSpace, guided: bool = True) -> None:
        self.space, self.guided = space, guided
        self.calls: list[tuple[int, Tensor | None, float | None]] = []

    def task(self, images: Tensor, labels: Tensor) -> Tensor | None:
        if not self.guided:
            return None
        assert images.dtype == torch.uint8 and images.ndim == 4 and len(images) == len(labels)
        return torch.stack([images[labels == label].float().mean() for label in labels.unique()])

    def draw(self, count: int, rng: np.random.Generator, task: Tensor | None = None, strength: float | None = None) -> list[Architecture]:
        self.calls.append((count, task, strength))
        choices = self.space.sample_many(rng, count)
        if task is not None:
            shift = np.resize(task.numpy().astype(int), len(self.space.sizes))
            choices = (choices + shift * round(strength or 1)) % self.space.sizes
        return [self.space.canonical(row) for row in choices]


@contextmanager
def loading(load: Callable[..., Any]) -> Iterator[None]:
    """Whoever loads a generator gets what ``load`` gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusion, "load_generator", load)
        yield


@contextmanager
def fake_generator(guided: bool = True) -> Iterator[list[FakeGenerator]]:
    """All generators that were loaded meanwhile, in order."""
    loaded: list[FakeGenerator] = []

    def load(space: SearchSpace, file: str, features: str, device: torch.device, sampler: str, steps: int, wanted: bool) -> FakeGenerator:
        loaded.append(FakeGenerator(space, guided and wanted))
        return loaded[-1]

    with loading(load):
        yield loaded
