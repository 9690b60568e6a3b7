"""Everything that may cross the network, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]  # for example parameter name -> values
Fact = int | float | str

EVERYBODY = "all clients"  # whose report a secure sum is
TRAIN, FINISH = "train", "finish"  # what an instruction asks for: a round, or the final participation, after which nothing is sent


@dataclass(frozen=True)
class Instruction:
    """Server -> one client. One instruction carries all of a round."""

    client: str
    round: int
    action: str
    seed: int
    arrays: Mapping[str, Arrays] = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """One client -> server. The only way anything leaves a client, and only through ``boundary.release``."""

    client: str
    round: int
    arrays: Mapping[str, Arrays] = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)


def payload_bytes(message: Instruction | Report) -> int:
    """Bytes of what a message says: its arrays as they are, its facts as JSON."""
    arrays = sum(array.nbytes for group in message.arrays.values() for array in group.values())
    return arrays + (len(json.dumps(dict(message.facts)).encode()) if message.facts else 0)


def field_bytes(report: Report) -> dict[str, int]:
    """The same for each field of a report. A fact alone has braces where several have commas, so the sum is ``payload_bytes``."""
    arrays = {name: sum(array.nbytes for array in group.values()) for name, group in report.arrays.items()}
    return {**arrays, **{name: len(json.dumps({name: value}).encode()) for name, value in report.facts.items()}}


def field_shapes(report: Report) -> dict[str, str]:
    """How much each field of a report says, in words."""
    arrays = {}
    for name, group in report.arrays.items():
        kinds = ", ".join(sorted({array.dtype.name for array in group.values()}))
        arrays[name] = f"{sum(array.size for array in group.values()):,} values ({kinds}) in {len(group):,} arrays"
    return {**arrays, **dict.fromkeys(report.facts, "1 number")}


def frozen(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
    """The same arrays, read-only: several clients share one message and none may change it for the others."""
    views = {name: array.view() for name, array in arrays.items()}
    for view in views.values():
        view.setflags(write=False)
    return views
