"""What a run begins with when it goes on from another: the shared weights of a run, or of a federation, as their server last had them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedloom import config
from fedloom.core.architecture import Architecture
from fedloom.core.errors import DamagedRun, FedloomError, InvalidConfig, one_line
from fedloom.core.messages import Arrays
from fedloom.files import read_arrays, write_arrays
from fedloom.models.supernet_weights import header
from fedloom.supernets.base import Supernet, Weights

BEGINNING = "fedloom.beginning/1"
STATE = Path("state") / "server.safetensors"


@dataclass(frozen=True)
class Beginning:
    """Weights of a supernet, or of one network (``architecture``), which may lack its classifier; and remarks on what is not as it was."""

    supernet: Weights = field(default_factory=dict)
    architecture: str = ""
    network: Weights = field(default_factory=dict)
    remark: str = ""

    def save(self, path: Path) -> None:
        arrays = {f"supernet/{name}": tensor.numpy() for name, tensor in self.supernet.items()}
        arrays |= {f"network/{name}": tensor.numpy() for name, tensor in self.network.items()}
        write_arrays(path, arrays, {"format": BEGINNING, "architecture": self.architecture, "remark": self.remark})


def is_of_run(path: Path) -> bool:
    """Whether this is a run, its state, what newcomers of a federation get, or what ``save`` wrote; else a file of weights, or nothing."""
    if path.is_dir():
        return True
    if not path.exists():
        return False
    facts = header(path) or {}
    return facts.get("format") == BEGINNING or "state" in facts


def beginning(path: Path, supernet: Supernet[Any], classes: Sequence[str]) -> Beginning:
    """classes: names of those of the run that begins. A classifier of other classes is left out and begins afresh."""
    file = path / STATE if path.is_dir() else path
    if not file.exists():
        raise InvalidConfig(f"{path} is no run that could be gone on from: it has no {STATE}", key="weights")
    arrays, facts = read_arrays(file)
    if facts.get("format") == BEGINNING:
        return Beginning(_part(arrays, "supernet"), str(facts["architecture"]), _part(arrays, "network"), str(facts["remark"]))
    named = _described(path, supernet) if path.is_dir() else ()
    same = tuple(named) == tuple(classes) if named else None  # a federation's file does not name its classes
    groups = {name.partition("/")[0] for name in arrays}
    for group in sorted(groups):
        found = _part(arrays, group)
        if set(found) == set(supernet.shapes):
            return _of_supernet(path, found, supernet, same)
    architecture = facts.get("fields", {}).get("architecture")
    if "weights" not in groups or not isinstance(architecture, str):
        raise InvalidConfig(f"{path} shares no weights that a run could begin with", key="weights")
    return _of_network(path, architecture, _part(arrays, "weights"), supernet, same)


def _part(arrays: Arrays, group: str) -> dict[str, torch.Tensor]:
    return {name.partition("/")[2]: torch.tensor(array) for name, array in arrays.items() if name.startswith(f"{group}/")}


def _described(run: Path, supernet: Supernet[Any]) -> tuple[str, ...]:
    """Names of a run's classes, where a personal model says them. Refuses a run of another space."""
    try:
        settings = config.without_components(config.read_toml(run / "config.toml"))
    except FedloomError as error:
        raise DamagedRun(f"{run / 'config.toml'} cannot be read: {one_line(error)}", path=str(run)) from error
    if settings.space != supernet.space.name:
        cure = f"Set space={settings.space}"
        raise InvalidConfig(f"{run} is a run on {settings.space}, and this one's space is {supernet.space.name}. {cure}", key="weights")
    model = next(iter(sorted(run.glob("clients/*/model.safetensors"))), None)
    facts: Mapping[str, Any] = (header(model) or {}) if model else {}
    theirs, ours = facts.get("settings"), asdict(supernet.space.settings)
    if isinstance(theirs, Mapping) and (odd := sorted(key for key in ours if _plain(theirs.get(key)) != _plain(ours[key]))):
        key = f"{supernet.space.name}.{odd[0]}"
        raise InvalidConfig(f"{run} has {key}={theirs.get(odd[0])}, and this run {key}={ours[odd[0]]}. Give both the same", key=key)
    return tuple(map(str, facts.get("classes", ())))


def _plain(value: Any) -> Any:
    """As JSON has it."""
    return list(value) if isinstance(value, tuple) else value


def _of_supernet(path: Path, found: dict[str, torch.Tensor], supernet: Supernet[Any], same: bool | None) -> Beginning:
    kept, remark = _fitting(path, found, supernet.shapes, supernet, same)
    return Beginning(supernet=kept, remark=remark)


def _of_network(path: Path, architecture: str, found: dict[str, torch.Tensor], supernet: Supernet[Any], same: bool | None) -> Beginning:
    chosen = Architecture.parse(architecture)
    shapes = {name: tuple(tensor.shape) for name, tensor in supernet.plain(supernet.initial(0), chosen).items()}
    kept, remark = _fitting(path, found, shapes, supernet, same)
    return Beginning(architecture=architecture, network=kept, remark=remark)


def _fitting(
    path: Path, found: dict[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], supernet: Supernet[Any], same: bool | None
) -> tuple[dict[str, torch.Tensor], str]:
    """All but a classifier of other classes. same: whether the classes have the same names, if that is known."""
    odd = [name for name, tensor in found.items() if shapes.get(name) != tuple(tensor.shape)]
    others = [name for name in odd if not supernet.in_head(name)]
    if others:
        there, here = tuple(found[others[0]].shape), shapes.get(others[0], "absent")
        what = f"{path} does not fit this run's networks: {others[0]} is {there} there and {here} here"
        raise InvalidConfig(f"{what}. Give both the same space, image size and method", key="weights")
    afresh = bool(odd) or same is False
    kept = {name: tensor for name, tensor in found.items() if not (afresh and supernet.in_head(name))}
    remark = "; the classes are others than there, so the classifier begins afresh" if afresh else ""
    return kept, remark
