"""Golden files: what earlier versions did, kept in this folder.

A change that is meant to move them is made with ``FEDLOOM_RENEW_GOLDEN=1 pytest tests/golden``, which writes the digests again and adds the
run folders of a version that has none; those of released versions are never written again. The difference belongs in the change's own text.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedloom import config
from fedloom.config import Settings
from fedloom.engine.run import Watcher

TINY = Path(__file__).parents[1] / "tiny.toml"


@pytest.fixture(scope="session")
def renew() -> bool:
    return os.environ.get("FEDLOOM_RENEW_GOLDEN", "") not in ("", "0")


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
