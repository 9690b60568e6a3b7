"""What a personal model is worth on its client's test images: by class, and as probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Judgement:
    """Temperature and threshold come from validation images, all else from test images. It stays at the client, as its diary does."""

    classes: int
    confusion: tuple[tuple[int, int, int], ...]  # (class, class that was said, images), where there are any
    balanced_accuracy: float
    auroc: float | None  # of two classes
    temperature: float
    calibration_error: float  # before the temperature
    calibrated_error: float  # after it
    reliability: tuple[tuple[int, float, float], ...]  # after it: (images, mean confidence, accuracy) in ten bins of confidence
    threshold: float  # of confidence, below which the model is unsure
    accepted: float  # share of test images of which it is sure
    accepted_accuracy: float | None  # on these
    noise_accepted: float  # share of images of pure noise of which it is sure

    def matrix(self) -> npt.NDArray[np.int64]:
        """(classes, classes): rows are classes, columns what was said."""
        found = np.zeros((self.classes, self.classes), np.int64)
        for truth, said, images in self.confusion:
            found[truth, said] += images
        return found

    @classmethod
    def of(cls, values: Any) -> Judgement:
        """From JSON; ValueError, KeyError or TypeError for what is none."""
        if not isinstance(values, Mapping):
            raise TypeError(f"{values!r} is no judgement")
        taken = {item.name: values[item.name] for item in fields(cls)}
        taken["confusion"] = tuple(tuple(_whole(row, 3)) for row in taken["confusion"])
        taken["reliability"] = tuple((int(count), _share(c), _share(a)) for count, c, a in taken["reliability"])
        classes = _whole([taken["classes"]], 1)[0]
        if any(max(truth, said) >= classes for truth, said, _ in taken["confusion"]):
            raise ValueError(f"confusion names more than {classes} classes")
        for name, value in taken.items():
            if name in ("classes", "confusion", "reliability") or (value is None and name in ("auroc", "accepted_accuracy")):
                continue
            if name != "temperature":
                _share(value)
            elif type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"temperature is {value!r}")
        return cls(**taken)


def _whole(row: Any, length: int) -> list[int]:
    if not isinstance(row, list | tuple) or len(row) != length or not all(type(part) is int and part >= 0 for part in row):
        raise ValueError(f"{row!r} are not {length} whole numbers")
    return list(row)


def _share(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1 + 1e-9:
        raise ValueError(f"{value!r} is no share")
    return float(value)


def pooled(judged: Iterable[Judgement]) -> tuple[npt.NDArray[np.int64], tuple[tuple[int, float, float], ...]]:
    """Confusion matrix and reliability over all clients, each image judged by its own client's model."""
    known = list(judged)
    matrix = sum((one.matrix() for one in known[1:]), start=known[0].matrix())
    bins = []
    for column in zip(*(one.reliability for one in known), strict=True):
        images = sum(count for count, _, _ in column)
        parts = [sum(entry[0] * entry[place] for entry in column) / images if images else 0.0 for place in (1, 2)]
        bins.append((images, parts[0], parts[1]))
    return matrix, tuple(bins)
