"""Augmentation against values worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedloom.data.augment import Augmentation, augment, normalise


class Scripted:
    """Stands in for a generator: hands out the draws it was given, and remembers what it was asked for."""

    def __init__(self, *draws: Any) -> None:
        self.draws = [np.array(draw) for draw in draws]
        self.asked: list[tuple[Any, ...]] = []

    def integers(self, low: Any, high: Any, size: Any) -> np.ndarray:
        self.asked.append((low, high, size))
        return self.draws.pop(0)


def picture() -> torch.Tensor:  # (1, 1, 3, 3)
    return torch.tensor([[[[1, 2, 3], [4, 5, 6], [7, 8, 9]]]], dtype=torch.uint8)


def run(augmentation: Augmentation, *draws: Any, images: torch.Tensor | None = None, mean: tuple[float, ...] = (0.0,)) -> list[Any]:
    scripted: Any = Scripted(*draws)
    changed = augment(picture() if images is None else images, augmentation, scripted, mean)
    assert changed.dtype == torch.uint8
    assert not scripted.draws
    return changed[0, 0].tolist()


def test_crop_shifts_and_pads() -> None:
    # Shift (0, 2) with one pixel of padding: the window starts one row above and one column to the right.
    assert run(Augmentation(crop=1), [[0, 2]]) == [[0, 0, 0], [2, 3, 0], [5, 6, 0]]
    assert run(Augmentation(crop=1), [[1, 1]]) == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_flip_exchanges_left_and_right() -> None:
    assert run(Augmentation(flip=True), [[1]]) == [[3, 2, 1], [6, 5, 4], [9, 8, 7]]
    assert run(Augmentation(flip=True), [[0]]) == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_crop_comes_before_flip() -> None:
    assert run(Augmentation(crop=1, flip=True), [[0, 2]], [[1]]) == [[0, 0, 0], [0, 3, 2], [0, 6, 5]]


def test_cutout_blanks_a_square_and_stops_at_the_border() -> None:
    assert run(Augmentation(cutout=2), [[1, 1]]) == [[0, 0, 3], [0, 0, 6], [7, 8, 9]]
    assert run(Augmentation(cutout=2), [[0, 0]]) == [[0, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert run(Augmentation(cutout=3), [[2, 1]]) == [[1, 2, 3], [0, 0, 0], [0, 0, 0]]


def test_blank_pixels_take_the_value_nearest_the_mean_of_their_channel() -> None:
    images = torch.full((1, 2, 3, 3), 9, dtype=torch.uint8)
    scripted: Any = Scripted([[0, 1]])
    changed = augment(images, Augmentation(crop=1), scripted, (0.5, 0.1))
    assert changed[0, :, 0].tolist() == [[128, 128, 128], [26, 26, 26]]  # round(127.5), round(25.5): to even
    assert (changed[0, :, 1:] == 9).all()
    assert abs(normalise(changed, (0.5, 0.1), (0.25, 0.25))[0, :, 0]).max() < 0.01


def test_each_image_has_its_own_draws() -> None:
    images = torch.cat([picture(), picture() + 10])
    scripted: Any = Scripted([[1], [0]])
    changed = augment(images, Augmentation(flip=True), scripted, (0.0,))
    assert changed[0, 0, 0].tolist() == [3, 2, 1]
    assert changed[1, 0, 0].tolist() == [11, 12, 13]


def test_one_draw_per_kind_and_none_for_what_is_off() -> None:
    scripted: Any = Scripted([[4, 4]], [[0]], [[0, 0]])
    augment(torch.zeros(1, 3, 8, 6, dtype=torch.uint8), Augmentation(crop=4, flip=True, cutout=2), scripted, (0, 0, 0))
    assert scripted.asked == [(0, 9, (1, 2)), (0, 2, (1, 1)), (0, (8, 6), (1, 2))]
    silent: Any = Scripted()
    images = picture()
    same = augment(images, Augmentation(), silent, (0.0,))
    assert torch.equal(same, images)
    assert same is not images


def test_repeats_by_seed_and_leaves_its_input_alone() -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 3, 8, 8), dtype=np.uint8))
    before = images.clone()
    every = Augmentation(crop=2, flip=True, cutout=3)
    one, two, other = (augment(images, every, np.random.default_rng(seed), (0.5, 0.5, 0.5)) for seed in (1, 1, 2))
    assert torch.equal(images, before)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_an_empty_batch_stays_empty() -> None:
    images = torch.zeros(0, 3, 8, 8, dtype=torch.uint8)
    assert augment(images, Augmentation(4, True, 4), np.random.default_rng(0), (0.5, 0.5, 0.5)).shape == (0, 3, 8, 8)


def test_normalise_by_hand() -> None:
    images = torch.tensor([[[[0, 255]], [[51, 102]]]], dtype=torch.uint8)  # (1, 2, 1, 2)
    values = normalise(images, (0.5, 0.2), (0.25, 0.1))
    assert values.dtype == torch.float32
    assert values.flatten().tolist() == pytest.approx([-2.0, 2.0, 0.0, 2.0], abs=1e-6)
    with pytest.raises(ValueError):
        normalise(images, (0.5, 0.2), (0.25,))


@pytest.mark.gpu
def test_every_device_sees_the_same_draws() -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (16, 3, 32, 32), dtype=np.uint8))
    every = Augmentation(crop=4, flip=True, cutout=8)
    here = augment(images, every, np.random.default_rng(1), (0.5, 0.4, 0.3))
    there = augment(images.cuda(), every, np.random.default_rng(1), (0.5, 0.4, 0.3))
    assert torch.equal(here, there.cpu())
