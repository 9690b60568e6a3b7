"""The weights of a whole supernet in a file that describes itself: what ``import-weights`` writes and a run can start from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

import fedloom
from fedloom.config import as_overrides
from fedloom.core.errors import DamagedRun, InvalidConfig, InvalidData, one_line
from fedloom.core.reading import parse_json
from fedloom.core.seeds import rng
from fedloom.files import DIGEST, open_plain, read_arrays, write_arrays
from fedloom.models.personal import KEY, MODEL, supernet_of
from fedloom.supernets.base import Supernet, Weights
from fedloom.supernets.foreign import PUBLIC
from fedloom.supernets.normalisation import Statistics

WEIGHTS = "fedloom.weights/1"
CLASSIFIER = "classifier."  # the part of every supernet that depends on the number of classes
MOMENTS = (".running_mean", ".running_var")
GREY = 1 / 255  # one step of an 8-bit pixel: normalisations that differ by less are the same


def save_weights(path: Path, supernet: Supernet[Any], tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Weights and running statistics by our names, in one file. ``facts`` add to the description: source, classes, mean, std."""
    space = supernet.space
    described = {"space": space.name, "settings": asdict(space.settings), "image": asdict(space.image)}
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    write_arrays(path, arrays, {"format": WEIGHTS, **described, "fedloom": fedloom.__version__, **facts})


def load_supernet(path: str | Path) -> tuple[Supernet[Any], dict[str, Tensor], Statistics]:
    """A supernet, its weights and the running statistics of its normalisation layers, from a weights file.

    The logits of an architecture ``a`` are then
    ``supernet.forward(images, supernet.take(weights, a), a, supernet.take_statistics(statistics, a))``.
    """
    supernet, weights, statistics, _ = read_weights(Path(path))
    return supernet, weights, statistics


def read_weights(path: Path) -> tuple[Supernet[Any], dict[str, Tensor], Statistics, dict[str, Any]]:
    """The same and the file's description."""
    kind = (header(path) or {}).get("format")
    if kind != WEIGHTS:
        what = "a personal model, not the weights of a supernet" if kind == MODEL else "no weights file of Fedloom"
        raise InvalidData(f"{path} is {what}. `fedloom import-weights` writes one", file=str(path))
    try:
        arrays, facts = read_arrays(path)
    except DamagedRun as error:
        raise InvalidData(f"{path} is damaged. Write it again with `fedloom import-weights`", file=str(path)) from error
    try:
        supernet = supernet_of(facts)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        weights = {name: tensors[name] for name in supernet.shapes}
        odd = [name for name, shape in supernet.shapes.items() if tuple(weights[name].shape) != shape]
        if odd:
            raise ValueError(f"{odd[0]} has shape {tuple(weights[odd[0]].shape)}, not {supernet.shapes[odd[0]]}")
        norms = [name.removesuffix(MOMENTS[0]) for name in tensors if name.endswith(MOMENTS[0])]
        statistics = Statistics({norm: (tensors[norm + MOMENTS[0]], tensors[norm + MOMENTS[1]]) for norm in norms})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidData(f"{path} does not fit its own description: {one_line(error)}", file=str(path)) from error
    return supernet, weights, statistics, facts


def take_network(path: Path, architecture: str) -> tuple[nn.Module, dict[str, Any]]:
    """One network of a weights file, by name or id, as a plain torch network in evaluation mode, and the description of its own."""
    supernet, weights, statistics, facts = read_weights(path)
    chosen = supernet.space.find(architecture, rng(0, "architecture"))
    try:
        network = supernet.extract(weights, chosen, supernet.take_statistics(statistics, chosen))
    except (KeyError, IndexError, RuntimeError) as error:
        what = f"{path} lacks running statistics of {chosen.id[:60]}, or they are of another shape"
        raise InvalidData(f"{what} ({one_line(error)}). Write it again with `fedloom import-weights`", file=str(path)) from error
    return network, {**facts, "format": MODEL, "architecture": chosen.id}


def header(path: Path) -> dict[str, Any] | None:
    """The description in a safetensors file, not yet checked against its content; nothing if there is none."""
    try:
        open_plain(path).close()  # for the system's own words when it cannot be read
        with safe_open(path, framework="numpy") as file:
            facts = parse_json((file.metadata() or {})[KEY][DIGEST:])
    except OSError as error:
        raise InvalidData(f"{path} cannot be read: {error.strerror or one_line(error)}", file=str(path)) from error
    except (SafetensorError, KeyError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def starting_weights(path: Path, supernet: Supernet[Any], mean: Sequence[float], std: Sequence[float]) -> tuple[Weights, str]:
    """What a run with this supernet, on images normalised by ``mean`` and ``std``, begins with, and remarks on what is not as it was.

    Settings that are choices between names, names and shapes must be the supernet's. The classifier may be one of other classes:
    then it is left out and begins afresh.
    """
    theirs, weights, _, facts = read_weights(path)
    space = supernet.space
    if theirs.space.name != space.name:
        cure = f"Set space={theirs.space.name}"
        raise InvalidConfig(f"{path} holds weights of {theirs.space.name}, but the space of this run is {space.name}. {cure}")
    for item in fields(space.settings):  # norm, for example: no shape tells of it
        there, here = (getattr(settings, item.name) for settings in (theirs.space.settings, space.settings))
        if item.metadata["choices"] and there != here:
            key = f"{space.name}.{item.name}"
            raise InvalidConfig(f"{path} holds weights for {key}={there}, but this run has {key}={here}. Set {key}={there}", key=key)
    classes, wanted = theirs.space.image.classes, space.image.classes
    if classes != wanted:
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(CLASSIFIER)}
    odd = [name for name, tensor in weights.items() if tuple(tensor.shape) != supernet.shapes.get(name)]
    odd += [name for name in supernet.shapes if name not in theirs.shapes]
    if odd:
        shape, expected = (one.shapes.get(odd[0], "absent") for one in (theirs, supernet))
        what = f"{odd[0]} is {shape} there and {expected} here"
        raise InvalidConfig(f"{path} does not fit this run's supernet: {what}. {_cure(theirs, supernet)}")
    remarks = "" if classes == wanted else f"; their classifier has {classes} classes, this run's {wanted}, so that layer begins afresh"
    return weights, remarks + _normalisation_remark(facts, mean, std)


def _normalisation_remark(facts: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]) -> str:
    """Where the weights are for images normalised by other numbers than this run's; nothing if the file does not say."""
    try:
        theirs = [[float(number) for number in facts[key]] for key in ("mean", "std")]
    except (KeyError, TypeError, ValueError):
        return ""
    ours = [[*mean], [*std]]
    if all(len(there) == len(here) and np.allclose(there, here, rtol=0, atol=GREY) for there, here in zip(theirs, ours, strict=True)):
        return ""

    def shown(numbers: Sequence[float]) -> str:
        return " ".join(f"{number:.3f}" for number in numbers)

    there, here = (f"mean {shown(mean)} and std {shown(std)}" for mean, std in (theirs, ours))
    return f"; they are for images normalised by {there}, this run's are by {here}"


def _cure(theirs: Supernet[Any], supernet: Supernet[Any]) -> str:
    """For weights of another instance: another import, if what differs is only what an import cuts them for, or else other settings."""
    name, there, here = supernet.space.name, asdict(theirs.space.settings), asdict(supernet.space.settings)
    public, image = PUBLIC[name].make if name in PUBLIC else None, supernet.space.image
    differing = {key for key in here if there[key] != here[key]}
    if public and differing <= set(public.cut_for) and theirs.space.image.channels == image.channels:
        original = asdict(public.settings)
        given = as_overrides(name, {key: value for key, value in here.items() if value != original[key]})
        command = shlex.join(["fedloom", "import-weights", name, "FILE", *given, "--size", str(image.size)])
        return f"Weights of {name} are imported for the instance of the run: {command}"
    settings = shlex.join(as_overrides(name, there))
    return f"Give the run the settings that the weights were imported with, {settings} and images of {theirs.space.image.channels} channels"
