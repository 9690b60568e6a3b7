"""Small networks of every space, exported in every format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.models.export import FORMATS
from fedloom.models.personal import MODEL
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import make_supernet

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CLASSES = ["Igel", "Füchsin", "owl"]
WARM = 1.7  # temperature


@dataclass(frozen=True)
class Exported:
    network: nn.Module
    facts: dict[str, Any]
    files: dict[str, Path]  # by format
    differences: dict[str, float | None]


def described(space: str, settings: Any, image: ImageShape, architecture: str) -> dict[str, Any]:
    return {
        "format": MODEL,
        "space": space,
        "settings": vars(settings).copy(),
        "image": vars(image).copy(),
        "classes": CLASSES,
        "mean": [0.4] * image.channels,
        "std": [0.2] * image.channels,
        "architecture": architecture,
        "temperature": WARM,
    }


def cases() -> Iterator[Any]:
    """Every space in every format; a transformer takes ten seconds to translate, so that one is for `make slow`."""
    for entry in SPACES.values():
        marks = [pytest.mark.slow] if entry.name == "nasvit" else []
        yield pytest.param((entry.name, tuple(FORMATS)), marks=marks, id=entry.name)


def small_model(path: Path, **changes: Any) -> Path:
    """A model file of one-channel images whose description is changed; None removes an entry."""
    settings, image = SPACES["mobilenetv3"].settings.tiny(), ImageShape(1, 8, 3)
    supernet = make_supernet("mobilenetv3", settings, image)
    smallest = supernet.space.named["smallest"]
    network = supernet.network(smallest)
    facts = {**described("mobilenetv3", settings, image, smallest.id), **changes}
    FORMATS["safetensors"][1](path, network, {name: value for name, value in facts.items() if value is not None})
    return path


def written(exported: Exported, format: str) -> Path:
    return exported.files[format]


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(count))
