"""What a run does around its rounds."""

from __future__ import annotations

import errno
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom import files
from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.core.client_site import ClientMemory, ClientSite
from fedloom.core.errors import UnusableFolder
from fedloom.core.messages import Instruction
from fedloom.engine.run import Watcher
from fedloom.engine.store import Store
from fedloom.methods.base import METHODS


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_there_before_the_rounds_is_not_collected_in_them(
    tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    kind: Any = METHODS["fedavg"].make
    answer, frozen = kind.answer, []

    def watched(*given: Any) -> Any:
        frozen.append(gc.get_freeze_count())
        if fails:
            raise KeyboardInterrupt
        return answer(*given)

    monkeypatch.setattr(kind, "answer", watched)
    try:
        new_run(tiny("method=fedavg"), tmp_path / "run", nobody)
    except KeyboardInterrupt:
        assert fails
    assert min(frozen) > 10_000 and gc.get_freeze_count() == 0


def test_a_checkpoint_is_written_while_the_next_round_computes_and_before_its_records(
    tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = METHODS["perfedsde"].make
    answer, save_state, saved = kind.answer, Store.save_state, threading.Event()
    second_round, seen = threading.Event(), []

    def answered(self: Any, instruction: Instruction, site: ClientSite) -> Any:
        found = answer(self, instruction, site)
        if instruction.round == 1:
            second_round.set()
        return found

    def waits_for_the_second_round(self: Store, state: Any, round: int) -> None:
        if round == 1:
            assert second_round.wait(60)
            time.sleep(0.2)  # enough for a record that does not wait
            saved.set()
        save_state(self, state, round)

    def remembered(client: str, round: int, data: bytes) -> None:
        seen.append((round, saved.is_set()))

    monkeypatch.setattr(kind, "answer", answered)
    monkeypatch.setattr(Store, "save_state", waits_for_the_second_round)
    monkeypatch.setattr(Store, "write_memory", lambda self, *given: remembered(*given))
    monkeypatch.setattr(Store, "load_memory", lambda *_: ClientMemory())
    new_run(tiny("method=perfedsde", "rounds=2"), tmp_path / "run", nobody)
    assert {round for round, _ in seen} == {0, 1, 2}
    assert all(after == (round > 0) for round, after in seen)


def test_an_error_of_what_is_written_beside_is_raised_once(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fail() -> None:
        raise UnusableFolder("the disk is full")

    store.beside(fail)
    with pytest.raises(UnusableFolder, match="the disk is full"):
        store.append([])
    store.settle()


def test_the_disk_is_waited_for_beside_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FULL_SECONDS", 0.0)
    store, attempts = Store(tmp_path), []

    def write() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    with files.waiting_for_room():
        store.beside(lambda: files.patiently(write, tmp_path))
        store.settle()
    assert len(attempts) == 3
