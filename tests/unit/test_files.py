"""Files of a run are whole or absent, and damage is noticed and named."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from fedloom import files
from fedloom.core.errors import DamagedRun, UnusableFolder
from fedloom.files import append_lines, read_arrays, write_arrays, write_file
from support.checks import flipped

# -- files ------------------------------------------------------------------------------


def test_a_file_is_replaced_and_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "file"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("moment", ["replace", "fsync"])
def test_a_crash_before_the_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    class Crash(BaseException):
        pass

    def crash(*arguments: object) -> None:
        raise Crash

    path = tmp_path / "file"
    write_file(path, b"old")
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(files.os, moment, crash)
        write_file(path, b"new and longer")
    assert path.read_bytes() == b"old"
    write_file(path, b"newest")
    assert path.read_bytes() == b"newest" and os.listdir(tmp_path) == ["file"]


def test_data_reach_the_disk_before_the_name_does_and_the_name_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace_file = os.fsync, os.replace

    def note_fsync(number: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "data")
        fsync(number)

    def note_replace(source: Path, target: Path) -> None:
        order.append("name")
        replace_file(source, target)

    monkeypatch.setattr(files.os, "fsync", note_fsync)
    monkeypatch.setattr(files.os, "replace", note_replace)
    write_file(tmp_path / "file", b"data")
    assert order == ["data", "name", "folder"]
    append_lines(tmp_path / "lines", ["a"])
    assert order[3:] == ["data"]


@pytest.mark.parametrize("moment", ["replace", "fsync"])
@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_a_write_that_fails_is_a_sentence_and_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, error: OSError
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    write_file(tmp_path / "file", b"old")
    monkeypatch.setattr(files.os, moment, fail)
    with pytest.raises(UnusableFolder, match=f"{re.escape(str(tmp_path / 'file'))} cannot be written \\({error.strerror}\\).*run.folder"):
        write_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_lines_that_cannot_be_added_are_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "lines").mkdir()
    with pytest.raises(UnusableFolder, match=f"{re.escape(str(tmp_path / 'lines'))} cannot be written \\(Is a directory\\).*run.folder"):
        append_lines(tmp_path / "lines", ["a"])


def test_a_place_under_a_file_or_taken_by_a_folder_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UnusableFolder, match=r"file/new cannot be written"):
        write_file(tmp_path / "file" / "new", b"data")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UnusableFolder, match=r"folder cannot be written \(it is a folder\)"):
        write_file(tmp_path / "folder", b"data")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"] and (tmp_path / "file").read_text() == "mine"


def test_lines_are_added(tmp_path: Path) -> None:
    append_lines(tmp_path / "lines", ["a", "b"])
    append_lines(tmp_path / "lines", [])
    append_lines(tmp_path / "lines", ["c"])
    assert (tmp_path / "lines").read_text() == "a\nb\nc\n"


# -- arrays and their digest ----------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "file.safetensors"
    arrays = {"a": np.arange(5, dtype=np.float32), "b": np.array([[True, False]]), "none": np.zeros((0, 2), np.uint8)}
    write_arrays(path, arrays, {"number": 1, "text": "ä\n", "list": [1, 2], "nothing": None})
    return path


def test_arrays_and_facts_come_back(whole: Path) -> None:
    arrays, facts = read_arrays(whole)
    assert facts == {"number": 1, "text": "ä\n", "list": [1, 2], "nothing": None}
    assert {name: (array.tolist(), array.dtype.str) for name, array in arrays.items()} == {
        "a": ([0, 1, 2, 3, 4], "<f4"),
        "b": ([[True, False]], "|b1"),
        "none": ([], "|u1"),
    }
    assert arrays["none"].shape == (0, 2)


def test_arrays_of_any_memory_layout_come_back(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float64).reshape(3, 4)
    write_arrays(tmp_path / "file", {"turned": array.T, "every second": array[:, ::2]}, {})
    arrays, _ = read_arrays(tmp_path / "file")
    assert (arrays["turned"] == array.T).all() and (arrays["every second"] == array[:, ::2]).all()


def test_arrays_without_axes_keep_their_shape(tmp_path: Path) -> None:
    write_arrays(tmp_path / "file", {"scalar": np.array(3.0, np.float32), "one": np.ones(1)}, {})
    arrays, _ = read_arrays(tmp_path / "file")
    assert (arrays["scalar"].shape, arrays["scalar"].dtype, arrays["scalar"][()], arrays["one"].shape) == ((), np.float32, 3, (1,))


def test_equal_content_is_equal_bytes(tmp_path: Path) -> None:
    a, b, facts = np.arange(6).reshape(2, 3), np.ones(4, bool), {"x": 1, "y": {"p": 2, "q": 3}}
    write_arrays(tmp_path / "one", {"a": a, "b": b}, facts)
    write_arrays(tmp_path / "two", {"b": b.copy(), "a": np.asfortranarray(a)}, {"y": {"q": 3, "p": 2}, "x": 1})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_the_header_is_a_digest_and_the_facts(whole: Path) -> None:
    """Other programs read these files: the layout is a promise."""
    data = whole.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert set(header) == {"__metadata__", "a", "b", "none"} and set(header["__metadata__"]) == {"fedloom"}
    content = header["__metadata__"]["fedloom"]
    assert re.fullmatch("[0-9a-f]{32}", content[:32]) and json.loads(content[32:]) == read_arrays(whole)[1]


def test_any_flipped_bit_is_noticed(whole: Path) -> None:
    """In the length, the header, the padding and the data."""
    good = whole.read_bytes()
    for position in range(len(good)):
        flipped(whole, position, position % 8)
        with pytest.raises(DamagedRun, match=re.escape(str(whole))) as caught:
            read_arrays(whole)
        assert "damaged" in str(caught.value) and caught.value.facts == {"path": str(whole)}
        whole.write_bytes(good)
    read_arrays(whole)


def test_any_truncation_is_noticed(whole: Path) -> None:
    good = whole.read_bytes()
    for length in range(0, len(good), 5):
        whole.write_bytes(good[:length])
        with pytest.raises(DamagedRun, match=f"{re.escape(str(whole))} is damaged"):
            read_arrays(whole)


def test_swapped_arrays_are_noticed(tmp_path: Path) -> None:
    """The digest covers which name holds which values."""
    path = tmp_path / "file"
    write_arrays(path, {"a": np.zeros(2), "b": np.ones(2)}, {})
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"a":', b'"?":').replace(b'"b":', b'"a":').replace(b'"?":', b'"b":'))
    with pytest.raises(DamagedRun, match="the digest does not match"):
        read_arrays(path)


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    for number, metadata in enumerate([None, {}, {"format": "pt"}, {"fedloom": ""}, {"fedloom": "0" * 32 + "{}"}]):
        (tmp_path / str(number)).write_bytes(safetensors.numpy.save({"a": np.ones(2)}, metadata=metadata))
        with pytest.raises(DamagedRun, match=f"{re.escape(str(tmp_path / str(number)))} is damaged"):
            read_arrays(tmp_path / str(number))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DamagedRun, match=f"{re.escape(str(tmp_path / 'no'))} is missing"):
        read_arrays(tmp_path / "no")
    with pytest.raises(DamagedRun, match=f"{re.escape(str(tmp_path))} cannot be read \\(Is a directory\\)"):
        read_arrays(tmp_path)


def test_a_link_is_written_through_and_a_device_is_refused(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_file(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UnusableFolder, match="it is not a plain file"):
        write_file(pipe, b"new")
    assert pipe.is_fifo() and not list(tmp_path.glob(".*"))
