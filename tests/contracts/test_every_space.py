"""What every search space and its supernet promise: all that are registered, and a plugin's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.spaces.base import SPACES, BlockDiagram, Cost, Gene, Genes, ImageShape, SearchSpace
from fedloom.supernets.base import Supernet
from fedloom.testing.executions import ExecutionContract
from fedloom.testing.one_line import IMAGE, WholeSpaceContract
from fedloom.testing.plugged import plugged
from fedloom.testing.spaces import instances, supernets
from support.darts import connected
from support.toy import TOY


def cases() -> Iterator[Any]:
    """One instance per value of each setting that chooses between names; CI takes the usual one of each space."""
    with plugged(TOY):
        for space in SPACES.values():
            for id, case in instances(space.name, IMAGE):
                marks = [] if case.settings == space.settings.tiny() else [pytest.mark.slow]
                yield pytest.param(case, id=id, marks=marks)


class TestEverySpace(WholeSpaceContract):
    supernet = supernets(list(cases()))
    trainable = staticmethod(connected)

    test_gradients_on_a_gpu = pytest.mark.gpu(WholeSpaceContract.test_gradients_on_a_gpu)
    test_nothing_is_read_back_from_the_device = pytest.mark.gpu(WholeSpaceContract.test_nothing_is_read_back_from_the_device)

    @pytest.fixture(params=["archive", pytest.param("fair", marks=pytest.mark.slow)])
    def kind(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    @pytest.fixture(params=[torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
    def precision(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    @pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.slow)])
    def seed(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    @pytest.fixture(params=[12, pytest.param(1000, marks=pytest.mark.slow)])
    def count(self, request: pytest.FixtureRequest) -> Any:
        return request.param


def without_masks() -> Any:
    with plugged(TOY):
        ((_, case),) = instances("toy", IMAGE)
    sliced = type("Sliced", (case.supernet.make,), {"masked": Supernet.masked})
    return pytest.param(replace(case, supernet=replace(case.supernet, make=sliced)), id="toy without masks")


class TestWithoutMasks(ExecutionContract):
    """The masked execution is optional."""

    supernet = supernets([without_masks()])


class Toy(SearchSpace):
    """Five genes, of which one decides something."""

    name = "toy"
    genes = tuple(Gene(f"gene {index}", values) for index, values in enumerate([(3,), (5,), (1, 2, 4), (7,), (9,)]))
    named: Mapping[str, Architecture] = {}
    architectures = 3

    follows = np.zeros((5, 5), bool)

    def active_many(self, choices: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        return np.ones(choices.shape, bool)

    def cost(self, architecture: Architecture) -> Cost:
        return Cost(1, 1, 1)

    def input_sizes(self, genes: Genes) -> list[int]:
        return [8] * len(genes)

    def drawing(self, architecture: Architecture) -> BlockDiagram:
        return BlockDiagram(())


def test_a_mutant_differs_also_where_most_genes_have_one_choice() -> None:
    space, draw = Toy(None, ImageShape(1, 8, 3)), rng("toy")
    for parent in {space.sample(draw) for _ in range(60)}:
        for probability in (0.0, 0.5, 1.0):
            child = space.mutate(parent, draw, probability)
            space.check(child)
            assert child != parent and child.choices[:2] == child.choices[3:] == (0, 0)
