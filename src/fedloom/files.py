"""Files that are either whole or absent: every write of a run goes through here."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from fedloom.core.errors import DamagedRun, UnusableFolder
from fedloom.core.machine import NO_WINDOWS
from fedloom.core.messages import Array, Arrays
from fedloom.core.reading import parse_json

try:
    import fcntl
except ImportError as error:  # whatever is imported first of Fedloom, this is among it
    raise ImportError(NO_WINDOWS) from error

ORDER = "comparison.json"  # in the folder of a comparison: its methods, first the one that the others are compared with
DIGEST = 32  # hexadecimal digits in front of the facts
CROWDED = (errno.EMFILE, errno.ENFILE)  # too many open files, of this process or of the machine: others may close theirs
CROWDED_SECONDS = 60.0  # to wait for that
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk, or this user's share of it: a person must make room
FULL_SECONDS = 1.0  # between two attempts
Result = TypeVar("Result")
_waits_for_room: ContextVar[bool] = ContextVar("waits for room", default=False)


@contextmanager
def waiting_for_room() -> Iterator[None]:
    """Meanwhile a full disk ends nothing: whatever is written here waits until there is room, and says so once."""
    before = _waits_for_room.set(True)
    try:
        yield
    finally:
        _waits_for_room.reset(before)


def write_file(path: str | Path, data: bytes) -> None:
    """Replace a file in one step: a reader, or a run killed at any moment, sees the old content or the new, never a part."""
    path = Path(path).resolve()  # through links: what they point to is replaced, not they
    temporary = path.parent / f".{path.name}.part"  # made anew: a link of that name would lead elsewhere
    try:
        if path.exists() and not path.is_file():  # a folder, a device
            raise FileExistsError(errno.EEXIST, "it is a folder" if path.is_dir() else "it is not a plain file")

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _settle(path.parent)

        patiently(write, path)
    except OSError as error:
        with suppress(OSError):  # its folder may be the file that is in the way
            temporary.unlink()
        raise unwritable(path, error) from error


def check_writable(path: str | Path) -> None:
    """Refuses a place that `write_file` would refuse, as far as that can be known; nothing is written."""
    path = Path(path).resolve()
    above = next(folder for folder in path.parents if os.path.lexists(folder))
    if path.is_dir():
        raise unwritable(path, IsADirectoryError(errno.EISDIR, "it is a folder"))
    if not above.is_dir():
        raise unwritable(path, NotADirectoryError(errno.ENOTDIR, f"{above} is not a folder"))
    if not os.access(above, os.W_OK | os.X_OK):
        raise unwritable(path, PermissionError(errno.EACCES, f"{above} may not be written to"))


def open_plain(path: str | Path) -> BinaryIO:
    """A plain file to read. OSError for a pipe, a socket or a device, which could keep a reader waiting for ever."""
    file = open(path, "rb", opener=without_waiting)  # noqa: SIM115 - the caller's
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a plain file")
    return file


def read_plain(path: str | Path) -> bytes:
    with open_plain(path) as file:
        return file.read()


def without_waiting(path: str, flags: int) -> int:
    """Opens a file; a pipe that nobody reads or writes is refused, or found empty."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for one process alone; what was made and stayed empty is removed again."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UnusableFolder(f"{folder} is in use by another process. Wait for it, or choose another folder") from None
        yield
    finally:
        os.close(handle)
        with suppress(OSError):  # not empty
            for place in made:
                place.rmdir()


@contextmanager
def private(folder: Path) -> Iterator[None]:
    """What this process writes meanwhile, and what lies in the folder, is for its user alone (files 0600, folders 0700)."""
    before = os.umask(0o077)
    try:
        for place, _, names in os.walk(folder):
            for path, mode in ((place, 0o700), *((os.path.join(place, name), 0o600) for name in names)):
                with suppress(OSError):  # another's, or on a file system that has no modes
                    if not os.path.islink(path):
                        os.chmod(path, mode)
        yield
    finally:
        os.umask(before)


def append_lines(path: Path, lines: list[str]) -> None:
    """Add lines at once; a kill in the middle leaves a torn last line, which readers drop."""

    def append() -> None:
        with open(path, "ab", buffering=0, opener=without_waiting) as file:
            before, data = os.fstat(file.fileno()).st_size, "".join(f"{line}\n" for line in lines).encode()
            try:
                while data:  # of which a disk may take a part
                    taken = file.write(data)
                    if taken is None:  # it is no plain file, and has no room
                        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                    data = data[taken:]
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(before)  # another attempt must not follow half a line
                raise

    try:
        patiently(append, path)
    except OSError as error:
        raise unwritable(path, error) from error


def write_arrays(path: str | Path, arrays: Arrays, facts: Mapping[str, Any]) -> None:
    write_file(path, packed(arrays, facts))


def read_arrays(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """What ``write_arrays`` wrote, or DamagedRun; never a part of it and never anything executable."""
    try:
        data = read_plain(path)
    except FileNotFoundError:
        raise DamagedRun(f"{path} is missing. If it belongs to a run, that folder is incomplete", path=str(path)) from None
    except OSError as error:
        raise DamagedRun(f"{path} cannot be read ({error.strerror})", path=str(path)) from error
    try:
        return unpacked(data)
    except ValueError as error:
        cure = "Restore it from a copy, or make it again (for a run: in another folder)"
        raise DamagedRun(f"{path} is damaged ({error}). {cure}", path=str(path)) from error


def packed(arrays: Arrays, facts: Mapping[str, Any]) -> bytes:
    """Arrays as safetensors, facts as JSON in its header, and a digest over both."""
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    text = json.dumps(dict(facts), sort_keys=True)
    # One key: safetensors writes several in a random order, and equal content should be equal bytes.
    return save_tensors(whole, metadata={"fedloom": _digest(whole, text) + text})


def unpacked(data: bytes) -> tuple[dict[str, Array], dict[str, Any]]:
    """What ``packed`` packed, or ValueError for anything else."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        content = parse_json(data[8 : 8 + length])["__metadata__"]["fedloom"]
        digest, text = content[:DIGEST], content[DIGEST:]
        arrays = load_tensors(data)
        if digest != _digest(arrays, text):
            raise ValueError("the digest does not match")
        return arrays, parse_json(text)
    except (SafetensorError, KeyError, TypeError, struct.error) as error:
        raise ValueError("it does not describe itself" if isinstance(error, KeyError) else str(error)) from error


def _digest(arrays: Arrays, text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=DIGEST // 2)
    for name in sorted(arrays):
        digest.update(f"{name}{arrays[name].dtype.str}{arrays[name].shape}".encode())
        digest.update(np.asarray(arrays[name], order="C").reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def patiently(step: Callable[[], Result], path: Path) -> Result:
    """Do it, and again while too many files are open, or the disk is full and that is waited for. Each attempt begins anew."""
    until, told = time.monotonic() + CROWDED_SECONDS, False
    while True:
        try:
            return step()
        except OSError as error:
            full = error.errno in FULL and _waits_for_room.get()
            if not full and (error.errno not in CROWDED or time.monotonic() > until):
                raise
            if not told:
                how_long = "Make room, then this goes on by itself" if full else f"Trying for {CROWDED_SECONDS:g} seconds"
                logging.getLogger(__name__).warning("%s waits: %s. %s", path, error.strerror, how_long)
                told = True
        time.sleep(FULL_SECONDS if full else 0.2)


def _settle(folder: Path) -> None:
    """Make a replaced name survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unwritable(path: Path, error: OSError) -> UnusableFolder:
    cure = "Make it writable or choose another place (for a run: run.folder)"
    return UnusableFolder(f"{path} cannot be written ({error.strerror}). {cure}", path=str(path))
