"""PerFedSDE-NAS with an anchor: what it trains, when it searches, whom it compares and what it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientMemory
from fedloom.core.errors import InvalidArchitecture, InvalidConfig
from fedloom.core.method import Answer
from fedloom.testing import Played
from fedloom.training.finetuning import Finetuning
from fedloom.training.local import SupernetJob, Trainer
from fedloom.training.scoring import Scorer
from support.perfedsde import overheard
from support.untrained import FakeGenerator, fake_generator

Tiny = Callable[..., Settings]
ANCHOR = ("perfedsde.anchor=medium", "perfedsde.sampling=near", "perfedsde.distance=0.3")
FAIR = (*ANCHOR, "perfedsde.same_weights=true", "perfedsde.criterion=loss", "perfedsde.iterations=2", "participants=1")


@pytest.fixture
def generators() -> Iterator[list[FakeGenerator]]:
    with fake_generator() as loaded:
        yield loaded


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[SupernetJob]:
    """Everything that is trained in rounds."""
    heard: list[SupernetJob] = []
    train = Trainer._train_supernets
    monkeypatch.setattr(Trainer, "_train_supernets", lambda self, given: (heard.extend(given), train(self, given))[1])
    return heard


def members(answer: Answer) -> list[Architecture]:
    return [Architecture("mobilenetv3", tuple(row.tolist())) for row in answer.memory.arrays["population"]]


def coverage(played: Played, architectures: list[Architecture]) -> dict[str, np.ndarray]:
    return {name: (count > 0).numpy() for name, count in played.method.tools.supernet.coverage(Counter(architectures)).items()}


# -- what a step trains ---------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["near", "archive", "fair"])
def test_every_step_trains_the_anchor_which_teaches_what_is_drawn(
    sampling: str, tiny: Tiny, generators: list[FakeGenerator], jobs: list[SupernetJob]
) -> None:
    played = Played(tiny("participants=1", "perfedsde.anchor=medium", f"perfedsde.sampling={sampling}"))
    (answer,) = played.round()
    anchor = played.method.tools.space.named["medium"]
    assert jobs and all(job.taught for job in jobs)
    for job in jobs:
        first, *others = job.draw(np.random.default_rng(0))
        assert first == anchor and len(others) == (3 if sampling == "fair" else 1)
    covered = coverage(played, [anchor])
    for name, trained in answer.report.arrays["coverage"].items():
        assert (trained >= covered[name]).all(), name


def test_without_an_anchor_nobody_teaches(tiny: Tiny, generators: list[FakeGenerator], jobs: list[SupernetJob]) -> None:
    Played(tiny("participants=1")).round()
    assert jobs and not any(job.taught for job in jobs) and all(len(job.draw(np.random.default_rng(0))) == 1 for job in jobs)


@pytest.mark.parametrize("course", [(), ("perfedsde.same_weights=true",)])
def test_momentum_restarts_or_goes_on(
    course: tuple[str, ...], tiny: Tiny, generators: list[FakeGenerator], jobs: list[SupernetJob]
) -> None:
    for restarts in ("true", "false"):
        jobs.clear()
        Played(tiny("participants=1", "perfedsde.iterations=3", f"perfedsde.restarts={restarts}", *course)).round()
        assert [job.momenta is None for job in jobs] == [True, restarts == "true", restarts == "true"]


# -- warm-up and distance ----------------------------------------------------------------------


def test_in_warm_up_the_anchor_trains_alone_and_nothing_is_searched(tiny: Tiny, generators: list[FakeGenerator]) -> None:
    played = Played(tiny(*FAIR, "rounds=4", "perfedsde.warmup=0.5"))
    anchor = played.method.tools.space.named["medium"]
    with overheard(played.method) as secrets:
        for _ in range(2):
            (answer,) = played.round()
            assert answer.diary.evaluated_architectures == 0 and answer.diary.architecture == anchor.id
            assert answer.diary.test_accuracy is not None and answer.memory == ClientMemory()
            expected = coverage(played, [anchor])
            assert all(np.array_equal(trained, expected[name]) for name, trained in answer.report.arrays["coverage"].items())
        assert secrets.scored == secrets.drawn == []
        (answer,) = played.round()
    assert secrets.scored and secrets.drawn and answer.diary.evaluated_architectures > 0 and members(answer)


@pytest.mark.parametrize("source", ["diffusion", "evolution", "random"])
def test_candidates_leave_the_anchor_as_rounds_go_by(source: str, tiny: Tiny, generators: list[FakeGenerator]) -> None:
    distances = []
    for done in (0, 99):
        played = Played(tiny(*FAIR, "rounds=100", "perfedsde.distance=0.5", f"perfedsde.generator={source}"))
        played.state = type(played.state)(done, played.state.seed, played.state.weights)
        with overheard(played.method) as secrets:
            played.round()
        scored = {one.architecture for call in secrets.scored for one in call}
        near = played.method._near(0)
        distances.append(np.mean([near.genes(one) for one in scored - {near.anchor}]))
        for one in scored:
            played.method.tools.space.check(one)
    assert distances[0] < 3 < 6 < distances[1]


# -- whom it compares ------------------------------------------------------------------------------


def test_all_who_are_compared_were_scored_with_the_same_weights(
    tiny: Tiny, generators: list[FakeGenerator], monkeypatch: pytest.MonkeyPatch, jobs: list[SupernetJob]
) -> None:
    """One call after the last epoch scores the members and all their offspring; only a first visit scores before."""
    calls: list[tuple[int, list[Architecture]]] = []
    score = Scorer.score_subnets

    def listen(self: Scorer, weights: Any, architectures: Any, *more: Any) -> Any:
        calls.append((len(jobs), list(architectures)))
        return score(self, weights, architectures, *more)

    monkeypatch.setattr(Scorer, "score_subnets", listen)
    played = Played(tiny(*FAIR, "clients=1", "rounds=8", "perfedsde.distance=0.9"))
    anchor = played.method.tools.space.named["medium"]
    (first,) = played.round()
    assert [trained for trained, _ in calls] == [0, 2] and len(calls[1][1]) == 4 + 2 * 2
    before = members(first)
    assert len(before) == 4 and anchor in before and set(before) <= set(calls[1][1])
    calls.clear()
    (second,) = played.round()
    ((trained, scored),) = calls
    assert trained == 4 and scored[:4] == before and len(set(scored)) == 4 + 2 * 2
    assert second.diary.evaluated_architectures == 8 and anchor in members(second)


def test_the_order_is_that_of_means_against_the_anchor(tiny: Tiny, generators: list[FakeGenerator]) -> None:
    played = Played(tiny(*FAIR, "clients=1", "rounds=8", "perfedsde.distance=0.9", "perfedsde.renewal=0.25"))
    anchor = played.method.tools.space.named["medium"]
    (first,) = played.round()
    old = dict(zip(members(first), first.memory.arrays["scores"][:, 1].tolist(), strict=True))
    with overheard(played.method) as secrets:
        (second,) = played.round()
    now = {one.architecture: one.score.loss for one in secrets.scored[-1]}
    means = {one: loss - now[anchor] for one, loss in now.items()}
    means |= {one: old[one] + 0.25 * (means[one] - old[one]) for one in old}
    best = sorted(means, key=means.__getitem__)[:4]
    expected = best if anchor in best else [*best[:3], anchor]
    assert members(second) == expected
    assert second.memory.arrays["scores"][:, 1] == pytest.approx([means[one] for one in expected])
    assert old[anchor] == 0 == means[anchor]


def test_a_memory_without_scores_serves(tiny: Tiny, generators: list[FakeGenerator]) -> None:
    """That of a run in which scores were not kept; it may name an architecture twice."""
    published = Played(tiny("clients=1", "participants=1"))
    (answer,) = published.round()
    rows = answer.memory.arrays["population"]
    played = Played(tiny(*FAIR, "clients=1"))
    played.memories["client-000"] = ClientMemory({"population": np.concatenate([rows, rows[:1]])})
    with overheard(played.method) as secrets:
        (second,) = played.round()
    assert {one.architecture for one in secrets.scored[0]} == set(members(answer))
    assert "scores" in second.memory.arrays and len(set(members(second))) == len(members(second))


# -- the last participation -----------------------------------------------------------------------------


def test_the_anchor_and_the_finalists_are_tuned(tiny: Tiny, generators: list[FakeGenerator], monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[list[Architecture]] = []
    choose = Finetuning.choose

    def listen(self: Finetuning, finalists: Any, *more: Any, **named: Any) -> Any:
        heard.append([finalist.architecture for finalist in finalists])
        return choose(self, finalists, *more, **named)

    monkeypatch.setattr(Finetuning, "choose", listen)
    played = Played(tiny(*FAIR, "clients=2", "perfedsde.finalists=2", "training.choice=evidence"))
    anchor = played.method.tools.space.named["medium"]
    (known,) = played.round()
    for client in played.federation.names:  # one that has searched, and a newcomer
        answer = played.farewell(client)
        order = [one for one in members(answer) if one != anchor]
        assert heard[-1] == [anchor, *order[:2]]
        assert answer.model and answer.model.architecture in {one.id for one in heard[-1]}
        notes = answer.diary.notes
        assert {"left_prior", "prior_loss", "chosen_loss", "genes_from_anchor"} <= set(notes)
        assert (notes["genes_from_anchor"] > 0) == (answer.model.architecture != anchor.id) == bool(notes["left_prior"])
    assert known.report.client in played.federation.names
    again = Played(tiny(*FAIR, "clients=2", "perfedsde.finalists=0"))
    heard.clear()
    answer = again.farewell("client-000")
    assert heard == [members(answer)[:1]]


# -- what does not go together -------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["warmup=0.5", "distance=0.5", "sampling=near"])
def test_what_needs_an_anchor_says_so(change: str, tiny: Tiny, generators: list[FakeGenerator]) -> None:
    with pytest.raises(InvalidConfig, match=rf"perfedsde\.{change.split('=')[0]} .* no anchor|Set perfedsde\.anchor"):
        Played(tiny(f"perfedsde.{change}"))


def test_refusals(tiny: Tiny, generators: list[FakeGenerator]) -> None:
    with pytest.raises(InvalidArchitecture, match="There is no architecture named 'middle'"):
        Played(tiny("perfedsde.anchor=middle"))
    for change in ("perfedsde.same_weights=true", "perfedsde.criterion=loss"):
        with pytest.raises(InvalidConfig, match=r"perfedsde\.racing compares accuracies"):
            Played(tiny("perfedsde.racing=0.5", change))


def test_an_anchor_over_budget_is_reduced_and_so_is_everything_near_it(
    tiny: Tiny, generators: list[FakeGenerator], jobs: list[SupernetJob]
) -> None:
    space = Played(tiny()).method.tools.space
    most = space.cost(space.named["medium"]).macs
    budget = ("perfedsde.anchor=largest", f"budget.macs={most}")
    played, again = (Played(tiny(*FAIR, *budget)) for _ in range(2))
    anchor = played.method._anchor
    assert anchor == again.method._anchor != space.named["largest"] and most / 2 < space.cost(anchor).macs <= most
    with overheard(played.method) as secrets:
        played.round()
    trained = [one for job in jobs for one in job.draw(np.random.default_rng(0))]
    scored = [one.architecture for call in secrets.scored for one in call]
    assert anchor in trained and anchor in scored and all(space.cost(one).macs <= most for one in [*trained, *scored])
