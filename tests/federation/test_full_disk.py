"""A disk that is full and freed later: members of a federation wait for room, and go on as if nothing had happened."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom import files
from fedloom.core.errors import UnusableFolder
from fedloom.engine.run import Watcher
from fedloom.engine.store import Store
from support.disk import SmallDisk, small_disk
from support.federation import SITES, check_same, federation, rehearsed
from support.site import Place, talk

SIZE = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        if disk is None:
            pytest.skip("a small disk needs the right to mount one")
        yield disk


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FULL_SECONDS", 0.05)


WRITES: dict[str, Callable[[Path], None]] = {
    "a whole file": lambda place: files.write_file(place / "new" / "state", b"y" * (SIZE // 4)),
    "lines": lambda place: files.append_lines(place / "log", ["y" * (SIZE // 4), "z"]),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_full_disk_is_waited_for(what: str, disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    (disk.folder / "log").write_text("x\n")
    disk.fill()
    with pytest.raises(UnusableFolder, match="No space left on device"):
        WRITES[what](disk.folder)
    assert (disk.folder / "log").read_text() == "x\n"  # nothing of what was not written as a whole
    freed = threading.Timer(0.4, disk.free)
    freed.start()
    began = time.monotonic()
    with files.waiting_for_room():
        WRITES[what](disk.folder)
    assert time.monotonic() - began >= 0.4
    (line,) = caplog.messages
    assert line.endswith(" waits: No space left on device. Make room, then this goes on by itself")
    written = disk.folder / ("new/state" if what == "a whole file" else "log")
    expected = "y" * (SIZE // 4) if what == "a whole file" else "x\n" + "y" * (SIZE // 4) + "\nz\n"
    assert written.read_text() == expected
    assert sorted(path.name for path in disk.folder.rglob("*") if path.is_file()) == sorted({written.name, "log"})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_every_write_of_an_answer_waits(
    number: int, answered: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Many are refused, some twice. The report and all that is kept are those of a site that had room."""
    fsync, times = os.fsync, 0

    def full(handle: int) -> None:
        nonlocal times
        times += 1
        if times % 5 in (1, 2):  # a file needs two in a row: for itself and for its folder
            raise OSError(number, os.strerror(number))
        fsync(handle)

    asked = answered.data(2)
    with files.waiting_for_room(), monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        ((reply, why),) = talk(answered, asked)
    assert reply is not None and why == "" and times >= 12 and "waits: " in caplog.messages[0]
    report = answered.report(reply, asked)
    assert answered.report(answered.restart().answer(asked), asked).facts == report.facts  # which finds everything in order


def test_a_site_that_begins_on_a_full_disk_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Also for its folder."""
    mkdir, times = Path.mkdir, 0

    def full(path: Path, *more: Any, **named: Any) -> None:
        nonlocal times
        times += 1
        if times <= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        mkdir(path, *more, **named)

    store = Store(tmp_path / "new")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        with pytest.raises(UnusableFolder, match="No space left on device"):
            store.claim()
        with files.waiting_for_room():
            store.claim()
    store.release()
    assert (tmp_path / "new" / "state" / "lock").exists() and len(caplog.messages) == 1


@pytest.mark.network
@pytest.mark.parametrize("who", ["server", "west"])
def test_a_member_whose_disk_is_full_for_a_while(who: str, tmp_path: Path, nobody: Watcher) -> None:
    """It has a disk of its own, and the others wait for it. What happened is printed (pytest -s)."""
    with small_disk(tmp_path / "disk", 16 * SIZE) as disk, federation(tmp_path / "all") as made:
        if disk is None:
            pytest.skip("a small disk needs the right to mount one")
        (made.folder / ("server-run" if who == "server" else f"at-{who}")).symlink_to(disk.folder)
        running = {"server": made.serve(), **{name: made.site(name) for name in SITES}}
        running["west"].wait_for("west: round 2")
        began = time.monotonic()
        while "waits: No space left on device" not in running[who].said():
            disk.fill()
            assert time.monotonic() - began < 60
            time.sleep(0.01)
        while time.monotonic() - began < 20:
            disk.fill()
            time.sleep(0.1)
        said = [line for line in running[who].said().splitlines() if "waits: " in line]
        disk.free()
        freed = time.monotonic()
        for name in (*SITES, "server"):
            assert running[name].finish(60) == 0, running[name].said()
        print(f"\n{who} waited with {len(said)} line: {said[0]}; all was over {time.monotonic() - freed:.0f} s after there was room")
        assert len(said) == 1
        check_same(made, rehearsed(made, nobody))
