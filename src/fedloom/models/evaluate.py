"""A model on labelled images in class folders: what it says of each of them, and what that is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedloom.core.errors import InvalidData
from fedloom.core.judgement import Judgement
from fedloom.data.images import class_folders, images_in
from fedloom.maths.judging import judge
from fedloom.models.predict import Model, read_images
from fedloom.training.judging import noise_images


@dataclass(frozen=True)
class Evaluated:
    images: tuple[str, ...]
    labels: npt.NDArray[np.int64]  # (n,)
    probabilities: npt.NDArray[np.float64]  # (n, classes)
    judged: Judgement
    unreadable: Mapping[str, str]  # image -> why

    @property
    def accuracy(self) -> float:
        return float((self.probabilities.argmax(1) == self.labels).mean())


def test_part(folder: Path) -> Path:
    """Of train/ and test/ the latter, or else the folder itself."""
    return folder / "test" if all((folder / part).is_dir() for part in ("train", "test")) else folder


def evaluate(model: Model, folder: Path) -> Evaluated:
    """folder: class folders, not necessarily of all classes; or train/ and test/ of these, of which test/ is taken."""
    place = test_part(folder)
    paths: list[Path] = []
    numbers: dict[str, int] = {}  # image -> its class
    for name, own in class_folders(place, least=1).items():
        if name not in model.classes:
            some = ", ".join(model.classes[:10])
            raise InvalidData(f"{place} has a class {name!r}, which the model does not know ({some}). Rename or move it", folder=str(place))
        found = images_in(own)
        paths += found
        numbers |= dict.fromkeys(map(str, found), model.classes.index(name))
    names, images, unreadable = read_images(model, paths)
    if not names:
        raise InvalidData(f"{place} holds no image that can be read. `fedloom check {place}` says why", folder=str(place))
    labels = np.array([numbers[name] for name in names], np.int64)
    logits, noise = (model.all_logits(part).double() for part in (images, noise_images(model.channels, model.size)))
    judged = judge(logits.numpy(), labels, noise.numpy(), model.temperature, model.threshold)
    return Evaluated(tuple(names), labels, (logits / model.temperature).softmax(1).numpy(), judged, unreadable)
