"""Published data sets fetched from their own pages: checked against what is known of the archive before anything is unpacked."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from fedloom.core.errors import InvalidConfig, InvalidData, one_line
from fedloom.core.registry import did_you_mean
from fedloom.data.readers import DATASETS
from fedloom.files import unwritable

PIECE = 1 << 20  # bytes read at once
SECONDS = 60.0  # without a byte
Tell = Callable[[int, int], None]  # bytes so far, bytes in all


class Archive(NamedTuple):
    """A published file. The digest's kind is what its publishers and readers agree on."""

    address: str
    bytes: int
    kind: str  # of the digest, as hashlib names it
    digest: str


ARCHIVES = {
    "cifar10": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        170_498_071,
        "sha256",
        "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    ),
    "cifar100": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        169_001_437,
        "sha256",
        "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    ),
    "cinic10": Archive(
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
        687_544_992,
        "md5",
        "6ee4d0c996905fe93221de577967a372",
    ),
    "tinyimagenet": Archive(
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        248_100_043,
        "md5",
        "90528d7ca1a48142e341f4ef8d21d0de",
    ),
}


def download(name: str, folder: Path, tell: Tell) -> Path:
    """Fetch, check, unpack; the data set's own folder below ``folder``. It appears whole or not at all."""
    if name not in ARCHIVES:
        raise InvalidConfig(f"There is no data set {name!r} to download. {did_you_mean(name, list(ARCHIVES))}", name=name)
    archive, place = ARCHIVES[name], folder / DATASETS[name].make.place
    if place.exists():
        raise InvalidConfig(f"{place} is there already. Remove it to download {name} again", folder=str(place))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".download-", dir=folder) as workshop:
            file, inside = Path(workshop) / "archive", Path(workshop) / "inside"
            _fetch(archive, file, tell)
            _unpack(file, inside)
            whole = inside / place.name  # some archives have a folder of this name around everything, others have none
            (whole if whole.is_dir() else inside).rename(place)
    except OSError as error:
        raise unwritable(folder, error) from error
    return place


def _fetch(archive: Archive, target: Path, tell: Tell) -> None:
    digest, size = hashlib.new(archive.kind, usedforsecurity=False), 0
    by_hand = f"If it goes on, fetch {archive.address} by other means and unpack it"
    try:
        with urllib.request.urlopen(archive.address, timeout=SECONDS) as source, target.open("wb") as file:
            while piece := source.read(PIECE):
                size += len(piece)
                if size > archive.bytes:
                    break
                digest.update(piece)
                file.write(piece)
                tell(size, archive.bytes)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise InvalidData(
            f"{archive.address} cannot be fetched ({one_line(Exception(reason))}). {by_hand}", address=archive.address
        ) from error
    if size != archive.bytes or digest.hexdigest() != archive.digest:
        what = f"{archive.address} gave another file than the published one: {size:,} bytes of {archive.bytes:,}"
        what += "" if size != archive.bytes else f", with another {archive.kind} digest"
        raise InvalidData(f"{what}. Nothing was kept. {by_hand}", address=archive.address)


def _unpack(file: Path, target: Path) -> None:
    """Nothing in an archive lands outside of ``target``."""
    target.mkdir()
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as packed:
                packed.extractall(target)  # which drops .. and roots from names
        else:
            with tarfile.open(file) as packed_tar:
                packed_tar.extractall(target, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, shutil.ReadError) as error:
        raise InvalidData(f"The archive cannot be unpacked: {one_line(error)}") from error
