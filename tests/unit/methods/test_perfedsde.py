"""PerFedSDE-NAS: what its settings mean, and where its candidates come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import Instruction
from fedloom.core.method import Answer
from fedloom.methods import perfedsde
from fedloom.search import candidates
from fedloom.spaces.budget import Bounded
from fedloom.testing import Played
from fedloom.training import tools
from fedloom.training.scoring import Scored, best_first
from support.perfedsde import overheard
from support.untrained import FakeGenerator, fake_generator, loading

Tiny = Callable[..., Settings]


@pytest.fixture
def generators() -> Iterator[list[FakeGenerator]]:
    with fake_generator() as loaded:
        yield loaded


def population_of(answer: Answer) -> list[Architecture]:
    return [Architecture("mobilenetv3", tuple(row.tolist())) for row in answer.memory.arrays["population"]]


# -- where candidates come from ---------------------------------------------------------


@pytest.mark.parametrize("source", ["evolution", "random"])
@pytest.mark.parametrize("surrogate", ["none", "rbf"])
def test_who_uses_no_generator_loads_none(source: str, surrogate: str, tiny: Tiny) -> None:
    def load(*given: Any) -> None:
        raise AssertionError("nobody asked for it")

    with loading(load):
        played = Played(tiny("participants=1", f"perfedsde.generator={source}", f"perfedsde.surrogate={surrogate}"))
        answer = played.round()[0]
    assert "guided" not in answer.diary.notes and 0 < answer.diary.notes["unique_share"] <= 1
    assert set(population_of(answer)) and answer.diary.evaluated_architectures == 4 + 2


def test_a_generator_that_cannot_be_loaded_is_refused_before_the_first_round(tiny: Tiny) -> None:
    def load(*given: Any) -> None:
        raise InvalidConfig("made for another space")

    with loading(load), pytest.raises(InvalidConfig, match="made for another space"):
        Played(tiny())


def test_the_generator_is_loaded_once_for_the_whole_space(tiny: Tiny) -> None:
    asked: list[tuple[Any, ...]] = []

    def load(*given: Any) -> FakeGenerator:
        asked.append(given)
        return FakeGenerator(given[0])

    budget = 1e9
    with loading(load):
        changes = (
            "perfedsde.generator_file=mine.safetensors",
            "perfedsde.features=theirs",
            "perfedsde.sampler=pc",
            "perfedsde.steps=7",
            f"budget.macs={budget}",
        )
        played = Played(tiny("participants=1", *changes))
        played.round()
        played.round()
    assert isinstance(played.method.tools.space, Bounded)
    assert asked == [(played.method.tools.supernet.space, "mine.safetensors", "theirs", torch.device("cpu"), "pc", 7, True)]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (("perfedsde.candidates=7",), 3 * 7),
        (("perfedsde.candidates=1",), 3 * 2),
        (("perfedsde.candidates=7", "perfedsde.surrogate=none"), 3 * 2),
    ],
)
def test_one_draw_serves_all_iterations(changes: tuple[str, ...], wanted: int, tiny: Tiny, generators: list[FakeGenerator]) -> None:
    played = Played(tiny("clients=2", "perfedsde.iterations=3", *changes))
    answers = played.round()
    (generator,) = generators
    assert [count for count, _, _ in generator.calls] == [wanted] * len(answers)
    for answer in answers:
        assert answer.diary.evaluated_architectures == 4 + 3 * 2


def test_drawn_beside_the_scoring_or_before_it_is_the_same(
    tiny: Tiny, generators: list[FakeGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, here in a thread of the CPU."""
    played = Played(tiny("participants=1", "perfedsde.iterations=2"))
    (instruction,) = played.method.plan(played.state, played.federation.names)
    one = played.answer(instruction)
    drawn_beside = candidates.drawn_beside
    used: list[object] = []
    monkeypatch.setattr(candidates, "drawn_beside", lambda work, device: (used.append(work), drawn_beside(work, torch.device("cpu")))[1])
    monkeypatch.setitem(vars(played.method.tools), "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(type(played.method.tools), "tensors", lambda self, arrays: {n: torch.tensor(a) for n, a in arrays.items()})
    two = played.answer(instruction)
    assert used and population_of(one) == population_of(two) and one.diary == two.diary
    for name, update in one.report.arrays["update"].items():
        assert update.tobytes() == two.report.arrays["update"][name].tobytes()


def test_other_clients_and_rounds_get_other_candidates(tiny: Tiny, generators: list[FakeGenerator]) -> None:
    played = Played(tiny("clients=2", "perfedsde.population=1"))
    with overheard(played.method) as secrets:
        played.round()
        played.round()
    each = np.array_split(np.array([one.choices for one in secrets.drawn]), 4)
    assert len({part.tobytes() for part in each}) == 4


@pytest.mark.parametrize(("guidance", "guided"), [(-1, 1), (2.5, 1), (0, 0)])
def test_guidance(guidance: float, guided: int, tiny: Tiny, generators: list[FakeGenerator]) -> None:
    (answer,) = Played(tiny("participants=1", f"perfedsde.guidance={guidance}")).round()
    assert answer.diary.notes["guided"] == guided == (generators[0].calls[0][1] is not None)


def test_a_strength_that_nobody_can_use_is_refused_before_the_first_round(tiny: Tiny) -> None:
    with fake_generator(guided=False), pytest.raises(InvalidConfig, match=r"perfedsde.guidance is 5, but the generator of .* no predictor"):
        Played(tiny("perfedsde.guidance=5"))
    with fake_generator(), pytest.raises(InvalidConfig, match=r"perfedsde.guidance is -0.5. It is 0 or more, or -1"):
        Played(tiny("perfedsde.guidance=-0.5"))


def test_a_gene_with_many_choices_is_remembered(tiny: Tiny) -> None:
    space = Played(tiny()).method.tools.space
    assert space.compact == np.uint8
    space.__dict__["sizes"] = np.array([300])
    assert space.compact == np.uint16


def test_candidates_over_budget_are_neither_scored_nor_kept(tiny: Tiny, generators: list[FakeGenerator]) -> None:
    space = Played(tiny("perfedsde.generator=random")).method.tools.space
    most = sum(space.cost(space.named[name]).macs for name in ("smallest", "medium")) / 2
    played = Played(tiny("participants=1", f"budget.macs={most}", "perfedsde.iterations=2", "perfedsde.candidates=20"))
    with overheard(played.method) as secrets:
        answers = played.round()
    assert any(space.cost(one).macs > most for one in secrets.drawn)
    assert all(space.cost(one.architecture).macs <= most for call in secrets.scored for one in call)
    assert all(0 < answer.diary.notes["over_budget_share"] < 1 for answer in answers)


# -- the search ---------------------------------------------------------------------------


def test_the_surrogate_learns_from_the_population_as_it_is_now(
    tiny: Tiny, generators: list[FakeGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Algorithm 1, lines 12-14 and 20: each iteration fits the population that the iteration before left."""
    fitted: list[tuple[np.ndarray, np.ndarray]] = []
    entry = perfedsde.SURROGATES["rbf"]

    def listen(points: np.ndarray, scores: np.ndarray) -> Any:
        fitted.append((points, scores))
        return entry.make(points, scores)

    monkeypatch.setitem(perfedsde.SURROGATES, "rbf", replace(entry, make=listen))
    played = Played(tiny("perfedsde.iterations=3", "participants=1"))
    with overheard(played.method) as secrets:
        (answer,) = played.round()
    space = played.method.tools.space
    population, *offspring = secrets.scored
    assert len(fitted) == len(offspring) == 3
    for (points, scores), new in zip(fitted, offspring, strict=True):
        population = best_first(population)[:4]
        assert points.tolist() == [space.encode(member.architecture).tolist() for member in population]
        assert scores.tolist() == [member.score.accuracy for member in population]
        assert {one.architecture for one in new} <= set(secrets.drawn)
        population = [*population, *new]
    assert population_of(answer) == [member.architecture for member in best_first(population)[:4]]


@pytest.mark.parametrize(("archive", "size"), [("true", 2), ("false", 4)])
def test_without_an_archive_the_whole_population_is_trained(
    archive: str, size: int, tiny: Tiny, generators: list[FakeGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[list[Architecture]] = []
    one_of = perfedsde.one_of
    monkeypatch.setattr(perfedsde, "one_of", lambda subnets: (trained.append(list(subnets)), one_of(subnets))[1])
    played = Played(tiny(f"perfedsde.archive={archive}", "perfedsde.archive_size=2", "participants=1"))
    with overheard(played.method) as secrets:
        played.round()
    assert trained == [[one.architecture for one in best_first(secrets.scored[0])[:size]]]


def test_in_a_race_what_is_trained_and_chosen_was_scored_on_all_images(
    tiny: Tiny, generators: list[FakeGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of a first stage come after all others, in a population and when offspring join it. Only a population races."""
    raced: list[list[Scored]] = []
    race = tools.race
    monkeypatch.setattr(tools, "race", lambda *given: (found := race(*given), raced.extend(found))[0])
    played = Played(tiny("perfedsde.racing=0.5", "perfedsde.population=6", "perfedsde.iterations=2", "participants=1"))
    with overheard(played.method) as secrets:
        (answer,) = played.round()
    assert [len(found) for found in raced] == [6] and sum(not one.score.rough for one in raced[0]) == 2
    offspring = secrets.scored[-2:]
    assert [len(found) for found in offspring] == [2, 2] and not any(one.score.rough for found in offspring for one in found)
    population = raced[0]
    for found in offspring:
        population = best_first([*population, *found])[:6]
    assert [one.score.rough for one in population] == [False] * 6
    assert population_of(answer) == [one.architecture for one in population]
    assert answer.diary.evaluated_architectures == 6 + 2 + 2


def test_stages_and_numbers_in_the_diary(tiny: Tiny, generators: list[FakeGenerator]) -> None:
    played = Played(tiny("perfedsde.iterations=3", "perfedsde.offspring=5", "perfedsde.candidates=20", "participants=1"))
    (instruction,) = played.method.plan(played.state, played.federation.names)
    site = played.site(instruction.client)
    diary = played.method.answer(instruction, site).diary
    assert set(site.clock.seconds) == {"generate", "surrogate", "train", "rescore", "score", "test"}
    always = {"covered_share", "best_score", "median_score", "unique_share", "known_share", "guided"}
    assert always <= set(diary.notes) <= {*always, "rbf_rank_correlation"}
    assert -1 <= diary.notes.get("rbf_rank_correlation", 0) <= 1
    assert all(type(value) is float for value in diary.notes.values())


# -- the last participation ------------------------------------------------------------------


@pytest.mark.parametrize("source", ["diffusion", "evolution", "random"])
def test_a_newcomer_searches_with_the_same_source(source: str, tiny: Tiny, generators: list[FakeGenerator]) -> None:
    played = Played(tiny("participants=1", f"perfedsde.generator={source}", "perfedsde.iterations=2"))
    (known,) = played.round()
    drawn = [len(generator.calls) for generator in generators]
    assert played.farewell(known.report.client).diary.evaluated_architectures == 4
    assert [len(generator.calls) for generator in generators] == drawn  # who has a population only re-scores it
    newcomer = next(name for name in played.federation.names if name != known.report.client)
    answer = played.farewell(newcomer)
    assert answer.diary.evaluated_architectures == 4 + 2 * 2 and "unique_share" in answer.diary.notes
    assert [len(generator.calls) for generator in generators] == [calls + 1 for calls in drawn]


# -- the server --------------------------------------------------------------------------------


@pytest.mark.parametrize("averaging", ["coverage", "coverage_equal", "coverage_effort", "fedavg"])
def test_the_manifest(averaging: str, tiny: Tiny, generators: list[FakeGenerator]) -> None:
    method = Played(tiny(f"perfedsde.averaging={averaging}")).method
    assert set(method.uploads) == {"update", "coverage", "examples"} - ({"coverage"} if averaging == "fedavg" else set())


def test_instructions_carry_the_supernet_alone(tiny: Tiny, generators: list[FakeGenerator]) -> None:
    played = Played(tiny())
    for instruction in [*played.method.plan(played.state, played.federation.names), played.method.farewell(played.state, "client-000")]:
        assert isinstance(instruction, Instruction)
        assert set(instruction.arrays) == {"weights"} and instruction.facts == {}
        assert set(instruction.arrays["weights"]) == set(played.method.tools.supernet.shapes)
