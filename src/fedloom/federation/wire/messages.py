"""Messages as bytes, for engines that have a network: the same format as files, so nothing that is read can run code.

Whatever arrives is checked before it becomes a message: size, digest, kind, sender and round. What a report may say is then
checked by ``boundary.release``, as it is in one process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from fedloom.core.boundary import Manifest
from fedloom.core.errors import BadMessage, BadReport, one_line
from fedloom.core.messages import FINISH, TRAIN, Array, Arrays, Fact, Instruction, Report
from fedloom.federation.wire import sums
from fedloom.files import packed, unpacked

Message = TypeVar("Message", Instruction, Report)
FIELDS = {Instruction: ("client", "round", "action", "seed"), Report: ("client", "round")}  # beside arrays and facts
KINDS: dict[str, type] = {"client": str, "round": int, "action": str, "seed": int}


def to_bytes(message: Instruction | Report, federation: str = "") -> bytes:
    """federation: what both sides agreed on, as a digest."""
    arrays = {f"{group}/{name}": array for group, named in message.arrays.items() for name, array in named.items()}
    own = {field: getattr(message, field) for field in FIELDS[type(message)]}
    groups = {group: list(named) for group, named in message.arrays.items()}  # in their order, on which sums may depend
    kind = {"message": type(message).__name__, "federation": federation, "groups": groups}
    return packed(arrays, {**kind, "facts": dict(message.facts), **own})


def from_bytes(kind: type[Message], data: bytes, most: int, federation: str = "") -> Message:
    """A message of this kind and federation; most: bytes it may have."""
    what = kind.__name__.lower()
    if len(data) > most:
        raise BadMessage(f"The {what} has {len(data):,} bytes, more than the {most:,} that are accepted")
    try:
        arrays, facts = unpacked(data)
    except ValueError as error:
        raise BadMessage(f"The {what} is damaged or none of Fedloom's ({error})") from error
    if not isinstance(facts, dict) or facts.get("message") != kind.__name__:
        raise BadMessage(f"This is no {what}")
    if facts.get("federation") != federation:
        raise BadMessage(f"The {what} belongs to another federation, or to other settings of this one. Use the same federation file")
    own = {field: facts.get(field) for field in FIELDS[kind]}
    for field, value in own.items():
        if type(value) is not KINDS[field] or (isinstance(value, int) and value < 0):
            raise BadMessage(f"The {what}'s {field} is {value!r}")
    if kind is Instruction and own["action"] not in (TRAIN, FINISH, *sums.ACTIONS):
        raise BadMessage(f"The instruction asks for {own['action']!r}, which is neither {TRAIN} nor {FINISH}, nor a part of a sum")
    groups = _groups(what, arrays, facts.get("groups"))
    return kind(**own, arrays=groups, facts=_facts(what, facts.get("facts")))  # type: ignore[arg-type]


def expected(report: Report, instruction: Instruction, sender: str) -> Report:
    """The report, if it is the answer to this instruction and comes from the client it names: a replay or another's is refused."""
    if report.client != sender:
        raise BadMessage(f"{sender} sent a report in the name of {report.client}", client=sender)
    if (report.client, report.round) != (instruction.client, instruction.round):
        raise BadMessage(f"{sender} answered round {report.round}, but was asked for round {instruction.round}", client=sender)
    return report


def finite(instruction: Instruction) -> None:
    """What a server sends must be numbers a site can train with."""
    for group, arrays in instruction.arrays.items():
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise BadMessage(f"The instruction's {group}[{name}] holds values that are not finite")
    for name, fact in instruction.facts.items():
        if isinstance(fact, float) and not math.isfinite(fact):
            raise BadMessage(f"The instruction's {name} is {fact}")


def bounded(report: Report, instruction: Instruction, manifest: Manifest, most: float) -> Report:
    """The report, unless a field of it is out of proportion: no longer (Euclidean norm) than ``most`` times what it is about."""
    for name, arrays in report.arrays.items():
        like = manifest[name].like
        if like is None or manifest[name].counts or not most:
            continue
        length, usual = norm(arrays), max(1.0, norm(instruction.arrays[like]))
        if length > most * usual:
            what = f"{name} has a norm of {length:.3g}, more than {most:g} times that of the {like} it is about ({usual:.3g})"
            raise BadReport(f"{report.client}, round {report.round}: {what}", client=report.client)
    return report


def norm(arrays: Arrays) -> float:
    return math.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in arrays.values() if array.dtype.kind == "f"))


def _groups(what: str, arrays: Mapping[str, Array], groups: Any) -> dict[str, Arrays]:
    """groups: the names of each group's arrays, in their order."""
    if not isinstance(groups, dict) or not all(isinstance(names, list) for names in groups.values()):
        raise BadMessage(f"The {what}'s groups of arrays are {one_line(ValueError(groups))}")
    keys = [f"{group}/{name}" for group, names in groups.items() for name in names]
    odd = sorted(set(keys) ^ set(arrays)) or sorted(key for key, times in Counter(keys).items() if times > 1)
    if odd:
        raise BadMessage(f"The {what} has an array {odd[0]!r} outside of its groups, or names one that it has not")
    return {group: {name: arrays[f"{group}/{name}"] for name in names} for group, names in groups.items()}


def _facts(what: str, facts: Any) -> dict[str, Fact]:
    if not isinstance(facts, dict) or not all(type(value) in (int, float, str) for value in facts.values()):
        raise BadMessage(f"The {what}'s facts are not numbers and text")
    return facts
