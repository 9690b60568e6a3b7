"""A network in a file that describes itself: space, architecture, classes, normalisation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom import config
from fedloom.core.architecture import Architecture
from fedloom.core.errors import DamagedRun, InvalidArchitecture, InvalidConfig, one_line
from fedloom.files import read_arrays
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import Supernet, make_supernet

MODEL = "fedloom.model/1"
KEY = "fedloom"  # the description's place in every kind of file
LARGE = 100_000  # no image has more channels, pixels a side or classes
Facts = Mapping[str, Any]


def supernet_of(facts: Facts) -> Supernet[Any]:
    """The supernet that a description names; KeyError, TypeError or ValueError where it names none."""
    space = facts["space"]
    if space not in SPACES:
        raise ValueError(f"it is of the search space {space!r}, which is unknown here; one of your own is found with --plugin FILE")
    try:
        settings = config.from_table({"space": space, space: facts["settings"]}).components[space]
    except InvalidConfig as error:
        raise ValueError(str(error)) from error
    return make_supernet(space, settings, image_of(facts))


def image_of(facts: Facts) -> ImageShape:
    """The images that a description names; KeyError, TypeError or ValueError where it names none."""
    image = ImageShape(**facts["image"])
    if not all(type(number) is int and 0 < number <= LARGE for number in (image.channels, image.size, image.classes)):
        raise ValueError(f"images of {image.channels} channels, {image.size} pixels and {image.classes} classes")
    return image


def network_of(facts: Facts, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A described network with these weights and statistics, in evaluation mode; KeyError, TypeError or ValueError if they do not fit."""
    supernet = supernet_of(facts)
    try:
        architecture = Architecture.parse(facts["architecture"])
        supernet.space.check(architecture)
        return supernet.load(architecture, tensors)
    except (InvalidArchitecture, RuntimeError) as error:
        raise ValueError(str(error)) from error


def load_model(path: str | Path) -> tuple[nn.Module, dict[str, Any]]:
    """A personal model as a plain torch network in evaluation mode, and its description."""
    arrays, facts = read_arrays(Path(path))
    try:
        if "architecture" not in facts:
            raise ValueError("it names no architecture. `fedloom export` takes a network out of the weights of a supernet")
        return network_of(facts, {name: torch.from_numpy(array) for name, array in arrays.items()}), facts
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedRun(f"{path} is not a personal model of this version: {one_line(error)}", path=str(path)) from error
