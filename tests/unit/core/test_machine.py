"""Other systems than the one that tests run on, as far as they can be simulated: macOS' way of saying things, and a sentence on Windows."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedloom.core.machine import NO_WINDOWS, process_memory_mb, usable_cores

WINDOWS = "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = sys.modules['resource'] = None; "


def test_cores_where_the_system_does_not_say_which_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert usable_cores() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.parametrize(("platform", "said"), [("linux", 250_000), ("darwin", 256_000_000)])
def test_memory_in_the_units_of_the_system(platform: str, said: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=said))
    assert process_memory_mb() == 256.0


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WINDOWS + code], capture_output=True, text=True, timeout=60)


def test_the_command_on_windows_is_one_sentence() -> None:
    outcome = run("sys.argv = ['fedloom', 'run']; import runpy; runpy.run_module('fedloom', run_name='__main__')")
    assert outcome.returncode == 1 and outcome.stderr == f"fedloom: {NO_WINDOWS}\n" and outcome.stdout == ""


def test_an_import_on_windows_ends_with_that_sentence() -> None:
    outcome = run("import fedloom.files")  # which all the rest imports
    assert outcome.returncode == 1 and outcome.stderr.rstrip().endswith(f"ImportError: {NO_WINDOWS}")
