"""Tiny instances of every registered space and supernet: one per value of each setting that is a choice between names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from fedloom import spaces, supernets  # noqa: F401 - fills the registries
from fedloom.assemble import make_supernet
from fedloom.spaces.base import SPACES, ImageShape, SearchSpace
from fedloom.supernets.base import Supernet

IMAGE = ImageShape(channels=1, size=8, classes=3)


def instances() -> Iterator[Any]:
    for entry in SPACES:
        tiny = entry.settings.tiny()
        choices = [(item.name, value) for item in fields(tiny) for value in item.metadata["choices"] or ()]
        for name, value in choices or [("", "")]:
            yield pytest.param((entry.name, replace(tiny, **{name: value}) if name else tiny), id=f"{entry.name} {value}".strip())


@pytest.fixture(params=instances())
def space(request: pytest.FixtureRequest) -> SearchSpace:
    name, settings = request.param
    return SPACES[name].make(settings, IMAGE)


@pytest.fixture(params=instances())
def supernet(request: pytest.FixtureRequest) -> Supernet[Any]:
    name, settings = request.param
    return make_supernet(name, settings, IMAGE)
