"""A network that makes weights of other networks from a vector for each of them: layers with rectifiers, then one linear layer.

Pure: arrays in, arrays out. Everything is computed on the host, in the order of clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.messages import Array, Arrays

LAYER, OUT = "layer{}", "out"


class Wanted(NamedTuple):
    """How the weights made from an embedding should move: way, by name, counts ``share``."""

    embedding: Array
    way: Arrays
    share: float


def initial(draw: np.random.Generator, sizes: Sequence[int], targets: Arrays) -> dict[str, Array]:
    """sizes: of the embedding and of the layers after it. Its first outputs are near the targets: they are the bias of the last layer,
    whose weight starts small."""
    found: dict[str, Array] = {}
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        found |= _linear(draw, LAYER.format(number), inputs, outputs, 1 / math.sqrt(inputs))
    flat = np.concatenate([array.ravel() for array in targets.values()]).astype(np.float32)
    last = _linear(draw, OUT, sizes[-1], len(flat), 0.1 * float(flat.std()) / math.sqrt(sizes[-1]))
    return {**found, **last, f"{OUT}.bias": flat}


def made(network: Arrays, embedding: Array, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """The weights for one embedding, by name."""
    with torch.no_grad():
        flat = _outputs(_tensors(network), torch.tensor(embedding)).numpy()
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = np.split(flat, ends[:-1])
    return {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}


def moved(network: Arrays, wanted: Sequence[Wanted], rate: float) -> tuple[dict[str, Array], list[Array]]:
    """The network and the embeddings after a step towards what is wanted: the way times the derivative of what was made (a vector-Jacobian
    product), the mean over clients by their shares. An embedding moves by its own client's way, whatever its share."""
    leaves = {name: tensor.requires_grad_() for name, tensor in _tensors(network).items()}
    embeddings = [torch.tensor(one.embedding).requires_grad_() for one in wanted]
    total = torch.zeros(())
    for one, embedding in zip(wanted, embeddings, strict=True):
        way = torch.from_numpy(np.concatenate([array.ravel() for array in one.way.values()]))
        total = total + one.share * (_outputs(leaves, embedding) @ way)
    found = torch.autograd.grad(total, [*leaves.values(), *embeddings])
    network_ways, embedding_ways = found[: len(leaves)], found[len(leaves) :]
    after = {name: (leaf + rate * way).detach().numpy() for (name, leaf), way in zip(leaves.items(), network_ways, strict=True)}
    rows = zip(wanted, embeddings, embedding_ways, strict=True)
    return after, [(embedding + rate / one.share * way).detach().numpy() for one, embedding, way in rows]


def _outputs(network: Mapping[str, Tensor], embedding: Tensor) -> Tensor:
    x = embedding
    for number in range(len(network) // 2 - 1):
        name = LAYER.format(number)
        x = F.relu(F.linear(x, network[f"{name}.weight"], network[f"{name}.bias"]))
    return F.linear(x, network[f"{OUT}.weight"], network[f"{OUT}.bias"])


def _linear(draw: np.random.Generator, name: str, inputs: int, outputs: int, bound: float) -> dict[str, Array]:
    weight, bias = draw.uniform(-bound, bound, (outputs, inputs)), draw.uniform(-bound, bound, outputs)
    return {f"{name}.weight": weight.astype(np.float32), f"{name}.bias": bias.astype(np.float32)}


def _tensors(network: Arrays) -> dict[str, Tensor]:
    return {name: torch.tensor(array) for name, array in network.items()}
