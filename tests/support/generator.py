"""What tests of the generator share: spaces small enough to compute by hand, and instances of the real ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom import spaces  # noqa: F401 - fills the registry
from fedloom.core.architecture import Architecture
from fedloom.generator.denoiser import Denoiser, DenoiserSettings
from fedloom.generator.tokens import Tokens
from fedloom.spaces.base import SPACES, BlockDiagram, Cost, Gene, Genes, ImageShape, SearchSpace
from fedloom.testing.spaces import instances

CPU = torch.device("cpu")
SMALL = DenoiserSettings(width=8, layers=1, heads=2)


class Toy(SearchSpace):
    """Genes of a stage. The first is a switch wherever there are several: at choice 0 those after it have no effect."""

    name = "toy"
    named: Mapping[str, Architecture] = {}
    architectures = 0

    def __init__(self, *sizes: int) -> None:
        self._genes = tuple(
            Gene(f"gene {index}", tuple(range(size)), stage=1, place=0 if index == 0 else 1) for index, size in enumerate(sizes)
        )

    @property
    def genes(self) -> tuple[Gene, ...]:
        return self._genes

    @property
    def follows(self) -> npt.NDArray[np.bool_]:
        follows = np.zeros((len(self.genes), len(self.genes)), bool)
        follows[0, 1:] = True
        return follows

    def active_many(self, choices: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        active = np.ones(choices.shape, bool)
        active[:, 1:] = choices[:, :1] > 0
        return active

    def cost(self, architecture: Architecture) -> Cost:
        return Cost(1, 1, 1)

    def input_sizes(self, genes: Genes) -> list[int]:
        return [8] * len(genes)

    def drawing(self, architecture: Architecture) -> BlockDiagram:
        return BlockDiagram(())


def tiny_space(name: str, **changes: Any) -> SearchSpace:
    entry = SPACES[name]
    return entry.make(replace(entry.settings.tiny(), **changes), ImageShape(1, 8, 10))


def tiny_spaces() -> Iterator[tuple[str, SearchSpace]]:
    """Every registered space, for each value of each setting that is a choice between names: those may change its genes."""
    for name in SPACES:
        for id, instance in instances(name, ImageShape(1, 8, 10)):
            yield id, instance.make().space


def untrained(tokens: Tokens, settings: DenoiserSettings = SMALL) -> Denoiser:
    """Knows Bayes' rule for independent genes, every choice as likely as any other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Denoiser(tokens, settings).eval().requires_grad_(False)


def global_states() -> tuple[Tensor, Any]:
    """What nobody may touch."""
    return torch.get_rng_state(), np.random.get_state(legacy=False)


def assert_same_states(before: tuple[Tensor, Any], after: tuple[Tensor, Any]) -> None:
    assert torch.equal(before[0], after[0])
    assert np.array_equal(before[1]["state"]["key"], after[1]["state"]["key"]) and before[1]["state"]["pos"] == after[1]["state"]["pos"]
