"""What tests of models share."""

from __future__ import annotations

import json

import pytest
import torch

from fedloom.models import export
from fedloom.models.export import FORMATS
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import make_supernet
from fedloom.testing.nets import measured, weights_of
from support.exported import CLASSES, Exported, cases, described


@pytest.fixture(scope="session", params=cases())
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A small network of each space with random weights and statistics, in all formats. Tracing takes seconds: once per space."""
    name, formats = request.param
    settings, image = SPACES[name].settings.tiny(), ImageShape(3, 8, len(CLASSES))
    supernet = make_supernet(name, settings, image)
    named = supernet.space.named  # of networks one that is no MobileNetV3, which has a space of its own
    architecture = named.get("resnet18", named["smallest"])
    weights = weights_of(supernet)
    seen = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    network = supernet.extract(weights, architecture, measured(supernet, supernet.take(weights, architecture), architecture, seen))
    facts, folder = described(name, settings, image, architecture.id), tmp_path_factory.mktemp(name)
    paths = {format: folder / f"model.{FORMATS[format][0]}" for format in formats}
    with pytest.MonkeyPatch.context() as patch:
        program = export._program(network, facts)  # the same for both
        patch.setattr(export, "_program", lambda network, facts: program)
        differences = {format: FORMATS[format][1](paths[format], network, facts) for format in formats}
    return Exported(network, json.loads(json.dumps(facts)), paths, differences)
