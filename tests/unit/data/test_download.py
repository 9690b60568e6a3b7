"""Downloads, from files and from a server on this machine: nothing is fetched from elsewhere, and nothing is kept that is not whole."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.commands.data import download as command
from fedloom.core.errors import InvalidConfig, InvalidData, UnusableFolder
from fedloom.data import download as module
from fedloom.data.download import ARCHIVES, Archive, download
from fedloom.data.readers import DATASETS, DataSettings, read
from support.checks import Fedloom, check_refused

FILES = {"train/cat/1.png": b"one", "test/cat/2.png": b"two"}
Published = Callable[..., Archive]


def packed(kind: str, files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(target, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(fileobj=target, mode="w:gz") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return target.getvalue()


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """An archive under a data set's name, at an address of this machine."""

    def publish(data: bytes, name: str = "cinic10", **other: object) -> Archive:
        (tmp_path / "published").write_bytes(data)
        archive = Archive((tmp_path / "published").as_uri(), len(data), "md5", hashlib.md5(data).hexdigest())._replace(**other)
        monkeypatch.setitem(module.ARCHIVES, name, archive)
        return archive

    return publish


def content(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("around", ["", "CINIC-10/"])
def test_the_folder_that_runs_look_for(kind: str, around: str, published: Published, tmp_path: Path) -> None:
    """Whether the archive has it around everything or not."""
    published(packed(kind, {f"{around}{name}": data for name, data in FILES.items()}))
    told: list[tuple[int, int]] = []
    place = download("cinic10", tmp_path / "data", lambda done, whole: told.append((done, whole)))
    assert place == tmp_path / "data" / "CINIC-10" and content(place) == FILES and told[-1][0] == told[-1][1]
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["CINIC-10"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"digest": "0" * 32}, "with another md5 digest. Nothing was kept"),
        ({"bytes": 5}, "another file than the published one"),
        ({"bytes": 10**6}, "another file than the published one"),
        ({"address": "file:///nowhere/archive"}, "cannot be fetched"),
        ({"address": "http://127.0.0.1:9/archive"}, "cannot be fetched"),
    ],
)
def test_what_is_not_the_published_file_is_not_kept(other: dict[str, object], said: str, published: Published, tmp_path: Path) -> None:
    archive = published(packed("tar", FILES), **other)
    with pytest.raises(InvalidData, match=said) as refused:
        download("cinic10", tmp_path / "data", lambda done, whole: None)
    assert archive.address in str(refused.value) and list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_writes_nowhere_else(kind: str, published: Published, tmp_path: Path) -> None:
    published(packed(kind, {"../../outside.txt": b"no", **FILES}))
    try:
        place = download("cinic10", tmp_path / "data", lambda done, whole: None)
        assert place.is_dir()
    except InvalidData as error:
        assert "cannot be unpacked" in str(error)
    assert not list(tmp_path.glob("outside.txt")) and not list((tmp_path / "data").glob("outside.txt"))


def test_a_folder_that_cannot_be_written(published: Published, tmp_path: Path) -> None:
    published(packed("tar", FILES))
    (tmp_path / "file").write_text("")
    with pytest.raises(UnusableFolder):
        download("cinic10", tmp_path / "file" / "data", lambda done, whole: None)


def test_the_command(fedloom_: Fedloom, published: Published, tmp_path: Path) -> None:
    archive = published(packed("zip", {"tiny-imagenet-200/wnids.txt": b"n01"}), "tinyimagenet")
    done = fedloom_("download", "tiny-imagenet")
    assert done.code == 0 and f"from {archive.address}, checked (md5)" in done.out
    assert content(tmp_path / "data" / "tiny-imagenet-200") == {"wnids.txt": b"n01"}
    check_refused(fedloom_("download", "tinyimagenet"), InvalidConfig, "is there already. Remove it")
    check_refused(fedloom_("download", "cifar1"), InvalidConfig, "Did you mean 'cifar10")
    assert command.__doc__


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_missing_data_set_is_refused_with_its_address(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidData) as refused:
        read(DataSettings(name, str(tmp_path)))
    assert f"`fedloom download {name} --folder {tmp_path}` fetches it from {ARCHIVES[name].address}" in str(refused.value)
    assert ARCHIVES[name].address.endswith(DATASETS[name].make.archive)


def test_every_published_data_set_can_be_downloaded() -> None:
    assert set(ARCHIVES) == {name for name, entry in DATASETS.items() if entry.make.archive}
