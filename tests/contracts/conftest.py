"""Tiny instances of every registered space and supernet. A new one needs an entry of TINY, and no other test."""

from __future__ import annotations

from typing import Any

import pytest

from fedloom.assemble import make_supernet
from fedloom.spaces.base import SPACES, ImageShape, SearchSpace
from fedloom.spaces.mobilenetv3 import MobileNetV3Settings
from fedloom.supernets.base import SUPERNETS, Supernet

IMAGE = ImageShape(channels=1, size=8, classes=3)
MOBILENETV3 = {"width": 0.1, "strides": (2, 1, 1, 1, 1)}

# space -> settings of its instances, by the name of their normalisation
TINY: dict[str, dict[str, Any]] = {
    "mobilenetv3": {norm: MobileNetV3Settings(norm=norm, **MOBILENETV3) for norm in ("batch", "group")},
}


def tiny(name: str) -> dict[str, Any]:
    assert name in TINY, f"add tiny settings of {name} to TINY"
    return TINY[name]


@pytest.fixture(params=[entry.name for entry in SPACES])
def space(request: pytest.FixtureRequest) -> SearchSpace:
    return SPACES[request.param].make(next(iter(tiny(request.param).values())), IMAGE)


@pytest.fixture(params=[f"{entry.name}, {norm} norm" for entry in SUPERNETS for norm in TINY.get(entry.name, ("batch",))])
def supernet(request: pytest.FixtureRequest) -> Supernet[Any]:
    name, norm = request.param.removesuffix(" norm").split(", ")
    return make_supernet(name, tiny(name)[norm], IMAGE)
