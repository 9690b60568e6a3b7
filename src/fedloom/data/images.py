"""Image files in folders: one folder per class, what is read of them, and what is refused rather than left out in silence."""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from fedloom.core.errors import InvalidData
from fedloom.files import open_plain

Images = npt.NDArray[np.uint8]

READERS = 8  # threads that decode images
FORMATS = ("PNG", "JPEG", "WEBP")
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
UNREAD_ENDINGS = (
    *(".avif", ".bmp", ".dcm", ".dicom", ".gif", ".heic", ".heif", ".ico", ".jfif", ".jp2", ".jpe", ".jxl", ".nii", ".pgm", ".pnm"),
    *(".ppm", ".psd", ".svg", ".tga", ".tif", ".tiff"),
)
HIGH_BYTE = 8  # bits that a 16-bit grey value loses, as those of 16-bit colours do when they are read
MODES = {1: "L", 3: "RGB"}  # channels -> pillow's name for such images


# -- names of classes -----------------------------------------------------------------------------------
def class_name(folder: str) -> str:
    """Unicode has two forms of ö, and systems differ in which they write: a class is named in the composed form (NFC)."""
    return unicodedata.normalize("NFC", folder)


def alike(name: str) -> str:
    """Equal for names that a person takes for one: they differ in case, in Unicode form or in spaces around them."""
    return unicodedata.normalize("NFKC", name).casefold().strip()


def confused(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Those of these names that are alike and not the same, together."""
    groups: dict[str, set[str]] = {}
    for name in names:
        groups.setdefault(alike(name), set()).add(name)
    return [tuple(sorted(group)) for _, group in sorted(groups.items()) if len(group) > 1]


def check_names(place: Path, names: Iterable[str]) -> None:
    """Refuses classes that would be two by a slip of the keyboard."""
    if found := confused(names):
        raise InvalidData(confusion(place, found[0]), folder=str(place))


def confusion(place: Path, names: Sequence[str]) -> str:
    """In words; names are shown with their letters beyond ASCII spelled out, where they look the same otherwise."""
    shown = [repr(name) if len({class_name(other) for other in names}) > 1 else ascii(name) for name in names]
    return f"{place}: the classes {' and '.join(shown)} differ in case, spaces or Unicode form only. Give one class one name everywhere"


def folders_in(place: Path) -> list[Path]:
    return sorted(entry for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def class_folders(place: Path, least: int = 2) -> dict[str, Path]:
    """class -> its folder, by name."""
    if not place.is_dir():
        raise InvalidData(f"{place} is missing: it must hold one folder of images per class", folder=str(place))
    folders = folders_in(place)
    check_names(place, (folder.name for folder in folders))
    if len(folders) < least:
        raise InvalidData(f"{place} must hold one folder of images per class, at least {least}; found {len(folders)}", folder=str(place))
    return dict(sorted((class_name(folder.name), folder) for folder in folders))


# -- files ----------------------------------------------------------------------------------------------
def refusal(entry: Path) -> str:
    """Why nothing is run while this is in a folder of images; empty for images and for files that are none, which are passed over."""
    if entry.suffix.lower() in UNREAD_ENDINGS:
        return f"{entry} is an image of a kind that is not read ({', '.join(IMAGE_ENDINGS)} are). Save it as one of these or remove it"
    if entry.is_dir():
        return f"{entry} is a folder inside a folder of images, where only image files are read. Move its images up or remove it"
    return ""


def entries_in(folder: Path) -> list[Path]:
    return [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")] if folder.is_dir() else []


def images_in(folder: Path) -> list[Path]:
    """Refuses what would be left out in silence: images of other formats, and folders."""
    entries = entries_in(folder)
    for entry in entries:
        if why := refusal(entry):
            raise InvalidData(why, path=str(entry))
    return [entry for entry in entries if entry.suffix.lower() in IMAGE_ENDINGS]


def decode(paths: Sequence[Path], side: int, resize: bool) -> Images:
    """(n, 3, side, side)."""
    images = np.empty((len(paths), 3, side, side), np.uint8)

    def decode_at(number: int) -> None:
        images[number] = decode_one(paths[number], side, resize)

    with warnings.catch_warnings(), ThreadPoolExecutor(READERS) as readers:  # decoding leaves Python free for other threads
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            for _ in readers.map(decode_at, range(len(paths))):
                pass  # in order, so the first damaged file is the one that is named
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise
    return images


def decode_one(path: Path, side: int, resize: bool) -> Images:
    """(3, side, side). Huge images are errors only where pillow's warning of them is made one."""
    try:
        with open_plain(path) as file, opened(file, FORMATS) as image:
            if resize:
                return pixels(image, 3, side)
            picture = image.convert("RGB")
            if picture.size != (side, side):
                raise InvalidData(f"{path} must be {side} x {side} pixels, is {picture.width} x {picture.height}", file=str(path))
            return np.asarray(picture, np.uint8).transpose(2, 0, 1)
    except InvalidData:
        raise
    except Exception as problem:  # damaged bytes can raise anything
        raise InvalidData(f"{path} cannot be read as an image: {problem}. Replace or remove the file", file=str(path)) from None


@contextmanager
def opened(file: BinaryIO, formats: tuple[str, ...]) -> Iterator[Image.Image]:
    """An image of 8 bits per channel; of 16 bits the upper 8 are taken, as pillow does for colours. ValueError for more."""
    try:
        found = Image.open(file, formats=formats)
    except UnidentifiedImageError:
        raise ValueError(f"it holds no {', '.join(formats[:-1])} or {formats[-1]} image") from None
    with found as image:
        if image.mode.startswith("I;16"):
            yield Image.fromarray((np.asarray(ImageOps.exif_transpose(image)) >> HIGH_BYTE).astype(np.uint8))
        elif image.mode.startswith(("I", "F")):  # a conversion would clip nearly everything to white
            raise ValueError("it has more than 16 bits per channel; save it with 8 or 16")
        else:
            yield image


def pixels(image: Image.Image, channels: int, side: int) -> Images:
    """(channels, side, side): upright, converted and resized, for training and predictions alike."""
    mode = MODES[channels]
    image.draft(mode, (2 * side, 2 * side))  # lets a large JPEG be decoded at a fraction of its size
    picture = ImageOps.exif_transpose(image).convert(mode)
    for size in ((side, picture.height), (side, side)):  # by itself Pillow 13 goes down first for some tall images; ONNX does not
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    return np.atleast_3d(np.asarray(picture, np.uint8)).transpose(2, 0, 1)
