"""Architectures near an anchor."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from fedloom.core.seeds import rng
from fedloom.search.draws import samples
from fedloom.search.near import Near, grown
from fedloom.spaces.base import ImageShape
from fedloom.spaces.budget import Bounded, macs_limit
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings

SPACE = MobileNetV3(MobileNetV3Settings.tiny(), ImageShape(1, 8, 10))
ANCHOR = SPACE.named["medium"]


def test_a_gene_differs_with_the_probability_that_is_set() -> None:
    """Of a gene with three choices, two in three draws differ from the anchor's."""
    near = Near(SPACE, ANCHOR, 0.3)
    depths = [place for place, gene in enumerate(SPACE.genes) if gene.name.endswith("depth")] or [len(SPACE.genes) - 1]
    drawn = np.array([one.choices for one in islice(near.moved(samples(SPACE, rng(0)), rng(1)), 2000)])
    share = (drawn[:, depths] != np.array(ANCHOR.choices)[depths]).mean()
    assert share == pytest.approx(0.3 * 2 / 3, abs=0.03)


def test_at_the_ends_of_the_scale() -> None:
    """At 1 a source is what it was, and nothing more is drawn; at 0 only the anchor is left."""
    source, draw = samples(SPACE, rng(0)), rng(1)
    assert Near(SPACE, ANCHOR, 1).moved(source, draw) is source and draw.random() == rng(1).random()
    assert {next(Near(SPACE, ANCHOR, 0).moved(source, draw)) for _ in range(20)} == {ANCHOR}
    assert Near(SPACE, ANCHOR, 0).population(5, draw) == [ANCHOR]


def test_a_population_is_the_anchor_and_different_ones_that_are_valid() -> None:
    found = Near(SPACE, ANCHOR, 0.2).population(12, rng(0))
    assert found[0] == ANCHOR and len(set(found)) == 12
    for one in found:
        SPACE.check(one)
    assert found == Near(SPACE, ANCHOR, 0.2).population(12, rng(0))


def test_what_is_near_keeps_the_budget() -> None:
    limit = macs_limit(SPACE, 1.1 * SPACE.cost(ANCHOR).macs)
    space = Bounded(SPACE, (limit,))
    near = Near(space, ANCHOR, 0.8)
    assert all(space.fits(one) for one in [*near.population(20, rng(0)), *near.one(rng(1))])
    assert not all(space.fits(one) for one in Near(SPACE, ANCHOR, 0.8).population(20, rng(0)))


def test_genes_that_differ_are_counted() -> None:
    near = Near(SPACE, ANCHOR, 0.5)
    assert near.genes(ANCHOR) == 0
    other = SPACE.mutate(ANCHOR, rng(0))
    assert near.genes(other) == sum(a != b for a, b in zip(ANCHOR.choices, other.choices, strict=True)) > 0


def test_the_distance_grows_to_its_value() -> None:
    assert [grown(0.4, round, first=2, rounds=6) for round in (2, 3, 4, 5, 6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert [grown(1, round, first=2, rounds=6) for round in (2, 6)] == [1, 1]  # as drawn
    assert grown(0.4, 6, first=6, rounds=6) == 0.4  # nothing but warm-up: the search of the final participation
