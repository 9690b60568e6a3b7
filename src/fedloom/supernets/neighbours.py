"""A classifier that asks stored examples as well: nearest neighbours among features (kNN-Per, Marfoq et al., ICML 2022, Eq. 5 to 8).

It takes the place of a network's linear classifier, so that a personal network with neighbours is a network like others: it can be saved,
exported and asked. Its file then holds features and labels of a client's training images.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.supernets.plain import StandAlone

KEYS = ".keys"  # how the name of the stored features ends
LEAST = 1e-12  # of a probability, so that its logarithm is finite


def with_neighbours(features: Tensor, logits: Tensor, keys: Tensor, values: Tensor, count: int, share: Tensor, scale: Tensor) -> Tensor:
    """(n, classes) logarithms of share · neighbours + (1 - share) · softmax(logits).

    features: (n, d); keys: (examples, d) of the stored examples; values: (examples, classes) their labels, one 1 in each row. The ``count``
    nearest by Euclidean distance count by exp(-distance² / (d · scale)), normalised.
    """
    squares = features.square().sum(1, keepdim=True) + keys.square().sum(1) - 2 * features @ keys.T  # (n, examples)
    near = squares.topk(count, dim=1, largest=False)
    counts = torch.softmax(-near.values / (features.shape[1] * scale), 1)  # (n, count)
    neighbours = (counts[:, :, None] * values[near.indices]).sum(1)
    return (share * neighbours + (1 - share) * logits.softmax(1)).clamp_min(LEAST).log()


class Neighbours(nn.Module):
    """The linear classifier with stored examples beside it. Numbers are buffers, so that a file of weights has everything."""

    keys: Tensor
    values: Tensor
    count: Tensor
    share: Tensor
    scale: Tensor

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, examples: int, count: int) -> None:
        super().__init__()
        self.weight, self.bias, self.nearest = weight, bias, count
        classes, features = weight.shape
        shapes = {"keys": (examples, features), "values": (examples, classes), "count": (1,), "share": (1,), "scale": (1,)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, features: Tensor) -> Tensor:
        logits = F.linear(features, self.weight, self.bias)
        return with_neighbours(features, logits, self.keys, self.values, self.nearest, self.share, self.scale)


def fitted(network: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """The network with the classifier that its weights are for: one with neighbours where there are any among them."""
    for name, keys in state.items():
        place = name.removesuffix(KEYS)
        if place == name or f"{place}.count" not in state:
            continue
        count = int(state[f"{place}.count"])
        if not has_room(network, place):
            raise ValueError(f"{place} is no linear layer of this network, so that neighbours cannot stand beside it")
        if not 1 <= count <= len(keys):
            raise ValueError(f"{count} neighbours of {len(keys)} stored examples")
        linear = network.get_submodule(place)
        network.set_submodule(place, Neighbours(linear.get_parameter("weight"), linear.get_parameter("bias"), len(keys), count))
        if isinstance(network, StandAlone):
            network.asks(place)
    return network


def has_room(network: nn.Module, place: str) -> bool:
    """Whether neighbours can take the place of a layer."""
    return isinstance(network, StandAlone) or isinstance(network.get_submodule(place), nn.Linear)
