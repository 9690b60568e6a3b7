"""A classifier with nearest neighbours, by hand; and networks that have one, built from their weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedloom.core.errors import InvalidConfig
from fedloom.spaces.base import ImageShape
from fedloom.spaces.mobilenetv3 import MobileNetV3, MobileNetV3Settings
from fedloom.supernets.mobilenetv3 import MobileNetV3Supernet
from fedloom.supernets.neighbours import Neighbours, fitted, with_neighbours

KEYS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [9.0, 9.0]])
VALUES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
LOGITS = torch.tensor([[0.0, math.log(3.0)]])  # a quarter and three quarters
NUMBERS = torch.tensor(0.5), torch.tensor(1.0)


def test_what_the_nearest_say_counts_by_its_distance() -> None:
    """At (0, 0) squared distances are 0, 1 and 4; they count by exp(-d² / 2), for two features."""
    said = with_neighbours(torch.zeros(1, 2), LOGITS, KEYS, VALUES, 3, *NUMBERS).exp()
    near = [1.0, math.exp(-0.5), math.exp(-2.0)]
    first = near[0] / sum(near)
    assert said[0].tolist() == pytest.approx([0.5 * first + 0.5 * 0.25, 0.5 * (1 - first) + 0.5 * 0.75])


@pytest.mark.parametrize(
    ("share", "count", "scale", "first"), [(0.0, 3, 1.0, 0.25), (1.0, 1, 1.0, 1.0), (1.0, 4, 1e9, 0.5), (1.0, 2, 1e9, 0.5)]
)
def test_shares_counts_and_scales(share: float, count: int, scale: float, first: float) -> None:
    """0 is the network alone, 1 the neighbours alone; a large scale makes them equal."""
    said = with_neighbours(torch.zeros(1, 2), LOGITS, KEYS, VALUES, count, torch.tensor(share), torch.tensor(scale)).exp()
    assert said[0, 0].item() == pytest.approx(first, abs=1e-6) and said.sum().item() == pytest.approx(1.0)
    assert said.log().isfinite().all()


def test_a_network_gets_the_classifier_that_its_weights_are_for() -> None:
    network = nn.Sequential()
    network.add_module("classifier", nn.Linear(2, 2))
    linear = network.get_submodule("classifier")
    state = {"classifier.keys": KEYS, "classifier.values": VALUES, "classifier.count": torch.tensor([3.0])}
    assert fitted(network, {}).get_submodule("classifier") is linear
    with pytest.raises(ValueError, match="5 neighbours of 4"):
        fitted(network, {**state, "classifier.count": torch.tensor([5.0])})
    head = fitted(network, state).get_submodule("classifier")
    assert isinstance(head, Neighbours) and head.nearest == 3 and isinstance(linear, nn.Linear)
    numbers = {"classifier.share": torch.tensor([0.5]), "classifier.scale": torch.tensor([1.0])}
    network.load_state_dict({**state, **numbers, "classifier.weight": linear.weight, "classifier.bias": linear.bias})
    images = torch.tensor([[0.1, 0.2]])
    expected = with_neighbours(images, linear(images), KEYS, VALUES, 3, *NUMBERS)
    assert torch.allclose(network(images), expected)
    with pytest.raises(ValueError, match="no linear layer"):
        fitted(network, state)


def test_features_are_what_the_classifier_sees() -> None:
    supernet = MobileNetV3Supernet(MobileNetV3(MobileNetV3Settings(width=0.1, strides=(2, 1, 1, 1, 1)), ImageShape(1, 8, 3)))
    architecture, images = supernet.space.named["medium"], torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = supernet.plain(supernet.initial(0), architecture)
    features = supernet.features(images, plain, architecture)
    weight, bias = supernet.classifier(plain)
    assert (weight, bias) == ("classifier.weight", "classifier.bias") and features.shape == (5, plain[weight].shape[1])
    assert torch.allclose(features @ plain[weight].T + plain[bias], supernet.forward(images, plain, architecture), atol=1e-5)
    assert features.std() > 0.01
    with pytest.raises(InvalidConfig, match="not one linear layer"):
        supernet.classifier({**plain, "classifier.more": torch.zeros(3)})
