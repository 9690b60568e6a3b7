"""Whatever the budget, everything drawn from a bounded space fits it."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.seeds import rng
from fedloom.spaces.base import SPACES, ImageShape, SearchSpace
from fedloom.spaces.budget import Bounded, BudgetSettings, bounded, training_memory_mb

BATCH = 16
SHARES = st.floats(0, 1)


@cache
def tiny(name: str) -> SearchSpace:
    return SPACES[name].make(SPACES[name].settings.tiny(), ImageShape(channels=1, size=8, classes=3))


def needs(space: SearchSpace, architecture: object) -> dict[str, float]:
    cost = space.cost(architecture)  # type: ignore[arg-type]
    return {"parameters": cost.parameters, "macs": cost.macs, "memory_mb": training_memory_mb(cost, cost.parameters, BATCH)}


@st.composite
def budgets(draw: st.DrawFn) -> tuple[SearchSpace, BudgetSettings]:
    """A space, and limits between its smallest and its largest architecture; some limits absent, together any or none."""
    space = tiny(draw(st.sampled_from(list(SPACES))))
    low, high = (needs(space, space.named[name]) for name in ("smallest", "largest"))
    chosen = draw(st.sets(st.sampled_from(sorted(low))))
    return space, BudgetSettings(**{key: low[key] + draw(SHARES) * (high[key] - low[key]) for key in sorted(chosen)})


@given(budgets(), st.integers(0, 2**32), st.floats(0, 1), st.booleans())
def test_everything_drawn_fits(case: tuple[SearchSpace, BudgetSettings], seed: int, probability: float, over: bool) -> None:
    whole, budget = case
    space, draw = bounded(whole, budget, BATCH, lambda architecture: 0.0), rng(seed)
    assert isinstance(space, Bounded) == any((budget.parameters, budget.macs, budget.memory_mb))
    parents = [(whole if over else space).sample(draw) for _ in range(2)]  # parents that do not fit have children that do
    drawn = [space.sample(draw), *space.fair(draw), space.mutate(parents[0], draw, probability), space.crossover(*parents, draw)]
    drawn += [space.decode(draw.normal(0.5, 2, len(space.genes))), space.decode(np.full(len(space.genes), np.nan))]
    for architecture in drawn:
        whole.check(architecture)
        for key, need in needs(whole, architecture).items():
            assert not getattr(budget, key) or need <= getattr(budget, key)


@given(st.sampled_from(list(SPACES)), st.integers(0, 2**32), st.floats(0, 1))
def test_without_a_limit_that_is_felt_draws_are_those_of_the_whole_space(name: str, seed: int, probability: float) -> None:
    whole = tiny(name)
    for budget in (BudgetSettings(), BudgetSettings(parameters=1e12, macs=1e15)):
        space, one, other = bounded(whole, budget, BATCH, lambda architecture: 0.0), rng(seed), rng(seed)
        for _ in range(2):
            parent, same = space.sample(one), whole.sample(other)
            assert parent == same and space.fair(one) == whole.fair(other)
            assert space.mutate(parent, one, probability) == whole.mutate(parent, other, probability)
            assert space.crossover(parent, whole.named["largest"], one) == whole.crossover(parent, whole.named["largest"], other)
        assert one.bit_generator.state == other.bit_generator.state


@given(budgets(), st.integers(0, 2**32))
def test_a_draw_depends_on_its_generator_alone(case: tuple[SearchSpace, BudgetSettings], seed: int) -> None:
    whole, budget = case
    first, second = (bounded(whole, budget, BATCH, lambda architecture: 0.0) for _ in range(2))
    second.sample(rng("something else"))
    assert [first.sample(rng(seed)) for _ in range(2)] == [second.sample(rng(seed)) for _ in range(2)]
