"""The one door out of a client."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import BadReport, UndeclaredUpload
from fedloom.core.messages import Array, Arrays, Instruction, Report, payload_bytes


@dataclass(frozen=True)
class Upload:
    """One field a method's reports may carry. Adding one is a privacy decision.

    ``like`` names the instruction's group of arrays whose names and shapes the field must repeat; without it the field
    is one finite number. With ``compact`` an axis along which all values are equal may be sent with length 1.
    """

    meaning: str
    like: str | None = None
    compact: bool = False


Manifest = Mapping[str, Upload]


@dataclass(frozen=True)
class Released:
    """A report that has passed the door, and how many bytes it weighs."""

    report: Report
    bytes: int


def release(report: Report, instruction: Instruction, manifest: Manifest) -> Released:
    """Let a report out, or refuse it: undeclared fields, another round's report, wrong shapes, NaN and infinity."""
    who = f"{report.client}, round {report.round}"
    if (report.client, report.round) != (instruction.client, instruction.round):
        raise BadReport(f"{who}: the report answers {instruction.client}, round {instruction.round}", client=report.client)
    extra = sorted((set(report.arrays) | set(report.facts)) - set(manifest))
    if extra:
        declared = ", ".join(sorted(manifest)) or "nothing"
        raise UndeclaredUpload(f"{who}: {', '.join(extra)} may not leave the client; the method declares {declared}", fields=extra)
    for name, arrays in report.arrays.items():
        _check_arrays(f"{who}: {name}", arrays, instruction, manifest[name])
    for name, value in report.facts.items():
        if manifest[name].like is not None:
            raise BadReport(f"{who}: {name} must be arrays like the instruction's {manifest[name].like}", field=name)
        if isinstance(value, str) or not math.isfinite(value):
            raise BadReport(f"{who}: {name} is {value!r}, which is not a finite number", field=name)
    return Released(report, payload_bytes(report))


def _check_arrays(where: str, arrays: Arrays, instruction: Instruction, upload: Upload) -> None:
    if upload.like is None:
        raise BadReport(f"{where} must be one number, not arrays")
    model = instruction.arrays[upload.like]
    if set(arrays) != set(model):
        odd = sorted(set(arrays) ^ set(model))[0]
        raise BadReport(f"{where} must name the same arrays as the instruction's {upload.like}; {odd!r} differs", array=odd)
    for name, array in arrays.items():
        if not _fits(array, model[name], upload.compact):
            raise BadReport(f"{where}[{name}] has shape {array.shape}, expected {model[name].shape}", array=name)
        if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and not np.isfinite(array).all()):
            raise BadReport(f"{where}[{name}] holds values that are not finite numbers", array=name)


def _fits(array: Array, model: Array, compact: bool) -> bool:
    if array.shape == model.shape:
        return True
    return compact and array.ndim == model.ndim and all(have in (1, want) for have, want in zip(array.shape, model.shape, strict=True))
