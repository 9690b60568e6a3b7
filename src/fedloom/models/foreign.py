"""Weights that others trained: a public network's state dict becomes a weights file of ours."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.config import as_overrides, space_settings
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.core.registry import did_you_mean
from fedloom.core.seeds import rng
from fedloom.models.personal import LARGE
from fedloom.models.supernet_weights import CLASSIFIER, header, save_weights
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import Supernet, make_supernet
from fedloom.supernets.foreign import PUBLIC
from fedloom.supernets.foreign.base import PublicNetwork
from fedloom.supernets.foreign.state_dict import Checkpoint, read_state, some

MOMENT = re.compile(r"\.running_(mean|var)$")


@dataclass(frozen=True)
class Imported:
    """A public network's weights under our names."""

    source: str
    supernet: Supernet[Any]
    tensors: Mapping[str, Tensor]  # weights and running statistics
    expected_leftovers: Mapping[str, int]  # last part of the key -> how many
    unexpected_leftovers: tuple[str, ...]
    checkpoint: Checkpoint


def import_weights(space: str, path: Path, overrides: Sequence[str], size: int, out: Path, part: str = "") -> Imported:
    """Read ``path``, check it against the public network of this space as ``overrides`` change it, write ``out``.

    ``part`` is the dictionary to take where a checkpoint holds several, such as ``state_dict_ema``.
    """
    SPACES[space]  # refuses an unknown name
    if space not in PUBLIC:
        raise InvalidConfig(f"There is no public network to import into {space!r}. {did_you_mean(space, list(PUBLIC))}")
    public = PUBLIC[space].make
    settings = _settings(space, public, overrides)
    if header(path):
        raise InvalidData(f"{path} is a file of Fedloom already. Give import-weights a checkpoint of the public network")
    outline = make_supernet(space, settings, ImageShape(3, size or public.size, 2))
    names = set(map(public.fold, public.table(outline).values()))
    imported = _translate(public, outline, path, read_state(path, lambda key: public.fold(key) in names, part))
    classes = imported.supernet.space.image.classes
    channels = imported.supernet.space.image.channels
    mean, std = (values if len(values) == channels else (0.5,) * channels for values in (public.mean, public.std))
    described = {"source": imported.source, "classes": [str(number) for number in range(classes)], "mean": mean, "std": std}
    save_weights(out, imported.supernet, imported.tensors, described)
    return imported


def _settings(space: str, public: PublicNetwork, overrides: Sequence[str]) -> Any:
    settings = space_settings(space, overrides, public.settings)
    for key in public.fixed:
        theirs, given = (as_overrides(space, {key: getattr(one, key)})[0] for one in (public.settings, settings))
        if given != theirs:
            raise InvalidConfig(f"The public network has {theirs}: its weights mean nothing with {given}. Leave that setting out")
    return settings


# -- names and shapes -----------------------------------------------------------------
def _translate(public: PublicNetwork, outline: Supernet[Any], path: Path, checkpoint: Checkpoint) -> Imported:
    supernet = _instance(public, outline, path, {public.fold(key): tensor for key, tensor in checkpoint.tensors.items()})
    state = public.split(checkpoint.tensors, supernet)
    known = {public.fold(key): key for key in state}
    table = {ours: public.fold(theirs) for ours, theirs in public.table(supernet).items()}
    missing = [public.table(supernet)[ours] for ours, theirs in table.items() if theirs not in known]
    used = {known.get(theirs) for theirs in table.values()}
    left = [key for key in state if key not in used]
    expected = {key for key in left if re.search(public.expected_leftovers(supernet), key)}
    unexpected = [key for key in left if key not in expected]
    source = public.source.format(**asdict(supernet.space.settings))
    what = f"{path} is not a checkpoint of {source}"
    cure = f"If it is another size of that network, say so with {supernet.space.name}.KEY=VALUE"
    if missing:
        has = f"; it has {some(unexpected)}" if unexpected else ""
        what += f": it lacks {len(missing)} of {len(table)} tensors, such as {some(missing)}{has}"
        raise InvalidData(f"{what}. {cure}", file=str(path))
    shapes = _shapes(supernet, list(table))
    tensors, odd = {}, []
    for ours, theirs in table.items():
        tensor, shape = state[known[theirs]], shapes[ours]
        if not reshapes(tuple(tensor.shape), shape):
            odd.append(f"{known[theirs]} {tuple(tensor.shape)} where {shape} belongs")
        elif wrong := _wrong_numbers(ours, tensor):
            raise InvalidData(f"{path}: {known[theirs]} {wrong}", file=str(path))
        else:
            tensors[ours] = tensor.float().reshape(shape).contiguous()
    if odd:
        raise InvalidData(f"{what}: {counted(len(odd), 'tensor')} of another shape, such as {some(odd)}. {cure}", file=str(path))
    kinds = Counter(key.rpartition(".")[2] for key in sorted(expected))
    return Imported(source, supernet, tensors, kinds, tuple(sorted(unexpected)), checkpoint)


def _wrong_numbers(name: str, tensor: Tensor) -> str:
    """Why a tensor of this name cannot be used; nothing if it can."""
    if not tensor.is_floating_point() or "float4" in str(tensor.dtype):  # which torch cannot convert
        return f"holds {str(tensor.dtype).removeprefix('torch.')} where floating-point numbers belong"
    numbers = tensor.float()
    if not numbers.isfinite().all():
        return "holds values that are not finite numbers"
    return "holds negative variances" if name.endswith(".running_var") and (numbers < 0).any() else ""


def _instance(public: PublicNetwork, outline: Supernet[Any], path: Path, state: Mapping[str, Tensor]) -> Supernet[Any]:
    """The supernet with the checkpoint's number of classes and input channels."""
    table = public.table(outline)
    first = next(name for name, shape in outline.shapes.items() if len(shape) == 4)  # the stem's convolution

    def number(name: str, axis: int, what: str) -> int:
        """Along this axis, if the tensor fits along the others; that one does not fit is said with all the rest."""
        ours, theirs = outline.shapes[name], state.get(public.fold(table[name]))
        shape = ours if theirs is None else tuple(theirs.shape)
        if shape[:axis] + shape[axis + 1 :] != ours[:axis] + ours[axis + 1 :]:
            return ours[axis]
        if not 0 < shape[axis] <= LARGE:
            raise InvalidData(f"{path}: {table[name]} is for {shape[axis]} {what}; 1 to {LARGE} are possible", file=str(path))
        return shape[axis]

    image = ImageShape(number(first, 1, "channels"), outline.space.image.size, number(f"{CLASSIFIER}weight", 0, "classes"))
    return make_supernet(outline.space.name, outline.space.settings, image)


def _shapes(supernet: Supernet[Any], names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Of parameters and running statistics: those of a layer have the shape of its weight, if it has one."""
    shapes = {name: supernet.shapes[like] for name in names if (like := MOMENT.sub(".weight", name)) in supernet.shapes}
    draw = rng(0, "shapes")
    for _ in range(1000):  # normalisations without weights: a few stand-alone networks name them all
        if set(names) <= set(shapes):
            return shapes
        for architecture in supernet.space.fair(draw):
            with torch.device("meta"):
                state = supernet.network(architecture).state_dict()
            shapes = {name: tuple(tensor.shape) for name, tensor in state.items()} | shapes
    raise ValueError(f"no architecture has {sorted(set(names) - set(shapes))}")


def reshapes(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether one shape is the other with some neighbouring axes merged, or with axes of size one more or less."""
    first, second = set(accumulate(one, mul, initial=1)), set(accumulate(other, mul, initial=1))
    return prod(one) == prod(other) and (first <= second or second <= first)


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
