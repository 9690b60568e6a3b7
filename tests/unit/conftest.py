"""What unit tests share: a run to look at."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom import cli
from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.engine.run import Watcher
from support import Fedloom, Outcome


@pytest.fixture(scope="session")
def a_finished_run(tiny: Callable[..., Settings], nobody: Watcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; take ``finished_run`` to change it."""
    folder = tmp_path_factory.mktemp("made once") / "run"
    new_run(tiny("method=fedavg"), folder, nobody)
    return folder


@pytest.fixture
def finished_run(a_finished_run: Path, tmp_path: Path) -> Path:
    """A finished run of this test's own: fedavg, 3 clients, 2 rounds."""
    return Path(shutil.copytree(a_finished_run, tmp_path / "finished"))


@pytest.fixture
def fedloom_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Fedloom:
    """The command, run in this process and in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return Outcome(code, *capsys.readouterr())

    return call
