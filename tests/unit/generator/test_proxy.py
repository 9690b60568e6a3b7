"""Public images by their use: what trains, what scores, what is held out, and tasks made of classes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom.core.errors import InvalidData
from fedloom.core.seeds import rng
from fedloom.data.readers import Dataset, Pool
from fedloom.generator.proxy import Proxy, ProxySettings, class_likeness, draw_tasks, make_proxy, subset_accuracies
from support.generator import CPU

SETTINGS = ProxySettings(image_size=8, reserved=3, held_out=0.25, tasks=40, held_out_tasks=10, task_sizes=(2, 3))


def numbered(labels: list[int], first: int, side: int = 8) -> Pool:
    """Images that say who they are: every pixel of image i is first + i."""
    images = np.empty((len(labels), 1, side, side), np.uint8)
    images[:] = np.arange(first, first + len(labels))[:, None, None, None]
    return Pool(images, np.array(labels))


def make_dataset(classes: int = 8, train: int = 8, test: int = 2, side: int = 8) -> Dataset:
    names = tuple(f"class {number}" for number in range(classes))
    labels = [number % classes for number in range(classes * train)]
    return Dataset("numbers", names, numbered(labels, 0, side), numbered([*range(classes)] * test, 100, side), (0.5,), (0.25,))


@pytest.fixture(scope="module")
def proxy() -> Proxy:
    return make_proxy(make_dataset(), SETTINGS, CPU)


# -- images -----------------------------------------------------------------------------
def test_images_that_score_never_train(proxy: Proxy) -> None:
    train, scoring = set(proxy.train.images[:, 0, 0, 0].tolist()), proxy.scoring[:, :, 0, 0, 0]
    assert len(train) == len(proxy.train) == 8 * (8 - 3)
    assert scoring.shape == (8, 3 + 2) and not train & set(scoring.flatten().tolist())
    assert train | set(scoring.flatten().tolist()) == {*range(64), *range(100, 116)}


def test_every_image_keeps_its_class(proxy: Proxy) -> None:
    assert proxy.train.labels.tolist() == [int(pixel) % 8 for pixel in proxy.train.images[:, 0, 0, 0]]
    for label, own in enumerate(proxy.scoring[:, :, 0, 0, 0].tolist()):
        assert [(pixel - 100) % 8 if pixel >= 100 else pixel % 8 for pixel in own] == [label] * 5
    assert (proxy.image.channels, proxy.image.size, proxy.image.classes) == (1, 8, 8)
    assert proxy.pixels.mean == (0.5,) and proxy.pixels.std == (0.25,)


def test_classes_score_with_as_many_images_as_the_rarest_has() -> None:
    dataset = make_dataset()
    fewer = replace(dataset, test=numbered([0, 0, 1, 2, 3, 4, 5, 6, 7], 100))
    assert make_proxy(fewer, SETTINGS, CPU).scoring.shape[:2] == (8, 4)


def test_reserved_images_do_not_depend_on_what_else_there_is(proxy: Proxy) -> None:
    again = make_proxy(make_dataset(), replace(SETTINGS, held_out=0.5, tasks=3), CPU)
    assert torch.equal(proxy.scoring, again.scoring) and torch.equal(proxy.train.images, again.train.images)


def test_larger_images_are_averaged_down_and_smaller_ones_stay() -> None:
    dataset = make_dataset(side=16)
    dataset.train.images[:, :, 0, :2] = 0
    dataset.train.images[:, :, 1, :2] = 255
    proxy = make_proxy(dataset, SETTINGS, CPU)
    assert proxy.train.images.shape[1:] == (1, 8, 8) and proxy.train.images.dtype == torch.uint8
    assert set(proxy.train.images[:, 0, 0, 0].tolist()) == {128}  # 127.5, rounded to even
    assert make_proxy(make_dataset(side=4), SETTINGS, CPU).image.size == 4


@pytest.mark.parametrize(
    ("dataset", "settings", "words"),
    [
        (make_dataset(), replace(SETTINGS, reserved=8), "8 training images of 'class 0': reserve fewer than that, not 8 .proxy.reserved."),
        (make_dataset(test=1), replace(SETTINGS, reserved=0), "fewer than two images of a class to score with. Raise proxy.reserved"),
        (make_dataset(classes=3), SETTINGS, "has 3 classes, too few to hold 2 out and show at least two. Use data of at least four"),
        (
            make_dataset(classes=4),
            replace(SETTINGS, held_out=0.75),
            "has 4 classes, too few to hold 3 out and show at least two. Lower proxy.held_out",
        ),
    ],
)
def test_too_little_is_refused(dataset: Dataset, settings: ProxySettings, words: str) -> None:
    with pytest.raises(InvalidData, match=words):
        make_proxy(dataset, settings, CPU)


def test_four_classes_are_enough() -> None:
    proxy = make_proxy(make_dataset(classes=4), SETTINGS, CPU)
    assert len(proxy.shown) == len(proxy.held_out) == 2


# -- tasks -------------------------------------------------------------------------------
def test_held_out_classes_are_in_no_task_that_is_shown(proxy: Proxy) -> None:
    assert sorted([*proxy.shown, *proxy.held_out]) == list(range(8)) and len(proxy.held_out) == 2
    likeness = rng("likeness").normal(size=(8, 8))
    for alike in (0.0, 1.0):
        settings = replace(SETTINGS, alike=alike)
        shown = draw_tasks(settings, proxy.shown, 200, likeness, rng("tasks"))
        held_out = draw_tasks(settings, proxy.held_out, 50, likeness, rng("tasks"))
        assert {int(label) for task in shown for label in task.classes} == set(proxy.shown.tolist())
        assert {int(label) for task in held_out for label in task.classes} == set(proxy.held_out.tolist())


def test_sizes_come_in_turn_and_never_exceed_the_classes() -> None:
    likeness = np.zeros((6, 6))
    settings = replace(SETTINGS, task_sizes=(2, 3, 9))
    for alike in (0.0, 0.5, 1.0):
        tasks = draw_tasks(replace(settings, alike=alike), np.arange(5), 30, likeness, rng("sizes"))
        assert [len(task.classes) for task in tasks] == [2, 3, 5] * 10
        assert all(sorted(set(task.classes.tolist())) == task.classes.tolist() for task in tasks)


def test_every_condition_comes_with_every_size() -> None:
    settings = replace(SETTINGS, task_sizes=(2, 3), conditions=("plain", "grey", "noisy"))
    tasks = draw_tasks(settings, np.arange(5), 12, np.zeros((5, 5)), rng("conditions"))
    assert [task.condition for task in tasks] == ["plain", "plain", "grey", "grey", "noisy", "noisy"] * 2
    assert {(len(task.classes), task.condition) for task in tasks} == {(size, name) for size in (2, 3) for name in settings.conditions}


def test_classes_that_look_alike_come_together() -> None:
    """Two families of classes: alike tasks of three stay, as twice as many classes are near as needed, in a family of six."""
    family = np.array([0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1])
    likeness = (family[:, None] == family) + np.eye(12)
    settings = replace(SETTINGS, task_sizes=(3,))
    alike = draw_tasks(replace(settings, alike=1.0), np.arange(12), 100, likeness, rng("alike"))
    random = draw_tasks(replace(settings, alike=0.0), np.arange(12), 100, likeness, rng("alike"))
    assert all(len(set(family[task.classes])) == 1 for task in alike)
    assert sum(len(set(family[task.classes])) == 1 for task in random) < 40  # 2 of 11 on average: 18
    assert len({tuple(task.classes) for task in alike}) > 20


def test_the_likeness_of_classes_by_hand() -> None:
    features = torch.tensor([[3.0, 1.0], [1.0, 1.0], [-2.0, 1.0], [0.0, 4.0], [0.0, -2.0]])
    labels = torch.tensor([0, 0, 1, 2, 2])
    # Means (2, 1), (-2, 1), (0, 1): centred (2, 0), (-2, 0), (0, 0).
    assert class_likeness(features, labels, 3).tolist() == [[1, -1, 0], [-1, 1, 0], [0, 0, 0]]


def test_accuracies_on_subsets_by_hand() -> None:
    """Three classes of two images each."""
    logits = torch.tensor(
        [
            [[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]],  # class 0: right; taken for 2, and for 1 where there is no 2
            [[9.0, 5.0, 0.0], [0.0, 5.0, 9.0]],  # class 1: taken for 0; for 2
            [[1.0, 0.0, 2.0], [0.0, 1.0, 2.0]],  # class 2: right twice
        ]
    )
    subsets = torch.tensor([[0, 1], [0, 2], [1, 2]])
    # {0, 1}: right, wrong; wrong, right. {0, 2}: right, wrong; right, right. {1, 2}: right, wrong; right, right.
    assert subset_accuracies(logits, subsets).tolist() == [0.5, 0.75, 0.75]
    assert subset_accuracies(logits, torch.tensor([[0, 1, 2]])).tolist() == [0.5]
    assert subset_accuracies(logits, torch.tensor([[1, 0], [2, 1]])).tolist() == [0.5, 0.75]  # in any order
