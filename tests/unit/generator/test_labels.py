"""Labels of the predictor: measures of logits, architectures to measure, and the supernet that makes the logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.core.client_site import Examples
from fedloom.core.seeds import rng
from fedloom.generator.conditions import taken
from fedloom.generator.labels import (
    LabelSettings,
    SupernetSettings,
    different_architectures,
    equally_hard,
    score_architectures,
    task_measure,
    train_proxy_supernet,
)
from fedloom.generator.proxy import Proxy, Task
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import Supernet, make_supernet
from fedloom.training.pixels import Pixels
from fedloom.training.recipe import TrainingSettings
from fedloom.training.scoring import Scorer
from support.generator import CPU, Toy, tiny_space

CLASSES, IMAGES = 4, 3


def pictures(*shape: int) -> Tensor:
    return torch.from_numpy(rng("pictures", *shape).integers(0, 256, (*shape, 1, 8, 8), dtype=np.uint8))


@pytest.fixture(scope="module")
def proxy() -> Proxy:
    labels = torch.arange(24) % CLASSES
    return Proxy(
        "random", Examples(pictures(24), labels), pictures(CLASSES, IMAGES), Pixels((0.5,), (0.25,)), np.array([0, 1]), np.array([2, 3])
    )


@pytest.fixture(scope="module")
def supernet() -> Supernet[Any]:
    return make_supernet("mobilenetv3", replace(SPACES["mobilenetv3"].settings.tiny(), width=0.05), ImageShape(1, 8, CLASSES))


def test_all_tasks_at_once_equal_one_after_the_other() -> None:
    draw = rng("measure")
    logits = torch.from_numpy(draw.normal(size=(6, 5, 6))).float()
    tasks = [Task(np.sort(draw.choice(6, size, replace=False))) for size in (2, 5, 3, 2, 6, 3, 2)]
    measured = task_measure(tasks, "plain", CPU)(logits)
    for task, accuracy in zip(tasks, measured.tolist(), strict=True):
        hits = [int(logits[label, image, task.classes].argmax()) == place for place, label in enumerate(task.classes) for image in range(5)]
        assert accuracy == pytest.approx(sum(hits) / len(hits))
    mixed = [replace(task, condition="grey") if number % 2 else task for number, task in enumerate(tasks)]
    for condition, known in (("plain", [0, 2, 4, 6]), ("grey", [1, 3, 5]), ("noisy", [])):
        found = task_measure(mixed, condition, CPU)(logits)
        assert torch.isfinite(found).nonzero()[:, 0].tolist() == known and torch.equal(found[known], measured[known])


def test_architectures_to_label_are_different_and_follow_from_the_seed() -> None:
    space = tiny_space("mobilenetv3")
    choices = different_architectures(space, 300, 1)
    assert choices.shape == (300, 45) and len(np.unique(choices, axis=0)) == 300
    assert np.array_equal(space.canonical_many(choices), choices)
    assert np.array_equal(choices, different_architectures(space, 300, 1))
    assert not np.array_equal(choices, different_architectures(space, 300, 2))
    assert choices[0].tolist() > choices[1].tolist() or choices[1].tolist() > choices[2].tolist()  # not sorted: parts of them are random
    assert choices[:, -1].mean() == pytest.approx(1, abs=0.15)


def test_images_that_are_easier_by_hand() -> None:
    """Every part gets the mean of all, task by task; what architectures differ in within a part stays."""
    accuracies = torch.tensor([[0.1, 0.9], [0.4, 0.7], [0.3, 0.5], [0.5, 0.3]])
    before = accuracies.clone()
    found = equally_hard(accuracies, np.array([0, 1, 0, 1]))
    # parts: means 0.2, 0.7 and 0.45, 0.5; of all: 0.325, 0.6
    assert torch.allclose(found, torch.tensor([[0.225, 0.8], [0.275, 0.8], [0.425, 0.4], [0.375, 0.4]]))
    assert torch.equal(accuracies, before)  # a copy
    assert torch.allclose(equally_hard(accuracies, np.zeros(4, int)), accuracies)  # one part for all


def test_equally_hard_takes_the_difficulty_of_images_away() -> None:
    """In truth 100 architectures by 3 tasks; each quarter saw images of its own difficulty. What is left of that is chance: the means
    over 25 architectures, a fifth of a deviation."""
    draw = rng("hard")
    true = torch.from_numpy(draw.normal(0.5, 0.1, (100, 3)))
    part = np.arange(100) // 25
    seen = true + torch.from_numpy(draw.normal(0, 1, (4, 3)))[part]
    found = equally_hard(seen, part)
    apart = (found - found.mean(0)) - (true - true.mean(0))
    assert apart.abs().max() < 0.06 < 0.5 < ((seen - seen.mean(0)) - (true - true.mean(0))).abs().max()


def test_what_is_unknown_stays_unknown() -> None:
    nan = float("nan")
    accuracies = torch.tensor([[0.1, nan], [0.5, nan], [nan, 0.9], [0.3, nan], [0.9, nan]])
    found = equally_hard(accuracies, np.array([0, 0, 1, 2, 2]))  # means of the first task: 0.3 and 0.6, of all 0.45
    expected = torch.tensor([[0.25, nan], [0.65, nan], [nan, 0.9], [0.15, nan], [0.75, nan]])
    assert torch.allclose(found, expected, equal_nan=True)


def test_architectures_see_images_as_the_condition_shows_them(supernet: Supernet[Any], proxy: Proxy) -> None:
    """Both the images that are scored and those that statistics are measured on."""
    weights, architectures = supernet.initial(0), [supernet.space.named["smallest"]]
    settings = LabelSettings(calibration=6)

    def logits(proxy: Proxy, images: Tensor, *condition: str) -> Tensor:
        return next(score_architectures(supernet, weights, proxy, architectures, images, lambda logits: logits, settings, *condition))

    farther = replace(proxy, train=Examples(taken(proxy.train.images, "farther"), proxy.train.labels))
    images = taken(proxy.scoring.flatten(0, 1), "farther").view(proxy.scoring.shape)
    found = logits(proxy, proxy.scoring, "farther")
    assert torch.equal(found, logits(farther, images)) and not torch.equal(found, logits(proxy, images))
    assert torch.equal(logits(proxy, proxy.scoring, "plain"), logits(proxy, proxy.scoring))


def test_a_space_that_has_fewer_gives_all_it_has() -> None:
    assert sorted(different_architectures(Toy(2, 3), 20, 0).tolist()) == [[0, 0], [1, 0], [1, 1], [1, 2]]


def test_logits_are_of_the_images_in_their_order(supernet: Supernet[Any], proxy: Proxy) -> None:
    weights = supernet.initial(0)
    architectures = [supernet.space.named["smallest"], supernet.space.sample(rng(1))]
    settings = LabelSettings(calibration=6)
    found = list(score_architectures(supernet, weights, proxy, architectures, proxy.scoring, lambda logits: logits, settings))
    scorer = Scorer(supernet, TrainingSettings(calibration=6, execution="sliced"), proxy.pixels)
    for architecture, logits in zip(architectures, found, strict=True):
        assert logits.shape == (CLASSES, IMAGES, CLASSES)
        statistics = scorer.calibrate(supernet.plain(weights, architecture), architecture, proxy.train)
        for label in range(CLASSES):
            alone = supernet.forward(
                proxy.pixels.normalise(proxy.scoring[label]), supernet.plain(weights, architecture), architecture, statistics
            )
            assert torch.allclose(logits[label], alone, atol=1e-4)


def test_a_supernet_goes_on_where_it_stopped(supernet: Supernet[Any], proxy: Proxy) -> None:
    settings, conditions = SupernetSettings(epochs=3, batch=8, rate=0.1), ("plain", "closer")
    start = supernet.initial(0)
    through = dict(train_proxy_supernet(supernet, proxy, conditions, settings, start, 0, 5))
    assert list(through) == [1, 2, 3]
    continued = dict(train_proxy_supernet(supernet, proxy, conditions, settings, through[1], 1, 5))
    assert list(continued) == [2, 3] and all(torch.equal(through[3][name], continued[3][name]) for name in start)
    assert any(not torch.equal(start[name], through[1][name]) for name in start)
    other = dict(train_proxy_supernet(supernet, proxy, conditions, settings, start, 0, 6))
    assert any(not torch.equal(through[3][name], other[3][name]) for name in start)


def test_the_largest_network_comes_first_then_what_sampling_says(supernet: Supernet[Any], proxy: Proxy) -> None:
    def epochs(conditions: tuple[str, ...] = ("plain",), **changes: Any) -> dict[int, dict[str, Tensor]]:
        settings = SupernetSettings(**{"epochs": 2, "batch": 12, "rate": 0.1, "largest": 0.5, **changes})
        return dict(train_proxy_supernet(supernet, proxy, conditions, settings, supernet.initial(0), 0, 0))

    def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        return all(torch.equal(one[name], other[name]) for name in one)

    random, fair = epochs(), epochs(sampling="fair")
    assert same(random[1], fair[1]) and not same(random[2], fair[2])
    alone = epochs(largest=1.0)
    assert same(alone[1], random[1]) and not same(alone[2], random[2])
    assert not same(epochs(largest=0.0)[1], random[1])
    assert not same(epochs(("farther",))[1], random[1])
    assert all(tensor.isfinite().all() for tensor in [*random[2].values(), *fair[2].values()])


@pytest.mark.parametrize(
    ("space", "sampling", "largest"), [("mobilenetv3", "random", 0.5), ("nasvit", "random", 0.5), ("darts", "fair", 0.0)]
)
def test_what_has_weights_of_its_own_is_trained_fairly(space: str, sampling: str, largest: float) -> None:
    net = make_supernet(space, SPACES[space].settings.tiny(), ImageShape(3, 8, CLASSES))
    suited = SupernetSettings(epochs=7, largest=0.5).suited_to(net)
    assert suited == SupernetSettings(epochs=7, sampling=sampling, largest=largest)
    for said in (SupernetSettings(sampling="random", largest=0.2), SupernetSettings(sampling="fair", largest=0.2)):
        assert said.suited_to(net) == said
