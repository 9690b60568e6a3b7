"""How images were taken: small pictures whose result is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.core.client_site import Examples
from fedloom.core.seeds import rng
from fedloom.generator import conditions as module
from fedloom.generator.conditions import CONDITIONS, mixed, taken


def pictures(count: int = 6, channels: int = 3, side: int = 10) -> Tensor:
    return torch.from_numpy(rng("pictures").integers(0, 256, (count, channels, side, side), dtype=np.uint8))


@pytest.mark.parametrize("condition", list(CONDITIONS))
@pytest.mark.parametrize(("channels", "side"), [(3, 10), (1, 8), (3, 1)])
def test_sizes_stay_and_the_same_images_are_the_same(condition: str, channels: int, side: int) -> None:
    images = pictures(5, channels, side)
    before = images.clone()
    found = taken(images, condition)
    assert found.shape == images.shape and found.dtype == torch.uint8 and torch.equal(images, before)
    assert torch.equal(found, taken(images, condition)) and taken(images[:0], condition).shape == (0, channels, side, side)
    if side == 10:
        assert torch.equal(found, images) == (condition == "plain")


@pytest.mark.parametrize("condition", [name for name in CONDITIONS if name != "noisy"])
def test_an_image_does_not_depend_on_its_neighbours(condition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = pictures(7)
    found = taken(images, condition)
    monkeypatch.setattr(module, "AT_ONCE", 3)
    assert torch.equal(found, taken(images, condition)) and torch.equal(found[2:3], taken(images[2:3], condition))


def test_grey_is_the_mean_of_the_colours() -> None:
    images = torch.tensor([[[[10]], [[20]], [[60]]]], dtype=torch.uint8)
    assert taken(images, "grey").flatten().tolist() == [30, 30, 30]


def test_a_blurred_point_is_spread_and_a_flat_image_stays() -> None:
    point = torch.zeros(1, 1, 7, 7, dtype=torch.uint8)
    point[0, 0, 3, 3] = 255
    found = taken(point, "blurred")[0, 0].float()
    line = torch.tensor([1.0, 4, 6, 4, 1]) / 16
    assert torch.allclose(found[1:6, 1:6], 255 * line[:, None] * line, atol=0.51) and found[0].sum() == 0
    flat = torch.full((1, 3, 6, 6), 77, dtype=torch.uint8)
    assert torch.equal(taken(flat, "blurred"), flat)  # its rim too


def test_noise_has_its_deviation_and_other_images_get_other_noise() -> None:
    flat = torch.full((4, 3, 32, 32), 128, dtype=torch.uint8)
    noise = taken(flat, "noisy").float() - 128
    assert float(noise.std()) == pytest.approx(30, rel=0.05) and abs(float(noise.mean())) < 1
    assert not torch.equal(noise[0], noise[1]) and not torch.equal(taken(flat + 1, "noisy").float() - 129, noise)


def test_closer_and_farther_by_hand() -> None:
    """A bright square of 6 in a side of 10 fills the picture from nearer; from farther away it has 0.6 of its side."""
    images = torch.zeros(1, 1, 10, 10, dtype=torch.uint8)
    images[0, 0, 2:8, 2:8] = 200
    assert (taken(images, "closer") == 200).all()
    found = taken(images, "farther")[0, 0]
    mean = 72  # 36 of 100 pixels
    assert (found[:2] == mean).all() and (found[:, 8:] == mean).all() and (found[4:6, 4:6] == 200).all() and found[2, 2] < 100


def test_every_image_gets_one_of_the_conditions() -> None:
    images = pictures(60)
    examples = Examples(images, torch.arange(60))
    found = mixed(examples, ("plain", "grey", "farther"), rng(0))
    shown = torch.stack([taken(images, name) for name in ("plain", "grey", "farther")])  # (conditions, images, ...)
    which = (shown == found.images).flatten(2).all(2)
    assert which.sum(0).tolist() == [1] * 60 and which.sum(1).min() > 8 and torch.equal(found.labels, examples.labels)
    assert torch.equal(found.images, mixed(examples, ("plain", "grey", "farther"), rng(0)).images)
    assert not torch.equal(found.images, mixed(examples, ("plain", "grey", "farther"), rng(1)).images)
    assert mixed(examples, ("plain",), rng(0)) is examples
