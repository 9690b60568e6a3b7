"""Draws without end, and the new ones among them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, repeat

import pytest

from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.search.draws import children, new_ones, samples
from fedloom.spaces.base import ImageShape
from fedloom.spaces.budget import Bounded, macs_limit
from fedloom.spaces.darts import DARTS, DARTSSettings


def test_two_parents_give_two_children_that_share_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    space = DARTS(DARTSSettings(), ImageShape(3, 32, 10))  # every gene is always active
    monkeypatch.setattr(type(space), "mutate", lambda self, parent, rng, probability: parent)
    parents = [space.sample(rng(number)) for number in range(2)]
    brood = list(islice(children(space, parents, 0.1, rng(5), twins=True), 40))
    mixed = 0
    for one, other in zip(brood[::2], brood[1::2], strict=True):
        pairs = list(zip(one.choices, other.choices, strict=True))
        both = [sorted(pair) for pair in zip(*(parent.choices for parent in parents), strict=True)]
        if one != other:  # of two different parents
            assert [sorted(pair) for pair in pairs] == both
            mixed += 1
    assert 5 < mixed < 20  # about half of the pairs are of one parent with itself


@pytest.mark.parametrize("twins", [False, True])
def test_children_mutate_on_their_own(twins: bool) -> None:
    space = DARTS(DARTSSettings(), ImageShape(3, 32, 10))
    parent = space.sample(rng(0))
    brood = list(islice(children(space, [parent], 0.1, rng(1), twins), 6))
    assert parent not in brood and len(set(brood)) > 3


def test_what_is_taken_is_new_and_different_and_a_useless_source_is_left() -> None:
    space = DARTS(DARTSSettings(), ImageShape(3, 32, 10))
    a, b, c, d = (space.sample(rng(number)) for number in range(4))
    assert new_ones(space, iter([a, b, b, c, a, d]), 2, [a]) == [b, c]
    assert new_ones(space, iter([a, b, b, c, a, d]), 9, [a]) == [b, c, d]
    assert new_ones(space, iter([a, b]), 0) == []

    def tired() -> Iterator[Architecture]:
        yield b
        yield from repeat(b, 99)
        yield c  # one earlier than too late
        yield from repeat(b, 100)
        raise AssertionError("asked once more")

    assert new_ones(space, tired(), 3) == [b, c]
    assert new_ones(space, iter([b, b, b, c]), 2, patience=2) == [b]


def test_nothing_over_budget_is_taken() -> None:
    whole = DARTS(DARTSSettings(), ImageShape(3, 32, 10))
    drawn = list(islice(samples(whole, rng(0)), 50))
    needs = [whole.cost(one).macs for one in drawn]
    narrow = Bounded(whole, (macs_limit(whole, sorted(needs)[25]),))
    taken = new_ones(narrow, iter(drawn), 50)
    assert taken == [one for one in drawn if narrow.fits(one)] and len(taken) == 26
