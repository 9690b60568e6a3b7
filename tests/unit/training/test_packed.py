"""Packed weights: what lies where, and masks of what architectures train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedloom.core.seeds import rng
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import Region, Supernet, make_supernet
from fedloom.supernets.chain import Chain
from fedloom.testing.nets import InPrecision, mask
from fedloom.training import local
from fedloom.training.local import Trainer
from fedloom.training.packed import Packed, flattened
from fedloom.training.recipe import TrainingSettings

HOST = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (3, 5), "vector": (9,), "number": (1,), "kernel": (2, 1, 3, 3)}


@pytest.fixture(params=["mobilenetv3", "nasvit", "darts", "networks"])
def supernet(request: pytest.FixtureRequest) -> Supernet[Any]:
    entry = SPACES[request.param]
    assert entry.settings is not None
    return make_supernet(request.param, entry.settings.tiny(), ImageShape(3, 8, 4))


def trainer_of(supernet: Supernet[Any]) -> Trainer:
    return Trainer(supernet, TrainingSettings(), InPrecision())


# -- views -------------------------------------------------------------------
@pytest.mark.parametrize("rows", [(), (4,)])
def test_views_are_the_weights_and_share_their_memory(rows: tuple[int, ...]) -> None:
    weights = {name: torch.randn(*rows, *shape) for name, shape in SHAPES.items()}
    packed = Packed(flattened(weights.values(), stacked=bool(rows)), SHAPES)
    assert {name: view.shape for name, view in packed.items()} == {name: tensor.shape for name, tensor in weights.items()}
    assert all(torch.equal(packed[name], tensor) for name, tensor in weights.items())
    packed["vector"].zero_()
    again = Packed(packed.flat, SHAPES)
    assert not again["vector"].any()
    assert all(torch.equal(again[name], weights[name]) for name in SHAPES if name != "vector")
    part = packed.span(["kernel", "number"])  # a part of wider rows
    assert list(part) == ["number", "kernel"]
    assert all(torch.equal(part[name], weights[name]) for name in part)


def test_entries_of_other_shapes_are_refused() -> None:
    for flat in (torch.zeros(48), torch.zeros(112)[::2]):  # too few; not one after the other
        with pytest.raises(ValueError, match="not weights of these shapes"):
            Packed(flat, SHAPES)["vector"]


# -- masks ---------------------------------------------------------------------
def expected(supernet: Supernet[Any], *drawn: Any) -> torch.Tensor:
    one_by_one = [flattened(mask(shape, supernet.regions(one).get(name)) for name, shape in supernet.shapes.items()) for one in drawn]
    return torch.stack(one_by_one).any(0)


def test_masks_are_the_regions(supernet: Supernet[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where little is remembered."""
    draw = rng("masks")
    drawn = [*supernet.space.named.values(), *(supernet.space.sample(draw) for _ in range(10))]
    for kept in (local.KEPT_MARKS, 0):
        monkeypatch.setattr(local, "KEPT_MARKS", kept)
        trainer = trainer_of(supernet)
        for one, other in zip(drawn, reversed(drawn), strict=True):
            assert torch.equal(trainer._mask([one], HOST), expected(supernet, one))
            assert torch.equal(trainer._mask([one, other], HOST), expected(supernet, one, other))


def test_masks_of_pieces_that_lie_among_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    supernet = make_supernet("mobilenetv3", SPACES["mobilenetv3"].settings.tiny(), ImageShape(3, 8, 4))  # type: ignore[union-attr]
    assert isinstance(supernet, Chain)
    regions: dict[int, dict[str, Region]] = {
        0: {"matrix": (slice(0, 2), slice(None)), "number": (slice(None),)},
        1: {"vector": (slice(0, 4),), "kernel": (slice(0, 1), slice(None), slice(1, 2), slice(None))},
        2: {},
    }
    monkeypatch.setitem(supernet.__dict__, "shapes", SHAPES)
    monkeypatch.setattr(supernet, "pieces", lambda architecture: (1, 0, 2))
    monkeypatch.setattr(supernet, "piece_regions", regions.__getitem__)
    smallest = supernet.space.named["smallest"]
    assert torch.equal(trainer_of(supernet)._mask([smallest], HOST), expected(supernet, smallest))
