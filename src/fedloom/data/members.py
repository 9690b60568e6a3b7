"""Images that lie with the members of a federation: a folder for each, as in a real one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedloom.core.errors import InvalidData
from fedloom.data.images import Images, check_names, class_folders, decode, images_in
from fedloom.data.readers import Dataset, Member, Pool, folder_pool, joined, set_aside

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)  # constants: nobody's images are measured


def read_member(folder: Path, classes: Sequence[str], side: int) -> tuple[Pool, Pool]:
    """A member's training and test images: class folders, or train/ and test/ of class folders. It need not have every class.

    Without test/ the same 20 % of every class are test images.
    """

    def pool(place: Path) -> Pool:
        known = _known(place, classes)
        return folder_pool(place, known, side, resize=True, numbers=[list(classes).index(name) for name in known])

    inside = [folder / name for name in ("train", "test")]
    if all(part.is_dir() for part in inside):
        return pool(inside[0]), pool(inside[1])
    if any(part.is_dir() for part in inside):
        cure = "Have both, or put the class folders into it directly"
        raise InvalidData(f"{folder} must hold train/ and test/, and has one of them. {cure}", folder=str(folder))
    return set_aside(pool(folder), 0.2, "folder")


def read_members(place: Path, image_size: int) -> Dataset:
    """All members below one folder, to rehearse a federation on one machine. The classes are those that any of them has."""
    names, classes = _names(place), classes_of_members(place)
    if len(classes) < 2:
        what = f"The members below {place} have one class between them, {classes[0]!r}, and at least 2 are needed"
        raise InvalidData(f"{what}. Add a folder of images of another class to any of them", folder=str(place))
    pools = [read_member(place / name, classes, image_size) for name in names]
    members = tuple(Member(name, len(train), len(test)) for name, (train, test) in zip(names, pools, strict=True))
    train, test = map(joined, zip(*pools, strict=True))
    return Dataset("sites", classes, train, test, MEAN, STD, members)


def classes_of_members(place: Path) -> tuple[str, ...]:
    found = {name for member in _names(place) for part in _parts(place / member) for name in class_folders(part, least=1)}
    check_names(place, found)
    return tuple(sorted(found))


def blank(classes: Sequence[str], side: int) -> Dataset:
    """What a server knows of its members' images: classes and size."""
    none = Pool(np.empty((0, 3, side, side), np.uint8), np.empty(0, np.int64))
    return Dataset("sites", tuple(classes), none, none, MEAN, STD)


def unlabelled(folder: Path, side: int) -> Images:
    """Images of a server, all in one folder."""
    found = images_in(folder)
    if not found:
        raise InvalidData(f"{folder} holds no image for the server. Put some there, or leave data.server out", folder=str(folder))
    return decode(found, side, resize=True)


def _names(place: Path) -> list[str]:
    names = sorted(entry.name for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise InvalidData(f"{place} must hold a folder for every member of the federation; it holds none", folder=str(place))
    return names


def _parts(folder: Path) -> list[Path]:
    return [folder / "train", folder / "test"] if (folder / "train").is_dir() else [folder]


def _known(place: Path, classes: Sequence[str]) -> tuple[str, ...]:
    """The classes of the federation that this folder has."""
    found = tuple(class_folders(place, least=1))
    check_names(place, {*found, *classes})
    for name in found:
        if name not in classes:
            some = ", ".join(classes[:10])
            raise InvalidData(f"{place} has a class {name!r}, which the federation has not ({some}). Rename or move it", folder=str(place))
    return found
