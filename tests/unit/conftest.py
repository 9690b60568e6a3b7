"""What unit tests share: a tiny federation, and nobody watching it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedloom import config
from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.engine.run import Watcher

TINY = Path(__file__).parents[1] / "tiny.toml"


@pytest.fixture(scope="session")
def tiny_file() -> Path:
    return TINY


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Settings]:
    """Settings of a federation that runs in less than a second, with overrides."""
    return lambda *overrides: config.load(str(TINY), overrides)


@pytest.fixture(scope="session")
def nobody() -> Watcher:
    """Watches a run and says nothing."""

    def silent(*facts: object, **named: object) -> None:
        return None

    return SimpleNamespace(begin=silent, participation=silent, round_done=silent, end=silent)


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
