"""What a kill leaves of a run.

Every write of a run goes through ``fedloom.files``. Here its steps are numbered: before a file is opened, when half of its data
is written, before it is given its name, before an old one is removed. ``disk`` calls somebody at each step, who copies the folder (what
a kill at this moment would leave) or raises.
"""

from __future__ import annotations

import builtins
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from fedloom import files
from fedloom.core.client_site import ClientSite
from fedloom.core.messages import Instruction
from fedloom.core.method import Answer
from fedloom.methods.base import METHODS
from fedloom.testing.folders import content

__all__ = ["Known", "Participation", "content", "disk", "listening"]

Participation = tuple[str, int, str]  # client, round, action
Known = dict[str, tuple[Answer, dict[str, float], int]]  # with seconds by stage, and what scoring took


def everything_known(instruction: Instruction, site: ClientSite) -> str:
    """Digest of all that an answer may depend on, but for the settings of the run."""
    digest = hashlib.blake2b()
    for part in (site.data.train, site.data.validation, site.data.test):
        digest.update(part.images.numpy().tobytes() + part.labels.numpy().tobytes())
    for place in (instruction, site.memory):
        digest.update(repr([vars(place)[name] for name in sorted(vars(place)) if name != "arrays"]).encode())
        groups: Any = instruction.arrays if place is instruction else {"": site.memory.arrays}
        for group, arrays in sorted(groups.items()):
            # in their order, which sums may depend on; a memory comes from a file, where they have none
            for name, array in arrays.items() if place is instruction else sorted(arrays.items()):
                digest.update(f"{group}/{name} {array.dtype.str} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


@contextmanager
def listening(method: str, known: Known | None = None) -> Iterator[list[Participation]]:
    """All participations that really happen. With ``known``, none is computed twice: that answers are pure is a contract of its own."""
    heard: list[Participation] = []
    kind: Any = METHODS[method].make
    answer = kind.answer

    def listen(self: Any, instruction: Instruction, site: ClientSite) -> Answer:
        heard.append((instruction.client, instruction.round, instruction.action))
        if known is None:
            return answer(self, instruction, site)
        question = everything_known(instruction, site)
        if question not in known:
            known[question] = answer(self, instruction, site), site.clock.seconds, site.work.scored_macs
        before, seconds, site.work.scored_macs = known[question]
        site.clock.seconds.update(seconds)
        return before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "answer", listen)
        yield heard


class HalfWay:
    """A file that stops in the middle of every write."""

    def __init__(self, file: IO[bytes], step: Callable[[], None]) -> None:
        self._file, self._step = file, step

    def __enter__(self) -> HalfWay:
        return self

    def __exit__(self, *reason: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._step()
        self._file.write(data[half:])
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def disk(folder: Path, at_step: Callable[[str, str], None]) -> Iterator[None]:
    """Calls ``at_step(what comes next, file)`` at every step of every write below the folder."""
    replace, unlink, folder = os.replace, Path.unlink, folder.resolve()

    def step(what: str, path: Path | str) -> None:
        path = Path(path).resolve()
        if path.is_relative_to(folder):
            at_step(what, str(path.relative_to(folder)))

    def open_slowly(path: Path, mode: str, **more: Any) -> Any:
        if mode == "rb":
            return builtins.open(path, mode, **more)
        step(f"open {mode}", path)
        return HalfWay(builtins.open(path, mode, **more), lambda: step(f"other half {mode}", path))

    def replace_slowly(source: Path, target: Path) -> None:
        step("replace", target)
        replace(source, target)

    def unlink_slowly(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            step("unlink", path)
        unlink(path, missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "open", open_slowly, raising=False)
        patch.setattr(files.os, "replace", replace_slowly)
        patch.setattr(Path, "unlink", unlink_slowly)
        yield
