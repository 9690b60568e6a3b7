"""All that would stop a run on somebody's images, or spoil it, found at once: what ``fedloom check`` says before a run begins."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedloom.core.errors import InvalidData, one_line
from fedloom.data.images import (
    IMAGE_ENDINGS,
    READERS,
    UNREAD_ENDINGS,
    class_name,
    confused,
    confusion,
    decode_one,
    entries_in,
    folders_in,
    refusal,
)
from fedloom.files import open_plain

LAYOUTS = ("auto", "folder", "sites", "site")
PARTS = ("train", "test")
ALL = "all"  # the part of a member that has no train/ and test/: a fifth of each class will be its test images
FEW = 5  # images of a class: of fewer, none may be a test image
DARK = 4096  # 16-bit values below this lose nearly everything when their upper 8 bits are taken: 12-bit scans do
NARROW = 3  # times longer than wide
NAMED = 4  # copies of one image that are named
NEEDED = 3  # training images of a member


@dataclass(frozen=True)
class Finding:
    """kind: one or two words, the same for all of its kind; stops: no run begins before this is mended."""

    kind: str
    place: str
    what: str
    stops: bool


@dataclass(frozen=True)
class Checked:
    """counts: member -> part (train, test or all) -> class -> images that can be read. A folder that is no member's has the name ``""``."""

    layout: str
    counts: Mapping[str, Mapping[str, Mapping[str, int]]]
    findings: tuple[Finding, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(sorted({name for parts in self.counts.values() for part in parts.values() for name in part}))

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.stops]


@dataclass(frozen=True)
class _Place:
    """Where an image was found."""

    path: Path
    member: str
    part: str
    label: str


def check_images(place: Path, side: int, layout: str = "auto") -> Checked:
    """side: the images' in training. layout: folder, of classes; sites, of members with classes; site, one of these, which may lack
    classes; auto: folder or sites, whatever it looks like."""
    if not place.is_dir():
        raise InvalidData(
            f"{place} is no folder. Name one that holds a folder of images per class, or a folder per site", folder=str(place)
        )
    layout = _layout(place) if layout == "auto" else layout
    members = {folder.name: folder for folder in folders_in(place)} if layout == "sites" else {"": place}
    findings: list[Finding] = []
    images: list[_Place] = []
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for name, folder in members.items():
        counts[name] = {}
        for part, inside in _parts(folder, findings):
            labels = _classes(inside, findings)
            counts[name][part] = dict.fromkeys(map(class_name, labels), 0)
            for label, own in labels.items():
                images += [_Place(path, name, part, class_name(label)) for path in _files(own, findings)]
    if layout == "sites":
        findings += _stray(place, "the sites' folders")
    digests = _looked_at(images, side, findings)
    for found in (image for image, digest in zip(images, digests, strict=True) if digest is not None):
        counts[found.member][found.part][found.label] += 1
    findings += _copies(images, digests)
    findings += _between(place, layout, counts)
    return Checked(layout, counts, tuple(findings))


# -- folders ----------------------------------------------------------------------------
def _layout(place: Path) -> str:
    """Sites if most folders hold folders rather than images, and they are not just train and test."""
    if any((place / part).is_dir() for part in PARTS):
        return "folder"
    known = (*IMAGE_ENDINGS, *UNREAD_ENDINGS)
    inside = [entries_in(folder) for folder in folders_in(place)]
    with_images = sum(any(entry.suffix.lower() in known for entry in entries) for entries in inside)
    with_folders = sum(any(entry.is_dir() for entry in entries) for entries in inside)
    return "sites" if with_folders > with_images else "folder"


def _parts(folder: Path, findings: list[Finding]) -> list[tuple[str, Path]]:
    there = [part for part in PARTS if (folder / part).is_dir()]
    if len(there) == 1:
        missing = PARTS[1 - PARTS.index(there[0])]
        what = f"{folder} holds {there[0]}/ but no {missing}/. Add it, or put the class folders into {folder} itself"
        findings.append(Finding("half a split", str(folder), what, True))
    return [(part, folder / part) for part in there] or [(ALL, folder)]


def _classes(place: Path, findings: list[Finding]) -> dict[str, Path]:
    folders = {folder.name: folder for folder in folders_in(place)}
    findings += _stray(place, "class folders")
    for names in confused(folders):
        findings.append(Finding("class names", str(place), confusion(place, names), True))
    for name in list(folders):
        if not _is_text(name):
            what = f"{name!a} in {place} is no readable name. Rename the folder"
            findings.append(Finding("class names", ascii(str(folders.pop(name))), what, True))
    if not folders:
        what = f"{place} holds no folder of a class. Put the images of each class into a folder with its name"
        findings.append(Finding("no classes", str(place), what, True))
    return folders


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stray(place: Path, beside: str) -> Iterator[Finding]:
    for entry in entries_in(place):
        if not entry.is_dir() and entry.suffix.lower() in (*IMAGE_ENDINGS, *UNREAD_ENDINGS):
            yield Finding("outside", str(entry), f"{entry} lies beside {beside} and is not used. Move it into one", False)


def _files(folder: Path, findings: list[Finding]) -> list[Path]:
    images = []
    for entry in entries_in(folder):
        if why := refusal(entry):
            findings.append(Finding("a folder" if entry.is_dir() else f"{entry.suffix.lower()} file", str(entry), why, True))
        elif entry.suffix.lower() in IMAGE_ENDINGS:
            images.append(entry)
        else:
            what = f"{entry} has no ending of an image and is passed over. Rename it if it is one"
            findings.append(Finding("not an image", str(entry), what, False))
    if not images:
        what = f"{folder} holds no image ({', '.join(IMAGE_ENDINGS)}): add some or remove the folder"
        findings.append(Finding("empty class", str(folder), what, True))
    return images


# -- images -----------------------------------------------------------------------------
def _looked_at(images: Sequence[_Place], side: int, findings: list[Finding]) -> list[bytes | None]:
    """A digest of every image as training sees it; empty for one without content, nothing for one that cannot be read."""
    with warnings.catch_warnings(), ThreadPoolExecutor(READERS) as readers:
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        seen = list(readers.map(lambda image: _look(image.path, side), images))
    findings += [finding for _, own in seen for finding in own]
    return [digest for digest, _ in seen]


def _look(path: Path, side: int) -> tuple[bytes | None, list[Finding]]:
    try:
        pixels = decode_one(path, side, resize=True)
    except InvalidData as error:
        kind, why = _diagnosis(path, error)
        return None, [Finding(kind, str(path), f"{path} {why}. Replace or remove it", True)]
    remarks = [Finding(kind, str(path), f"{path} {what}", False) for kind, what in _remarks(path, side)]
    if (pixels == pixels[:, :1, :1]).all():
        return b"", [*remarks, Finding("blank", str(path), f"{path} has one colour all over", False)]
    return hashlib.sha256(np.ascontiguousarray(pixels).data).digest(), remarks


def _diagnosis(path: Path, error: InvalidData) -> tuple[str, str]:
    """Why an image cannot be read: of what kind that is, and in words."""
    try:
        if path.is_symlink() and not path.exists():
            return "broken link", "is a link that leads nowhere"
        with open_plain(path) as file:
            if not os.fstat(file.fileno()).st_size:
                return "empty file", "is empty"
            with Image.open(file) as image:
                kind = str(image.format)
                if kind not in ("PNG", "JPEG", "WEBP"):
                    return "wrong ending", f"holds a {kind} image, whatever its ending says, and such are not read"
    except OSError as problem:
        if isinstance(problem, UnidentifiedImageError):
            return "no image", "holds no image that is known here"
        if problem.strerror:
            return "not readable", f"cannot be opened: {problem.strerror}"
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        return "huge image", f"has more than {Image.MAX_IMAGE_PIXELS:,} pixels"
    except Exception as problem:  # damaged bytes can raise anything
        return "damaged", f"is damaged: {one_line(problem, 80)}"
    text = str(error)
    reason = text.removeprefix(f"{path} cannot be read as an image: ").removesuffix(". Replace or remove the file")
    return ("truncated" if "truncated" in reason else "damaged"), f"is damaged: {one_line(ValueError(reason), 80)}"


def _remarks(path: Path, side: int) -> Iterator[tuple[str, str]]:
    """Of an image that can be read: what a person may not know of what becomes of it."""
    with open_plain(path) as file, Image.open(file) as image:
        width, height = image.size
        if getattr(image, "n_frames", 1) > 1:
            yield "animated", f"has {getattr(image, 'n_frames', 1)} pictures, and only the first is used"
        if min(width, height) < side:
            yield "small", f"has {width} x {height} pixels and is enlarged to {side} x {side}"
        if max(width, height) > NARROW * min(width, height):
            yield "narrow", f"has {width} x {height} pixels and is squeezed to a square. Cut it first"
        if "A" in image.getbands() or "transparency" in image.info:
            yield "transparent", "has transparent parts, and the colours stored below them show. Put it on a background first"
        if image.mode.startswith("I;16") and int(np.asarray(image).max()) < DARK:
            yield "dark", f"has 16 bits, of which it uses the values below {DARK:,} only: it will be nearly black. Stretch its values first"


def _copies(images: Sequence[_Place], digests: Sequence[bytes | None]) -> Iterator[Finding]:
    same: dict[bytes, list[_Place]] = {}
    for image, digest in zip(images, digests, strict=True):
        if digest:
            same.setdefault(digest, []).append(image)
    for group in same.values():
        if len(group) > 1:
            some = ", ".join(str(image.path) for image in group[:NAMED]) + (f" and {len(group) - NAMED} more" if len(group) > NAMED else "")
            kind, why = _kind_of_copy(group)
            yield Finding(kind, str(group[0].path), f"{some} are the same image{why}", False)


def _kind_of_copy(group: Sequence[_Place]) -> tuple[str, str]:
    if len({image.label for image in group}) > 1:
        return "two classes", " under different classes: one label must be wrong"
    if len({image.part for image in group}) > 1:
        return "train and test", " in training and test: the accuracy will flatter"
    if len({image.member for image in group}) > 1:
        return "two sites", " at different sites: what one tests on, another trains on"
    return "twice", ""


# -- between folders --------------------------------------------------------------------
def _between(place: Path, layout: str, counts: Mapping[str, Mapping[str, Mapping[str, int]]]) -> Iterator[Finding]:
    per_part = [set(labels) for parts in counts.values() for labels in parts.values()]
    for names in confused(set().union(*per_part)):
        if not any(set(names) <= own for own in per_part):  # which was said there
            yield Finding("class names", str(place), confusion(place, names), True)
    if len(set().union(*per_part)) == 1 and layout != "site":
        yield Finding("one class", str(place), f"{place} has one class, and at least 2 are needed", True)
    if not counts:
        yield Finding("no classes", str(place), f"{place} holds no folder", True)
    for member, parts in counts.items():
        where = place / member
        if layout == "folder" and set(parts) == set(PARTS):
            for name in sorted(set(parts["train"]) ^ set(parts["test"])):
                what = f"{where} has the class {name!r} in one of train/ and test/ only. Add it to the other, or remove it"
                yield Finding("one-sided class", str(where), what, True)
        yield from _few(where, parts)


def _few(where: Path, parts: Mapping[str, Mapping[str, int]]) -> Iterator[Finding]:
    if ALL in parts:
        for name, number in parts[ALL].items():
            if 0 < number < FEW:
                what = f"{where / name} has {number} image{'s' * (number > 1)} that can be read: there may be no test image of this class"
                yield Finding("few", str(where / name), what, False)
    training = sum(parts.get("train", parts.get(ALL, {})).values())
    if 0 < training < NEEDED:
        what = f"{where} has {training} training images that can be read, and at least {NEEDED} are needed"
        yield Finding("too few", str(where), what, True)
