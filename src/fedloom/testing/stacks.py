"""Networks that train and are scored in one stack give what each of them gives alone, for every supernet.

Tolerances, against the furthest that a weight moved, or the largest logit: 1e-5. Scores and statistics in float32. Training in float64,
because in float32 a gradient jumps where a rectifier sits within rounding of its switch (see ``testing/masked.py``); in float32 the
whole of what moved agrees within 5 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.supernets.base import Supernet
from fedloom.testing.executions import MASKED, SLICED, draws_of, examples_of
from fedloom.testing.nets import InPrecision, masks, weights_of
from fedloom.testing.spaces import Given, each, needs_masks
from fedloom.training.holds import Part, Pull
from fedloom.training.local import NetworkJob, SupernetJob, Trained, Trainer
from fedloom.training.scoring import Measured, NetworkRequest, Scorer

CLOSE, ROUGHLY = 1e-5, 0.05
Named = Mapping[str, Tensor]


def in_precision(weights: Named, precision: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(precision) for name, tensor in weights.items()}


def some(supernet: Supernet[Any], kind: str) -> list[Architecture]:
    """Three times one, or three of the space."""
    one = supernet.space.sample(rng("stacked"))
    return [one] * 3 if kind == "one" else [one, supernet.space.named["medium"], supernet.space.named["smallest"]]


def check_moved(stacked: Trained, alone: Trained, start: Named) -> None:
    assert stacked.steps == alone.steps and stacked.macs == alone.macs > 0
    assert list(stacked.weights) == list(alone.weights)
    before, one, other = (torch.cat([own[name].flatten() for name in alone.weights]) for own in (start, alone.weights, stacked.weights))
    assert one.dtype == other.dtype and (one != before).any()
    if one.dtype == torch.float64:
        assert float((one - other).abs().max()) <= CLOSE * float((one - before).abs().max())
    else:
        assert (one - other).norm() <= ROUGHLY * (one - before).norm()


class StackContract(Given):
    """``execution=masked`` stacks also on a CPU, which ``auto`` does on a GPU only."""

    precision = each([torch.float64, torch.float32], ids=str)
    stacked_kind = each(["one", "different"])

    def test_networks_train_in_a_stack_as_alone(self, supernet: Supernet[Any], stacked_kind: str, precision: torch.dtype) -> None:
        """Of one architecture, and of different ones, with batches and numbers of steps of their own."""
        if stacked_kind == "different" and not masks(supernet):
            pytest.skip("different networks stack where the supernet has a masked execution, which is optional")
        architectures, sizes = some(supernet, stacked_kind), (16, 8, 5)
        starts = [
            in_precision(supernet.plain(weights_of(supernet, seed), architecture), precision)
            for seed, architecture in enumerate(architectures)
        ]

        def jobs() -> Iterator[NetworkJob]:
            for seed, (architecture, start, size) in enumerate(zip(architectures, starts, sizes, strict=True)):
                yield NetworkJob(start, architecture, examples_of(supernet, size, seed), [0.02, 0.01], np.random.default_rng(seed))

        alone, stacked = (Trainer(supernet, own, InPrecision(precision=precision)).train_networks([*jobs()]) for own in (SLICED, MASKED))
        for one, other, start in zip(alone, stacked, starts, strict=True):
            check_moved(other, one, start)

    def test_networks_that_are_held_back_train_in_a_stack_as_alone(self, supernet: Supernet[Any]) -> None:
        """Some move in a part only, some are pulled towards other weights, some are as usual: all of them at once."""
        kinds: list[tuple[Part, float]] = [("head", 0.0), ("whole", 0.5), ("body", 2.0), ("whole", 0.0), ("whole", 3.0), ("head", 0.0)]
        architectures = some(supernet, "different" if masks(supernet) else "one") * 2
        starts, anchors = (
            [in_precision(supernet.plain(weights_of(supernet, seed + first), one), torch.float64) for seed, one in enumerate(architectures)]
            for first in (0, 10)
        )

        def jobs() -> Iterator[NetworkJob]:
            for seed, (one, start, anchor, (part, strength)) in enumerate(zip(architectures, starts, anchors, kinds, strict=True)):
                pull, draw = Pull(anchor, strength) if strength else None, np.random.default_rng(seed)
                yield NetworkJob(start, one, examples_of(supernet, 8, seed), [0.02, 0.01], draw, part, pull)

        pixels = InPrecision(precision=torch.float64)
        alone, stacked = (Trainer(supernet, own, pixels).train_networks([*jobs()]) for own in (SLICED, MASKED))
        for one, other, start, (part, _) in zip(alone, stacked, starts, kinds, strict=True):
            check_moved(other, one, start)
            still = [name for name in start if part != "whole" and supernet.in_head(name) != (part == "head")]
            assert all(torch.equal(trained.weights[name], start[name]) for trained in (one, other) for name in still)

    @needs_masks
    @pytest.mark.parametrize("draws", ["archive", "taught"])
    def test_supernets_train_in_a_stack_as_alone(self, supernet: Supernet[Any], precision: torch.dtype, draws: str) -> None:
        starts = [in_precision(weights_of(supernet, seed), precision) for seed in range(3)]

        def jobs() -> Iterator[SupernetJob]:
            for seed, (start, size) in enumerate(zip(starts, (16, 8, 5), strict=True)):
                draw, taught = draws_of(supernet, draws), draws == "taught"
                yield SupernetJob(start, draw, examples_of(supernet, size, seed), [0.02], np.random.default_rng(seed), taught)

        alone, stacked = (Trainer(supernet, own, InPrecision(precision=precision))._train_supernets([*jobs()]) for own in (SLICED, MASKED))
        for one, other, start in zip(alone, stacked, starts, strict=True):
            check_moved(other, one, start)

    def test_networks_are_scored_in_a_stack_as_alone(self, supernet: Supernet[Any]) -> None:
        """Those of one architecture and with equally many images in one pass; the others beside them."""
        one, other, _ = some(supernet, "different")
        train, few = examples_of(supernet, 20, seed=1), examples_of(supernet, 7, seed=2)
        parts = [(examples_of(supernet, 30), examples_of(supernet, 9, seed=3)), (examples_of(supernet, 11, seed=4),)]
        requests = [
            NetworkRequest(supernet.plain(weights_of(supernet, seed), architecture), architecture, own, parts[which])
            for seed, (architecture, own, which) in enumerate(
                [(one, train, 0), (other, train, 0), (one, train, 0), (one, few, 0), (one, train, 1), (one, train, 0)]
            )
        ]
        pixels = InPrecision()
        alone, stacked = (Scorer(supernet, own, pixels).score_networks(requests) for own in (SLICED, MASKED))
        for request, single, several in zip(requests, alone, stacked, strict=True):
            check_measured(several, single, request)
        for part in (0, 1):
            check_ranking(
                [measured for measured, request in zip(alone, requests, strict=True) if len(request.parts) > part],
                [measured for measured, request in zip(stacked, requests, strict=True) if len(request.parts) > part],
                part,
            )
        assert Scorer(supernet, MASKED, pixels).score_networks([]) == []

    def test_precision_of_activations(self, supernet: Supernet[Any]) -> None:
        """A stack in half precision moves about where one in full precision does, and keeps full precision in its weights."""
        architecture = some(supernet, "one")[0]
        start = supernet.plain(weights_of(supernet), architecture)

        def train(precision: str) -> Trained:
            job = NetworkJob(start, architecture, examples_of(supernet, 8), [0.01], np.random.default_rng(0))
            settings = replace(MASKED, precision=precision)
            return Trainer(supernet, settings, InPrecision()).train_networks([job, job])[0]

        full, half, auto = train("full"), train("half"), train("auto")
        assert all(tensor.dtype == torch.float32 for tensor in half.weights.values())
        assert all(torch.equal(full.weights[name], auto.weights[name]) for name in start)  # on a CPU
        before, one, other = (torch.cat([own[name].flatten() for name in start]) for own in (start, full.weights, half.weights))
        assert 0 < (one - other).norm() < 0.5 * (one - before).norm()


def check_measured(stacked: Measured, alone: Measured, request: NetworkRequest) -> None:
    assert set(stacked.statistics) == set(alone.statistics) and len(stacked.scores) == len(alone.scores) == len(request.parts)
    for name, moments in alone.statistics.items():
        for one, other in zip(moments, stacked.statistics[name], strict=True):
            assert one.shape == other.shape and float((one - other).abs().max()) <= 10 * CLOSE * max(1.0, float(one.abs().max())), name
    for one_score, other_score, part in zip(alone.scores, stacked.scores, request.parts, strict=True):
        assert other_score.loss == pytest.approx(one_score.loss, rel=CLOSE)
        assert abs(other_score.accuracy - one_score.accuracy) <= 1.01 / len(part)  # an image on the edge may fall either way


def check_ranking(alone: Sequence[Measured], stacked: Sequence[Measured], part: int) -> None:
    orders = [sorted(range(len(own)), key=lambda place, own=own: own[place].scores[part].rank) for own in (alone, stacked)]  # type: ignore[misc]
    assert orders[0] == orders[1]
