"""Candidates: where they come from, what is left out, and what the surrogate picks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Stopwatch
from fedloom.core.errors import InvalidConfig
from fedloom.core.seeds import rng
from fedloom.search import candidates as module
from fedloom.search.candidates import Candidates, drawn_beside
from fedloom.search.draws import PATIENCE
from fedloom.spaces.base import SPACES, ImageShape, SearchSpace
from fedloom.spaces.budget import BudgetSettings, bounded
from fedloom.training.scoring import Score, Scored, best_first
from fedloom.training.together import answers, together
from support.untrained import FakeGenerator


def make_space(budget: float = 0.0) -> SearchSpace:
    entry = SPACES["mobilenetv3"]
    whole = entry.make(entry.settings.tiny(), ImageShape(1, 8, 10))
    return bounded(whole, BudgetSettings(macs=budget), 8, lambda architecture: 0.0)


SPACE = make_space()
COSTS = [SPACE.cost(SPACE.named[name]).macs for name in ("smallest", "medium")]
TIGHT = make_space(sum(COSTS) / 2)


def truth(architecture: Architecture) -> float:
    """An accuracy that follows linearly from the genes."""
    return float(SPACE.encode(architecture) @ np.linspace(0, 1, len(SPACE.genes))) / 20


def population_of(count: int, space: SearchSpace = SPACE, name: str = "population") -> list[Scored]:
    draw = rng(name)
    return best_first([Scored(one, Score(truth(one), 1.0)) for one in (space.sample(draw) for _ in range(count))])


def make(source: str, space: SearchSpace = SPACE, surrogate: str = "none", **changes: Any) -> Candidates:
    given: dict[str, Any] = {"offspring": 4, "count": 30, "mutation": 0.1, "clock": Stopwatch(), **changes}
    if source == "diffusion":
        given = {"draw": FakeGenerator(SPACE).draw, "pool": lambda: FakeGenerator(SPACE).draw(500, rng("pool")), **given}
    return Candidates(space=space, source=source, surrogate=surrogate, **given)


def listed(*drawn: Architecture, more: Sequence[Architecture] = ()) -> dict[str, Any]:
    """A pool that holds these; further draws give ``more``."""
    return {"pool": lambda: drawn, "draw": lambda wanted, draw: list(more)[:wanted]}


# -- every source -------------------------------------------------------------------

SOURCES = pytest.mark.parametrize("source", ["evolution", "random", "diffusion"])


@SOURCES
@pytest.mark.parametrize("surrogate", ["none", "rbf"])
@pytest.mark.parametrize("space", [SPACE, TIGHT], ids=["whole", "budget"])
def test_offspring_are_new_different_within_budget_and_repeatable(source: str, surrogate: str, space: SearchSpace) -> None:
    population = population_of(50, space)
    one, again = (make(source, space, surrogate).choose(population, rng("choose")) for _ in range(2))
    assert one == again and len(one) == len(set(one)) == 4
    assert not set(one) & {member.architecture for member in population}
    for architecture in one:
        SPACE.check(architecture)
        assert space is SPACE or SPACE.cost(architecture).macs <= sum(COSTS) / 2


@SOURCES
def test_the_surrogate_picks_the_best_of_many(source: str) -> None:
    """Scores are linear in the genes, so the surrogate knows the truth and its choice is the best of all candidates."""
    population = population_of(135)
    members = {member.architecture for member in population}
    looking = make(source, surrogate="rbf")
    seen: list[Architecture] = []
    counted = looking._counted
    looking._counted = lambda *given: (seen.append(one) or one for one in counted(*given))  # type: ignore
    chosen = looking.choose(population, rng("choose"))
    new = [one for one in dict.fromkeys(seen) if one not in members]
    assert len(new) >= 25
    assert chosen == sorted(new, key=truth, reverse=True)[:4]
    looking.compare([Scored(one, Score(truth(one), 1.0)) for one in chosen])
    assert looking.notes["rbf_rank_correlation"] == 1
    assert set(looking.clock.seconds) == {"generate", "surrogate"}


def test_evolution_makes_children_of_the_population() -> None:
    first = SPACE.named["smallest"]
    population = [Scored(first, Score(0.5, 1.0))]
    for child in make("evolution", mutation=0.02).choose(population, rng("choose")):
        assert np.count_nonzero(np.array(child.choices) != np.array(first.choices)) < 10  # a random one differs in about 30 genes


def test_evolution_draws_child_by_child() -> None:
    """Written out: so many draws from the generator of numbers and no more, so that a run of before the surrogate repeats bit by bit."""
    population = population_of(6)
    parents, draw, expected = [member.architecture for member in population], rng("choose"), []
    while len(expected) < 4:
        first, second = draw.integers(6, size=2)
        child = SPACE.mutate(SPACE.crossover(parents[first], parents[second], draw), draw, 0.1)
        if child not in [*parents, *expected]:
            expected.append(child)
    used = rng("choose")
    assert make("evolution").choose(population, used) == expected
    assert used.random() == draw.random()


def test_random_ones_do_not_depend_on_the_population() -> None:
    one, other = (make("random").choose(population_of(5, name=name), rng("choose")) for name in ("one", "other"))
    assert one == other


# -- the pool -------------------------------------------------------------------------


def test_iterations_take_their_parts_of_the_pool_in_turn() -> None:
    drawn = FakeGenerator(SPACE).draw(12, rng("pool"))
    looking = make("diffusion", **listed(*drawn))
    population = population_of(3)
    assert [looking.choose(population, rng("choose", turn)) for turn in range(3)] == [drawn[:4], drawn[4:8], drawn[8:]]
    wide = make("diffusion", surrogate="rbf", count=6, **listed(*drawn))
    for part in (drawn[:6], drawn[6:]):
        assert set(wide.choose(population, rng("choose"))) <= set(part)


def test_an_iteration_looks_at_no_fewer_than_its_offspring() -> None:
    assert make("random", surrogate="rbf", count=2).per_iteration == 4
    assert make("random", surrogate="rbf", count=30).per_iteration == 30
    assert make("random", surrogate="none", count=30).per_iteration == 4


def test_drawn_beside_is_drawn_in_another_thread_and_waited_for() -> None:
    drawn, go_on, threads = FakeGenerator(SPACE).draw(3, rng("pool")), threading.Event(), []

    def work() -> list[Architecture]:
        assert go_on.wait(10)
        threads.append(threading.current_thread())
        return drawn

    pool = drawn_beside(work, torch.device("cpu"))
    assert threads == []  # the caller went on
    go_on.set()
    assert pool() == drawn and threads != [threading.current_thread()]


def test_clients_served_together_draw_beside_as_one() -> None:
    """What they ask for inside is done together, and each gets its own."""
    sizes: list[int] = []

    def draw(requests: Sequence[int]) -> list[list[Architecture]]:
        sizes.append(len(requests))
        return [FakeGenerator(SPACE).draw(number, rng("pool")) for number in requests]

    def client(number: int) -> Sequence[Architecture]:
        pool = drawn_beside(lambda: together(draw, [number])[0], torch.device("cpu"))
        assert together(list, [number]) == [number]  # other work, meanwhile
        return pool()

    assert answers([partial(client, number) for number in (3, 1, 2)]) == [FakeGenerator(SPACE).draw(n, rng("pool")) for n in (3, 1, 2)]
    assert sizes == [3]


def test_an_error_beside_is_an_error_here() -> None:
    def work() -> list[Architecture]:
        raise InvalidConfig("broken")

    pool = drawn_beside(work, torch.device("cpu"))
    with pytest.raises(InvalidConfig, match="broken"):
        pool()


# -- too few new ones -------------------------------------------------------------------


def test_known_and_repeated_ones_are_replaced_by_further_draws() -> None:
    population = population_of(3)
    known = population[0].architecture
    a, b, c, d = FakeGenerator(SPACE).draw(4, rng("new"))
    looking = make("diffusion", **listed(known, a, a, known, more=[a, known, b, c, d]))
    assert looking.choose(population, rng("choose")) == [a, b, c, d]
    assert looking.notes == {"unique_share": 5 / 9, "known_share": 3 / 9}


@pytest.mark.parametrize("surrogate", ["none", "rbf"])
def test_a_source_of_nothing_new_is_left_for_chance(surrogate: str) -> None:
    population = population_of(3)
    known = population[0].architecture
    asked = count()

    def draw(wanted: int, draw: np.random.Generator) -> list[Architecture]:
        next(asked)
        return [known] * wanted

    chosen = make("diffusion", surrogate=surrogate, pool=lambda: [known] * 50, draw=draw).choose(population, rng("choose"))
    assert len(set(chosen)) == 4 and known not in chosen
    assert next(asked) == 1  # one batch of PATIENCE known ones is enough to give up


def test_further_draws_are_only_for_offspring_not_for_the_surrogates_choice() -> None:
    drawn = FakeGenerator(SPACE).draw(5, rng("pool"))
    looking = make("diffusion", surrogate="rbf", **listed(*drawn, more=[SPACE.named["largest"]]))
    assert set(looking.choose(population_of(3), rng("choose"))) <= set(drawn)


def test_those_over_budget_are_left_out_and_counted() -> None:
    drawn = [SPACE.named["largest"], *(TIGHT.sample(rng("fits", number)) for number in range(3)), SPACE.named["medium"]]
    looking = make("diffusion", TIGHT, **listed(*drawn, more=[SPACE.named["largest"]]))
    chosen = looking.choose(population_of(3, TIGHT), rng("choose"))
    assert chosen[:3] == drawn[1:4] and len(chosen) == 4 and TIGHT.cost(chosen[3]).macs <= sum(COSTS) / 2
    assert looking.notes["over_budget_share"] == pytest.approx((1 + PATIENCE) / (4 + PATIENCE + 1))
    assert "over_budget_share" not in make("diffusion").notes


class Small(FakeGenerator):
    """A space of three architectures, and a generator of them."""

    few = tuple(SPACE.sample(rng("few", number)) for number in range(3))

    def sample(self, draw: np.random.Generator) -> Architecture:
        return self.few[int(draw.integers(3))]

    def mutate(self, parent: Architecture, draw: np.random.Generator, mutation: float) -> Architecture:
        return self.sample(draw)

    def __getattr__(self, name: str) -> Any:
        return getattr(SPACE, name)

    def draw(self, wanted: int, draw: np.random.Generator, *more: Any) -> list[Architecture]:
        return [self.sample(draw) for _ in range(wanted)]


@SOURCES
@pytest.mark.parametrize("surrogate", ["none", "rbf"])
def test_fewer_only_where_the_space_is_exhausted(source: str, surrogate: str) -> None:
    small: Any = Small(SPACE)
    own = {"draw": small.draw, "pool": lambda: small.draw(500, rng("pool"))} if source == "diffusion" else {}
    population = [Scored(small.few[0], Score(0.5, 1.0))]
    assert set(make(source, small, surrogate, **own).choose(population, rng("choose"))) == set(small.few[1:])
    everyone = [Scored(one, Score(0.5, 1.0)) for one in small.few]
    looking = make(source, small, surrogate, **own)
    assert looking.choose(everyone, rng("choose")) == []
    looking.compare([])
    assert looking.notes["known_share"] == 1


# -- notes -----------------------------------------------------------------------------


def test_without_a_surrogate_nothing_is_compared() -> None:
    looking = make("random")
    assert looking.notes == {}
    chosen = looking.choose(population_of(3), rng("choose"))
    looking.compare([Scored(one, Score(truth(one), 1.0)) for one in chosen])
    assert looking.notes == {"unique_share": 1, "known_share": 0}


def test_the_rank_correlation_is_the_mean_over_iterations_in_which_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def predict(self, encodings: np.ndarray) -> np.ndarray:
            return -np.arange(len(encodings), dtype=float)

    monkeypatch.setitem(module.SURROGATES, "rbf", replace(module.SURROGATES["rbf"], make=lambda points, scores: Model()))
    looking = make("random", surrogate="rbf", offspring=3, count=5)
    population = population_of(3)
    for accuracies in ([0.3, 0.2, 0.1], [0.1, 0.2, 0.3], [0.3, 0.1, 0.2], [0.2, 0.2, 0.2]):
        chosen = looking.choose(population, rng("choose", str(accuracies)))
        looking.compare([Scored(one, Score(accuracy, 1.0)) for one, accuracy in zip(chosen, accuracies, strict=True)])
    assert looking.notes["rbf_rank_correlation"] == pytest.approx((1 - 1 + 0.5) / 3)
