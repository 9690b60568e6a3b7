"""For every test: a tiny federation, one thread (bit equality holds for one thread count), and the same examples every time."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy or torch is imported; processes that a test starts inherit it

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer.main
from hypothesis import HealthCheck, settings

from fedloom import config, testing
from fedloom.commands import app as cli
from fedloom.config import Settings
from fedloom.engine.run import Watcher
from fedloom.federation.server import link as flower
from support.checks import Fedloom, Outcome

settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")
typer.main.get_command = cache(typer.main.get_command)  # in a process of its own a command is made once; here, at every call
NEEDS = {  # a machine with the core packages and pytest collects the rest, such as the tests that need a GPU
    "flwr": (
        "federation",
        "unit/federation/*",
        "equivalence/test_flower*",
        "contracts/test_federation_page.py",
        "unit/maths/test_masks.py",
        "unit/benchmarks/test_secure_table.py",
    ),
    "ray": ("equivalence/test_ray.py",),
    "dp_accounting": ("unit/engine/test_protection.py",),
    "grimp": ("contracts/test_architecture.py",),
}
collect_ignore_glob = [pattern for package, patterns in NEEDS.items() if not find_spec(package) for pattern in patterns]


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return testing.tiny_file(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_file: Path) -> Callable[..., Settings]:
    """Settings of a federation that runs in less than a second, with overrides."""
    return lambda *overrides: config.load(str(tiny_file), overrides)


@pytest.fixture(scope="session")
def nobody() -> Watcher:
    """Watches a run and says nothing."""

    def silent(*facts: object, **named: object) -> None:
        return None

    return SimpleNamespace(begin=silent, stage=silent, participation=silent, round_done=silent, end=silent)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that looks for answers, and asks again, at once."""
    monkeypatch.setattr(flower, "GLANCE", 0.001)
    monkeypatch.setattr(flower, "AGAIN", 0.02)
