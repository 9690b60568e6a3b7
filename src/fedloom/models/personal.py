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
LARGE = 100_000  # no image has more channels or classes
# What a file may describe. Its network is built only if it is within these bounds, so that no description exhausts the memory.
MOST_PIXELS = 1024  # a side, as for data.image_size
MOST_NUMBERS = 2**24  # of one image: 64 MB
MOST_PARAMETERS = 2**28  # of the largest network of its space: 1 GB
MOST_MACS = 2**38  # of its network on one image: seconds
Facts = Mapping[str, Any]


def supernet_of(facts: Facts) -> Supernet[Any]:
    """The supernet that a description names; KeyError, TypeError or ValueError where it names none."""
    space = facts["space"]
    if space not in SPACES:
        raise ValueError(f"it is of the search space {space!r}, which is unknown here; one of your own is found with --plugin FILE")
    try:
        settings = config.from_table({"space": space, space: facts["settings"]}).components[space]
        supernet = make_supernet(space, settings, image_of(facts))
        largest = supernet.space.cost(supernet.space.named["largest"])
    except InvalidConfig as error:
        raise ValueError(str(error)) from error
    _bound("parameters", largest.parameters, MOST_PARAMETERS)
    return supernet


def image_of(facts: Facts) -> ImageShape:
    """The images that a description names; KeyError, TypeError or ValueError where it names none."""
    image = ImageShape(**facts["image"])
    if not all(type(number) is int and 0 < number <= LARGE for number in (image.channels, image.size, image.classes)):
        raise ValueError(f"images of {image.channels} channels, {image.size} pixels and {image.classes} classes")
    _bound("pixels a side", image.size, MOST_PIXELS)
    _bound("numbers in an image", image.channels * image.size**2, MOST_NUMBERS)
    return image


def _bound(what: str, number: int, most: int) -> None:
    if number > most:
        raise ValueError(f"it describes a network of {number:,} {what}; at most {most:,} are read from a file")


def network_of(facts: Facts, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A described network with these weights and statistics, in evaluation mode; KeyError, TypeError or ValueError if they do not fit."""
    supernet = supernet_of(facts)
    try:
        architecture = Architecture.parse(facts["architecture"])
        supernet.space.check(architecture)
        _bound("multiply-accumulates", supernet.space.cost(architecture).macs, MOST_MACS)
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
