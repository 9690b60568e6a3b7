"""A dozen random architectures of every space, or a thousand (`pytest -m slow`), through everything that must agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedloom.core.seeds import rng
from fedloom.supernets.base import Supernet
from fedloom.supernets.elastic import Statistics
from support.nets import CLOSE, images_of, measured, weights_of


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.slow)])
@torch.no_grad()
def test_everything_agrees(supernet: Supernet[Any], count: int) -> None:
    draw, space = rng("many"), supernet.space
    weights, images, more = weights_of(supernet), images_of(supernet, 5), images_of(supernet, 6, seed=1)
    for start in range(0, count, 10):
        architectures = [space.sample(draw) for _ in range(min(10, count - start))]
        genes = torch.tensor([architecture.choices for architecture in architectures])
        masked = supernet.forward_many(torch.cat([more, images]), weights, genes, Statistics(rows=len(more)))[:, len(more) :]
        for architecture, logits in zip(architectures, masked, strict=True):
            space.check(architecture)
            assert space.decode(space.encode(architecture)) == architecture
            own = supernet.take(weights, architecture)
            statistics = measured(supernet, own, architecture, more)
            sliced = supernet.forward(images, own, architecture, statistics)
            network = supernet.extract(weights, architecture, statistics)
            torch.testing.assert_close(network(images), sliced, **CLOSE)
            torch.testing.assert_close(logits, sliced, **CLOSE)
            with FlopCounterMode(display=False) as counter:
                network(images[:1])
            assert space.cost(architecture).macs == pytest.approx(counter.get_total_flops() / 2, rel=0.01)
