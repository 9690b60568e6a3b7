"""Whatever the budget, every architecture within it lies in the part of the supernet that its client receives."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from fedloom.core.architecture import Architecture
from fedloom.core.errors import BadReport, InvalidConfig
from fedloom.core.seeds import rng
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.spaces.budget import Limit, macs_limit
from fedloom.supernets.base import Region, Supernet, make_supernet
from fedloom.supernets.reach import Reach
from fedloom.training.fleet import Tier


@cache
def tiny(name: str) -> Supernet[Any]:
    return make_supernet(name, SPACES[name].settings.tiny(), ImageShape(channels=1, size=8, classes=3))


@cache
def tier(name: str, tenths: int, kind: str = "macs") -> Tier:
    """Some of the way from the smallest to the largest architecture, or of the supernet's entries."""
    supernet = tiny(name)
    if kind == "supernet":
        return Tier(supernet, (), supernet_limit=tenths / 10 * sum(int(np.prod(shape)) for shape in supernet.shapes.values()))
    limit = macs_limit(supernet.space, 0)
    if kind == "parameters":
        limit = Limit("parameters", 0, lambda architecture: supernet.space.cost(architecture).parameters, "parameters")
    low, high = (limit.need(supernet.space.named[size]) for size in ("smallest", "largest"))
    return Tier(supernet, (Limit(kind, low + tenths / 10 * (high - low), limit.need, limit.unit),))


CASES = [(name, tenths, kind) for name in SPACES for tenths, kind in ((0, "macs"), (3, "parameters"), (7, "supernet"))]
every_case = pytest.mark.parametrize(("name", "tenths", "kind"), CASES)


@every_case
def test_what_fits_lies_in_the_part_and_what_is_drawn_fits(name: str, tenths: int, kind: str) -> None:
    own, draw = tier(name, tenths, kind), rng(name, tenths)
    regions = own.supernet.regions
    for architecture in (own.space.sample(draw), own.space.mutate(own.space.sample(draw), draw, 0.5), *own.space.fair(draw)):
        assert all(limit.need(architecture) <= limit.most for limit in own.limits)
        assert own.reach is None or own.reach.holds(own.supernet.regions(architecture))
    for free in (own.supernet.space.sample(draw) for _ in range(50)):  # reach takes nothing away that the budget allows
        fits = all(limit.need(free) <= limit.most for limit in own.limits)
        assert own.space.fits(free) == fits if kind != "supernet" else own.reach and own.space.fits(free) <= own.reach.holds(regions(free))


@pytest.mark.parametrize("name", SPACES)
def test_a_weak_tier_gets_less(name: str) -> None:
    weak, supernet = tier(name, 0), tiny(name)
    assert weak.reach and weak.reach.entries < 0.7 * sum(int(np.prod(shape)) for shape in supernet.shapes.values())
    assert not weak.reach.holds(supernet.regions(supernet.space.named["largest"]))
    assert tier(name, 10).reach is None  # everything is within reach of a budget that the largest fits
    seven = tier(name, 7, "supernet")
    assert seven.reach and seven.reach.entries <= seven.supernet_limit
    with pytest.raises(InvalidConfig, match=r"budget.supernet \(1\) is too little"):
        _ = Tier(supernet, (), supernet_limit=1.0).space


@every_case
def test_a_part_goes_back_to_its_place_with_its_coverage(name: str, tenths: int, kind: str) -> None:
    own, draw = tier(name, tenths, kind), rng(name, tenths)
    if own.reach is None:
        return
    weights = {key: np.asarray(draw.normal(size=shape), np.float32) for key, shape in own.supernet.shapes.items()}
    coverage = {key: array.numpy() for key, array in own.supernet.coverage({own.space.sample(draw): 2, own.space.sample(draw): 1}).items()}
    part = own.reach.cut(weights)
    assert sum(array.size for array in part.values()) == own.reach.entries
    placed = own.reach.placed(part)
    again = own.reach.cut(placed)
    assert all(np.array_equal(again[key], part[key]) for key in part)
    assert sum(np.count_nonzero(array) for array in placed.values()) <= own.reach.entries
    back = own.reach.placed(own.reach.cut(coverage))
    for key, counts in coverage.items():  # exact: nothing that was trained is lost, nothing else appears
        assert np.array_equal(np.broadcast_to(back[key], weights[key].shape), np.broadcast_to(counts, weights[key].shape))


def test_coverage_that_stands_for_a_part_of_an_axis_is_written_out() -> None:
    """A report may say one number for a whole axis of its part; in the supernet that is not the whole axis."""
    reach = Reach({"a": (slice(0, 2), slice(0, 3))}, {"a": (4, 3), "b": (2,)})
    placed = reach.placed({"a": np.ones((1, 1), bool)})
    assert placed["a"].tolist() == [[True], [True], [False], [False]] and not placed["b"].any()
    with pytest.raises(BadReport, match="part of the supernet"):
        reach.placed({"b": np.ones(1)})


def test_a_supernet_whose_choices_do_not_contain_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    supernet = make_supernet("mobilenetv3", SPACES["mobilenetv3"].settings.tiny(), ImageShape(1, 8, 3))
    regions, (limit,) = supernet.regions, tier("mobilenetv3", 3).limits

    def odd(architecture: Architecture) -> Mapping[str, Region]:
        """Only cheap architectures use all of the classifier."""
        cheap = limit.need(architecture) <= limit.most
        return {**regions(architecture), "classifier.bias": (slice(None) if cheap else slice(0, 1),)}

    monkeypatch.setattr(supernet, "regions", odd)
    with pytest.raises(InvalidConfig, match="Set one limit for all"):
        _ = Tier(supernet, (limit,)).reach
