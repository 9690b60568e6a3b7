"""A race scores the better third of the architectures on all images, and ranks them before the others."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientData, ClientSite, Examples
from fedloom.core.seeds import rng
from fedloom.spaces.base import ImageShape
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from fedloom.supernets.mobilenetv3 import MobileNetV3Supernet
from fedloom.testing.executions import PIXELS, SLICED, examples_of
from fedloom.testing.nets import weights_of
from fedloom.training.racing import first_images, race
from fedloom.training.scoring import Request, Score, Scored, Scorer, best_first
from fedloom.training.tools import Tools

SUPERNET = MobileNetV3Supernet(MobileNetV3(MobileNetV3Settings.tiny(), ImageShape(1, 8, 3)))


def scored(choice: int, accuracy: float, loss: float = 1.0, rough: bool = False) -> Scored:
    return Scored(Architecture("toy", (choice,)), Score(accuracy, loss, rough))


def requests_of(count: int) -> list[Request]:
    draw = rng("race")
    architectures = [SUPERNET.space.sample(draw) for _ in range(count)]
    examples, train = examples_of(SUPERNET, 40), examples_of(SUPERNET, 90, seed=1)
    return [Request(weights_of(SUPERNET, seed), architectures[seed:], examples, train) for seed in (0, 1)]


def test_rough_scores_rank_after_all_others_also_when_populations_are_merged() -> None:
    population = [scored(5, 0.6), scored(4, 0.2), scored(3, 0.9, rough=True), scored(2, 0.1, rough=True)]
    offspring = [scored(9, 0.3), scored(8, 0.9, 0.5, rough=True), scored(7, 0.1, rough=True)]
    for order in itertools.islice(itertools.permutations([*population, *offspring]), 0, None, 97):
        assert [one.architecture.choices[0] for one in best_first(order)] == [5, 9, 4, 8, 3, 2, 7]


@pytest.mark.parametrize("count", [2, 7, 12])
def test_the_better_third_is_scored_on_all_images(count: int) -> None:
    settings, share = replace(SLICED, calibration=80), 0.5
    scorer, requests = Scorer(SUPERNET, settings, PIXELS), requests_of(count)
    for request, found in zip(requests, race(scorer, requests, share), strict=True):
        assert [one.architecture for one in found] == list(request.architectures)
        few = Scorer(SUPERNET, replace(settings, calibration=40), PIXELS)
        rough = few.score_subnets(request.weights, request.architectures, first_images(request.examples, share), request.train)
        exact = scorer.score_subnets(request.weights, request.architectures, request.examples, request.train)
        reach = {one.architecture for one in best_first(rough)[: -(-len(rough) // 3)]}
        for one, first, full in zip(found, rough, exact, strict=True):
            assert one == (full if one.architecture in reach else replace(first, score=replace(first.score, rough=True)))


def test_an_architecture_that_comes_twice_has_one_score() -> None:
    (request, _), scorer = requests_of(3), Scorer(SUPERNET, SLICED, PIXELS)
    twice = replace(request, architectures=[*request.architectures] * 2)
    (found,) = race(scorer, [twice], 0.5)
    assert found[:3] == found[3:]


@pytest.mark.parametrize(("calibration", "share", "expected"), [(200, 0.5, 100), (200, 0.05, 32), (40, 0.5, 32), (20, 0.5, 20)])
def test_fewer_images_measure_statistics_in_the_first_stage(
    calibration: int, share: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = Counter[int]()
    score = Scorer.score_many

    def listen(self: Scorer, requests: list[Request]) -> list[list[Scored]]:
        used[self.settings.calibration] += 1
        return score(self, requests)

    monkeypatch.setattr(Scorer, "score_many", listen)
    race(Scorer(SUPERNET, replace(SLICED, calibration=calibration), PIXELS), requests_of(2), share)
    assert used == Counter([expected, calibration])


def test_the_first_images_are_spread_over_all_and_always_the_same() -> None:
    examples = Examples(torch.arange(10), torch.arange(10))
    assert first_images(examples, 0.4).labels.tolist() == [0, 3, 6, 9]
    assert first_images(examples, 0.01).labels.tolist() == [0]
    assert first_images(examples, 1.0).labels.tolist() == [*range(10)]


def test_nothing_to_race() -> None:
    (request, _), scorer = requests_of(2), Scorer(SUPERNET, SLICED, PIXELS)
    assert race(scorer, [replace(request, architectures=[])], 0.5) == [[]]
    assert race(scorer, [], 0.5) == []


def test_tools_score_with_and_without_a_race_and_count_the_images() -> None:
    """Of 40 images, and of 90 that measure statistics."""
    (request, _), settings = requests_of(7), replace(SLICED, calibration=80)
    tools = Tools(SUPERNET.space, SUPERNET, settings, PIXELS, 3, 3, "clean", torch.device("cpu"))
    macs = [SUPERNET.space.cost(one).macs for one in request.architectures]
    site, racing = (ClientSite("client-000", ClientData(request.train, request.examples, request.train)) for _ in range(2))
    exact = tools.score(site, request.weights, request.architectures)
    assert exact == tools.scorer.score_subnets(request.weights, request.architectures, request.examples, request.train)
    assert site.work.scored_macs == (40 + 80) * sum(macs)
    raced = tools.score(racing, request.weights, request.architectures, 0.5)
    assert [raced] == race(tools.scorer, [request], 0.5)
    final = sum(own for own, one in zip(macs, raced, strict=True) if not one.score.rough)
    assert racing.work.scored_macs == (20 + 40) * sum(macs) + (40 + 80) * final
