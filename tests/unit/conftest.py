"""What unit tests share: a run and generators to look at."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom import comparing
from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.engine.run import Watcher
from fedloom.federation.certificates import make_certificates
from fedloom.generator.generator import AnyGenerator
from fedloom.testing import tiny_file
from support import foreign
from support.checks import Fedloom
from support.federation import GOOD, SITE, SITES
from support.pretrain import Told, pretrain
from support.standing_in import STANDING_IN


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
def orders(fedloom_: Fedloom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Runs are stood in for, by a process that starts at once and does what it is told."""
    (tmp_path / "standing_in.py").write_text(STANDING_IN)
    monkeypatch.setattr(comparing, "FEDLOOM", (sys.executable, "-S", str(tmp_path / "standing_in.py")))
    return lambda given: (tmp_path / "orders.json").write_text(json.dumps(given)) and None


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny once-for-all checkpoint."""
    path = tmp_path_factory.mktemp("public") / "ofa.pth"
    torch.save(foreign.public_state("mobilenetv3", foreign.tiny("mobilenetv3")), path)
    return path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, AnyGenerator, Told]:
    """One unbroken run; take ``folder`` to change its files."""
    place = tmp_path_factory.mktemp("made once") / "mobilenetv3"
    return place, *pretrain(place)


@pytest.fixture
def folder(made: tuple[Path, AnyGenerator, Told], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "made"))


@pytest.fixture(scope="session")
def unguided_darts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made once") / "darts"
    pretrain(place, "guided=false", space="darts")
    return place / "generator.safetensors"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with an agreement, certificates and the file of a site."""
    tiny_file(tmp_path)
    (tmp_path / "federation.toml").write_text(GOOD)
    make_certificates(tmp_path / "certs", SITES, ["127.0.0.1"])
    (tmp_path / "north.toml").write_text(SITE.format(name="north", port=1, onnx="false"))
    return tmp_path


@pytest.fixture
def agreement_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes an agreement that is good but for these changes."""

    def write(*changes: tuple[str, str], more: str = "") -> Path:
        text = GOOD
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = tmp_path / "federation.toml"
        tiny_file(tmp_path)
        path.write_text(text + more)
        return path

    return write
