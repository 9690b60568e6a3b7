"""Latency tables: what an image takes on another device, measured there once (``fedloom latency``) and read by budgets elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig, one_line
from fedloom.core.reading import parse_json
from fedloom.core.seeds import rng
from fedloom.files import read_plain, write_file
from fedloom.spaces.base import SearchSpace

TABLE = "fedloom latency table 1"
HELD_OUT = 4  # every fourth measured architecture judges the table and does not make it
STIFFNESS = 1e-3  # of the ridge, for each architecture


@dataclass(frozen=True)
class LatencyTable:
    """What one image takes on a device, for every architecture of a space: a base, and a time for each choice of each gene and for each
    unit of cost, fitted to measured architectures. Small and repeatable, where a clock is neither.

    error_ms: the mean absolute error on architectures that were measured and not fitted.
    """

    space: str
    image: tuple[int, int, int]  # channels, size, classes
    sizes: tuple[int, ...]  # choices of each gene
    largest: tuple[float, ...]  # macs, parameters, activations of the largest architecture: the units
    weights: tuple[float, ...]
    device: str
    measured: int
    error_ms: float
    mean_ms: float

    def predictor(self, space: SearchSpace) -> Callable[[Architecture], float]:
        weights = np.array(self.weights)
        return lambda architecture: float(_features(space, architecture, self.largest) @ weights)


def _features(space: SearchSpace, architecture: Architecture, largest: Sequence[float]) -> npt.NDArray[np.float64]:
    """(1 + 3 + choices of all genes,) of an architecture; a gene without effect has none."""
    cost = space.cost(architecture)
    one_hot = np.zeros((len(space.genes), int(space.sizes.max())))
    one_hot[np.arange(len(space.genes)), architecture.choices] = space.active(architecture.choices)
    there = np.arange(one_hot.shape[1]) < space.sizes[:, None]
    costs = np.array([cost.macs, cost.parameters, cost.activations]) / largest
    return np.concatenate([[1.0], costs, one_hot[there]])


def make_table(space: SearchSpace, latency_ms: Callable[[Architecture], float], count: int, device: str, seed: int = 0) -> LatencyTable:
    """From ``count`` random architectures, the smallest and the largest. Ridge regression; the base is not held back."""
    draw = rng(seed, "latency")
    tried = [space.named["smallest"], space.named["largest"], *(space.sample(draw) for _ in range(count))]
    most = space.cost(space.named["largest"])
    largest = (float(most.macs), float(most.parameters), float(most.activations))
    features = np.stack([_features(space, one, largest) for one in tried])  # (architectures, features)
    times = np.array([latency_ms(one) for one in tried])
    judging = np.arange(len(tried)) % HELD_OUT == HELD_OUT - 1

    def fitted(rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        x, y = features[rows], times[rows]
        ridge = STIFFNESS * len(x) * np.eye(x.shape[1])
        ridge[0, 0] = 0.0
        return np.linalg.solve(x.T @ x + ridge, x.T @ y)

    error = float(np.abs(features[judging] @ fitted(~judging) - times[judging]).mean())
    image, weights = space.image, fitted(np.ones(len(tried), bool))
    return LatencyTable(
        space=space.name,
        image=(image.channels, image.size, image.classes),
        sizes=tuple(space.sizes.tolist()),
        largest=largest,
        weights=tuple(weights.round(9).tolist()),
        device=device,
        measured=len(tried),
        error_ms=error,
        mean_ms=float(times.mean()),
    )


def write_table(path: Path, table: LatencyTable) -> None:
    write_file(path, (json.dumps({"format": TABLE, **asdict(table)}, indent=1) + "\n").encode())


def read_table(path: Path, space: SearchSpace) -> Callable[[Architecture], float]:
    """Milliseconds of an architecture by a table, which must be of this space and of such images."""
    image = space.image
    shape = f"--size {image.size} --channels {image.channels} --classes {image.classes}"
    cure = f"Make one on the device, with the settings of this run: fedloom latency PRESET {shape}"
    try:
        content = parse_json(read_plain(path))
        if content.pop("format") != TABLE:
            raise ValueError("it is none")
        known: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
        table = LatencyTable(**known)
    except FileNotFoundError:
        raise InvalidConfig(f"There is no latency table {path}. {cure}", key="budget.latency_table") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{path} is not a latency table: {one_line(error)}"
        raise InvalidConfig(f"{what}. {cure}", key="budget.latency_table") from error
    most = space.cost(space.named["largest"])
    here = (space.name, (image.channels, image.size, image.classes), tuple(space.sizes.tolist()))
    costs = (most.macs, most.parameters, most.activations)
    count = 1 + len(costs) + int(space.sizes.sum())
    if (table.space, table.image, table.sizes) != here or tuple(table.largest) != costs or len(table.weights) != count:
        what = f"{path} was measured for another space, other settings of it, or other images than {space.name} has here"
        raise InvalidConfig(f"{what}. {cure}", key="budget.latency_table")
    if not all(type(weight) in (int, float) and math.isfinite(weight) for weight in table.weights):
        raise InvalidConfig(f"{path} holds times that are no numbers. {cure}", key="budget.latency_table")
    return cache(table.predictor(space))
