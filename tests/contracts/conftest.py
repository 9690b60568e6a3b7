"""Tiny instances of every registered space and supernet, and of a plugin's: one per value of each setting that chooses between names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from fedloom import spaces, supernets  # noqa: F401 - fills the registries
from fedloom.spaces.base import SPACES, ImageShape, SearchSpace
from fedloom.supernets.base import SUPERNETS, Supernet
from support.plugged import TOY, plugged

IMAGE = ImageShape(channels=1, size=8, classes=3)


with plugged(TOY):
    KNOWN = [(entry, SUPERNETS[entry.name]) for entry in SPACES]


def instances() -> Iterator[Any]:
    for space, supernet in KNOWN:
        tiny = space.settings.tiny()
        choices = [(item.name, value) for item in fields(tiny) for value in item.metadata["choices"] or ()]
        for name, value in choices or [("", "")]:
            settings = replace(tiny, **{name: value}) if name else tiny
            marks = [] if settings == tiny else [pytest.mark.slow]  # CI takes the usual one of each space
            yield pytest.param((space.make, supernet.make, settings), id=f"{space.name} {value}".strip(), marks=marks)


@pytest.fixture(params=instances())
def space(request: pytest.FixtureRequest) -> SearchSpace:
    make_space, _, settings = request.param
    return make_space(settings, IMAGE)


@pytest.fixture(params=instances())
def supernet(request: pytest.FixtureRequest) -> Supernet[Any]:
    make_space, make_supernet, settings = request.param
    return make_supernet(make_space(settings, IMAGE))
