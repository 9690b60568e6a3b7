"""The only way out of a client: every report is checked here."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import BadReport, UndeclaredUpload
from fedloom.core.messages import Array, Arrays, Instruction, Report, payload_bytes

LARGEST_COUNT = 1e9  # more than any client counts: what it says weighs in averages, which must stay finite


@dataclass(frozen=True)
class Upload:
    """One field a method's reports may carry. Adding one is a privacy decision.

    ``like`` names the instruction's group of arrays whose names, shapes and types the field must repeat; without it the field
    is one finite number from ``low`` to ``high``. With ``counts`` the arrays hold whole numbers from 0 on, and an axis along which
    all of them are equal may be sent with length 1. With ``part`` the field may be less than the group: some of its arrays, none of
    them longer along any axis.
    """

    meaning: str
    like: str | None = None
    counts: bool = False
    low: float = 0.0
    part: bool = False
    high: float = math.inf


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
    missing = sorted(set(manifest) - set(report.arrays) - set(report.facts))
    if missing and (report.arrays or report.facts):
        raise BadReport(f"{who}: {', '.join(missing)} is missing; a report carries every declared field or none", fields=missing)
    for name, arrays in report.arrays.items():
        _check_arrays(f"{who}: {name}", arrays, instruction, manifest[name])
    for name, value in report.facts.items():
        _check_fact(f"{who}: {name}", value, manifest[name])
    return Released(report, payload_bytes(report))


def _check_fact(where: str, value: object, upload: Upload) -> None:
    if upload.like is not None:
        raise BadReport(f"{where} must be arrays like the instruction's {upload.like}")
    if type(value) not in (int, float) or value != value or abs(value) == math.inf:  # type: ignore[arg-type]
        raise BadReport(f"{where} is {value!r}, which is not a finite number")
    if abs(value) > sys.float_info.max:  # type: ignore[arg-type]
        raise BadReport(f"{where} is a number of more than 308 digits")  # which Python may refuse to write down
    if value < upload.low:  # type: ignore[operator]
        raise BadReport(f"{where} is {value!r}, it must be at least {upload.low:g}")
    if value > upload.high:  # type: ignore[operator]
        raise BadReport(f"{where} is {value!r}, it must be at most {upload.high:g}")


def _check_arrays(where: str, arrays: Arrays, instruction: Instruction, upload: Upload) -> None:
    if upload.like is None:
        raise BadReport(f"{where} must be one number, not arrays")
    model = instruction.arrays.get(upload.like)
    if model is None:
        raise BadReport(f"{where} has nothing to be compared with: the instruction carried no {upload.like}")
    if not isinstance(arrays, Mapping):
        raise BadReport(f"{where} must be named arrays, not {type(arrays).__name__}")
    if set(arrays) != set(model) and not (upload.part and set(arrays) < set(model)):
        odd = sorted(set(arrays) - set(model) if upload.part else set(arrays) ^ set(model))[0]
        raise BadReport(f"{where} must name the same arrays as the instruction's {upload.like}; {odd!r} differs", array=odd)
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise BadReport(f"{where}[{name}] is no array but {type(array).__name__}", array=name)
        if not _fits(array, model[name], upload):
            raise BadReport(f"{where}[{name}] has shape {array.shape}, expected {model[name].shape}", array=name)
        if upload.counts and (array.dtype.kind not in "biu" or (array.dtype.kind == "i" and array.min(initial=0) < 0)):
            raise BadReport(f"{where}[{name}] must hold whole numbers from 0 on", array=name)
        if not upload.counts and array.dtype != model[name].dtype:
            raise BadReport(f"{where}[{name}] has type {array.dtype}, expected {model[name].dtype}", array=name)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BadReport(f"{where}[{name}] holds values that are not finite; did training diverge? Lower training.rate", array=name)


def _fits(array: Array, model: Array, upload: Upload) -> bool:
    if array.shape == model.shape:
        return True
    if array.ndim != model.ndim:
        return False
    lengths = list(zip(array.shape, model.shape, strict=True))
    return (upload.counts and all(have in (1, want) for have, want in lengths)) or (upload.part and all(h <= w for h, w in lengths))
