"""Data sets as they are published, read from disk into two pools. Adding one is one reader and one entry of ``DATASETS``."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.core.registry import Registry
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.data.images import IMAGE_ENDINGS, Images, check_names, class_folders, decode, images_in
from fedloom.files import read_plain
from fedloom.maths.partition import stratified_holdout

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pool:
    """Labelled images before they are divided among clients."""

    images: Images  # (n, channels, height, width)
    labels: Labels  # (n,)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Member:
    """How many images of each pool a member of a federation holds."""

    name: str
    train: int
    test: int


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test pool. Mean and spread (0..1 scale) are published constants, never computed from private data."""

    name: str
    classes: tuple[str, ...]
    train: Pool
    test: Pool
    mean: tuple[float, ...]  # one per channel
    std: tuple[float, ...]
    members: tuple[Member, ...] = ()  # whose images they are, in the order of the pools, if they are somebody's
    server: Images | None = None  # (n, channels, height, width) without labels: what the server has


class Source(NamedTuple):
    """How a data set is read."""

    reader: Callable[[Path, int], Dataset]  # (its place on disk, side in pixels for sets that are resized)
    place: str = ""  # below the data folder; "" = the data folder itself
    archive: str = ""  # the published file to unpack there; "" = none


# -- CIFAR: pickled dictionaries of arrays -------------------------------------------------------------


def read_cifar10(place: Path, image_size: int) -> Dataset:
    classes = _cifar_classes(place / "batches.meta", "label_names", 10)
    train = joined([_cifar_pool(place / f"data_batch_{number}", "labels", 10) for number in range(1, 6)])
    test = _cifar_pool(place / "test_batch", "labels", 10)
    return Dataset("cifar10", classes, train, test, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def read_cifar100(place: Path, image_size: int) -> Dataset:
    classes = _cifar_classes(place / "meta", "fine_label_names", 100)
    train = _cifar_pool(place / "train", "fine_labels", 100)
    test = _cifar_pool(place / "test", "fine_labels", 100)
    return Dataset("cifar100", classes, train, test, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def _cifar_pool(path: Path, label_key: str, classes: int) -> Pool:
    content = _read_pickle(path)
    rows, labels = content.get("data"), content.get(label_key)
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3072 or not len(rows):
        raise InvalidData(f"{path} must hold 'data' of shape (n, 3072), uint8. {_UNPACK_AGAIN}", file=str(path))
    if not isinstance(labels, list) or len(labels) != len(rows) or not all(type(label) is int for label in labels):
        raise InvalidData(f"{path} must hold {label_key!r}, one whole number for each image. {_UNPACK_AGAIN}", file=str(path))
    if min(labels) < 0 or max(labels) >= classes:
        raise InvalidData(f"{path} holds labels from {min(labels)} to {max(labels)}, expected 0 to {classes - 1}", file=str(path))
    return Pool(rows.reshape(len(rows), 3, 32, 32), np.array(labels, np.int64))


def _cifar_classes(path: Path, key: str, count: int) -> tuple[str, ...]:
    names = _read_pickle(path).get(key)
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str | bytes) for name in names):
        raise InvalidData(f"{path} must hold {count} class names under {key!r}. {_UNPACK_AGAIN}", file=str(path))
    return tuple(_text(name) for name in names)


_UNPACK_AGAIN = "Unpack the published archive again"


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _latin1(text: str, encoding: str) -> bytes:
    """What a version 2 pickle calls to spell bytes; no other codec is served."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("unexpected text encoding")
    return text.encode("latin-1")


_reconstruct = np.empty(0).__reduce__()[0]  # numpy's own way to begin an array; its module's name changed with numpy 2
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
}


class _ArraysOnly(pickle._Unpickler):
    """Builds dictionaries, lists, numbers, text and arrays; can reach nothing that acts. Python's own unpickler: the one in C takes
    32 GB for a file of some bytes that numbers its objects from two billion on."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no such data set needs") from None


def _read_pickle(path: Path) -> dict[str, Any]:
    try:
        content = _ArraysOnly(BytesIO(read_plain(path)), encoding="bytes").load()
    except OSError as problem:
        raise InvalidData(f"{path} cannot be read: {problem.strerror}. {_UNPACK_AGAIN}", file=str(path)) from None
    except Exception as problem:  # damaged bytes can raise anything
        raise InvalidData(f"{path} is damaged or not what it claims to be: {problem}. {_UNPACK_AGAIN}", file=str(path)) from None
    if not isinstance(content, dict) or not all(isinstance(key, str | bytes) for key in content):
        raise InvalidData(f"{path} does not hold a dictionary. {_UNPACK_AGAIN}", file=str(path))
    return {_text(key): value for key, value in content.items()}


# -- images in folders ----------------------------------------------------------------------------------


def read_cinic10(place: Path, image_size: int) -> Dataset:
    """Only train and test are read; the published valid part stays unused, as clients hold out their own validation images."""
    classes = tuple(class_folders(place / "train"))
    train = folder_pool(place / "train", classes, 32, resize=False)
    test = folder_pool(place / "test", classes, 32, resize=False)
    return Dataset("cinic10", classes, train, test, (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587))


def read_tinyimagenet(place: Path, image_size: int) -> Dataset:
    """The published validation part is the test pool; the published test part has no labels."""
    classes = tuple(class_folders(place / "train"))
    train = folder_pool(place / "train", classes, 64, resize=False, inside="images")
    annotations = place / "val" / "val_annotations.txt"
    try:
        lines = read_plain(annotations).decode().splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidData(f"{annotations} cannot be read: {problem}. {_UNPACK_AGAIN}", file=str(annotations)) from None
    number_of = {name: number for number, name in enumerate(classes)}
    paths, labels = [], []
    for line in filter(None, lines):
        name, *fields = line.split("\t")
        if not fields or fields[0] not in number_of or Path(name).name != name:
            raise InvalidData(f"{annotations} has a line that names no image or no class of train/: {line[:80]!r}", file=str(annotations))
        paths.append(place / "val" / "images" / name)
        labels.append(number_of[fields[0]])
    if not paths:
        raise InvalidData(f"{annotations} is empty. {_UNPACK_AGAIN}", file=str(annotations))
    test = Pool(decode(paths, 64, resize=False), np.array(labels, np.int64))
    return Dataset("tinyimagenet", classes, train, test, (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))


def read_folder(place: Path, image_size: int) -> Dataset:
    """Class folders; or train/ and test/, each of class folders. Without test/ the same 20 % of every class is the test pool."""
    if (place / "train").is_dir() and (place / "test").is_dir():
        classes = tuple(class_folders(place / "train"))
        train = folder_pool(place / "train", classes, image_size, resize=True)
        test = folder_pool(place / "test", classes, image_size, resize=True)
    elif (place / "train").is_dir() or (place / "test").is_dir():
        here, missing = ("train", "test") if (place / "train").is_dir() else ("test", "train")
        cure = f"Add {missing}/ with the same classes, or put the class folders into {place} itself"
        raise InvalidData(f"{place} holds {here}/ but no {missing}/. {cure}", folder=str(place))
    else:
        classes = tuple(class_folders(place))
        train, test = set_aside(folder_pool(place, classes, image_size, resize=True), 0.2, "folder")
    return Dataset("folder", classes, train, test, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def folder_pool(
    place: Path, classes: Sequence[str], side: int, resize: bool, inside: str = "", numbers: Sequence[int] | None = None
) -> Pool:
    """numbers: of these classes; in their order unless given."""
    folders = class_folders(place, least=1)
    check_names(place, {*folders, *classes})
    unknown = sorted(set(folders) ^ set(classes))
    if unknown:
        raise InvalidData(f"{place} must hold the same classes as train; {unknown[0]!r} is in one of them only", folder=str(place))
    paths, labels = [], []
    for number, name in zip(numbers or range(len(classes)), classes, strict=True):
        folder = folders[name] / inside
        found = images_in(folder)
        if not found:
            raise InvalidData(f"{folder} holds no image ({', '.join(IMAGE_ENDINGS)}): add some or remove the folder", folder=str(folder))
        paths += found
        labels += [number] * len(found)
    return Pool(decode(paths, side, resize), np.array(labels, np.int64))


# -- embedded -------------------------------------------------------------------------------------------


def read_digits(place: Path, image_size: int) -> Dataset:
    """1,797 handwritten digits that come with scikit-learn; the same third of every class is the test pool."""
    pixels, labels = np.split(digits_file(), [-1], axis=1)
    images = np.rint(pixels.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)  # values 0..16, (n, 1, 8, 8)
    train, test = set_aside(Pool(images, labels[:, 0].astype(np.int64)), 1 / 3, "digits")
    return Dataset("digits", tuple("0123456789"), train, test, (0.3053,), (0.3760,))


@cache
def digits_file() -> npt.NDArray[np.float64]:
    """(1797, 65) pixels of each image, then its label. The file is read without scikit-learn, which takes a second to import."""
    spec = find_spec("sklearn")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (place := Path(folder) / "datasets" / "data" / "digits.csv.gz").is_file():
            return np.loadtxt(place, delimiter=",")
    from sklearn.datasets import load_digits  # a release that keeps the file elsewhere

    data = load_digits()
    return np.column_stack([data.data, data.target])


def joined(pools: Sequence[Pool]) -> Pool:
    return Pool(np.concatenate([pool.images for pool in pools]), np.concatenate([pool.labels for pool in pools]))


def set_aside(pool: Pool, share: float, name: str) -> tuple[Pool, Pool]:
    """A fixed stratified share becomes the test pool, whatever the seed of a run."""
    train, test = (np.sort(part) for part in stratified_holdout(pool.labels, share, rng("test pool", name)))
    return Pool(pool.images[train], pool.labels[train]), Pool(pool.images[test], pool.labels[test])


def read_sites(place: Path, image_size: int) -> Dataset:
    from fedloom.data.members import read_members  # which is built from what is here

    return read_members(place, image_size)


# -- the table ------------------------------------------------------------------------------------------

DATASETS: Registry[Source] = Registry("data set")
for _name, _meaning, _source in (
    ("digits", "8 x 8 handwritten digits, 10 classes, included: nothing to download", Source(read_digits)),
    ("cifar10", "32 x 32 photographs, 10 classes", Source(read_cifar10, "cifar-10-batches-py", "cifar-10-python.tar.gz")),
    ("cifar100", "32 x 32 photographs, 100 classes", Source(read_cifar100, "cifar-100-python", "cifar-100-python.tar.gz")),
    ("cinic10", "32 x 32 photographs, 10 classes, from CIFAR-10 and ImageNet", Source(read_cinic10, "CINIC-10", "CINIC-10.tar.gz")),
    ("tinyimagenet", "64 x 64 photographs, 200 classes", Source(read_tinyimagenet, "tiny-imagenet-200", "tiny-imagenet-200.zip")),
    ("folder", "your own images: one folder per class", Source(read_folder)),
    ("sites", "the members' own images: a folder per member, with a folder per class in it (with split.rule=members)", Source(read_sites)),
):
    DATASETS.add(_name, meaning=_meaning)(_source)


@dataclass(frozen=True)
class DataSettings:
    """Which data set, and where it lies."""

    name: str = setting("digits", "the data set", choices=DATASETS)
    folder: str = setting("data", "folder that holds the data sets", path=True)
    image_size: int = setting(32, "folder, sites: images are resized to this side in pixels", low=8, high=1024)
    server: str = setting("", "sites: folder of the server's images without labels, for methods that need them", path=True)


def address_of(name: str) -> str:
    """Of a published archive."""
    from fedloom.data.download import ARCHIVES  # which needs the table above

    return ARCHIVES[name].address if name in ARCHIVES else "its page"


def read(settings: DataSettings) -> Dataset:
    """Read the data set that the settings name."""
    source = DATASETS[settings.name].make
    place = Path(settings.folder) / source.place
    if settings.name != "digits" and not place.is_dir():
        cure = (
            f"`fedloom download {settings.name} --folder {settings.folder}` fetches it from {address_of(settings.name)}, "
            f"or unpack {source.archive} inside {settings.folder} so that the folder {source.place} appears there"
            if source.archive
            else "Set data.folder to a folder that holds one folder of images per class (sites: per member)"
        )
        raise InvalidData(f"The data set {settings.name} is not at {place}. {cure}", name=settings.name, place=str(place))
    dataset = source.reader(place, settings.image_size)
    if not settings.server:
        return dataset
    if settings.name != "sites":
        raise InvalidConfig("data.server is for data.name=sites; elsewhere split.server gives the server a share", key="data.server")
    from fedloom.data.members import unlabelled

    return replace(dataset, server=unlabelled(Path(settings.server), settings.image_size))
