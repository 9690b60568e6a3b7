"""`fedloom check`: what it prints, its exit code, and an estimate that is made from real participations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.assemble import new_run
from fedloom.assemble.estimate import estimate_run
from fedloom.config import Settings
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.engine.run import Watcher
from fedloom.methods.base import METHODS
from support.checks import Fedloom, check_refused


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    draws = np.random.default_rng(0)
    for site in ("north", "south"):
        for name in ("cat", "dog"):
            (tmp_path / "sites" / site / name).mkdir(parents=True)
            for number in range(8):
                picture = Image.fromarray(draws.integers(0, 256, (9, 9, 3), np.uint8))
                picture.save(tmp_path / "sites" / site / name / f"{number}.png")
    return tmp_path / "sites"


def test_the_whole_of_it(fedloom_: Fedloom, sites: Path, tiny_file: Path) -> None:
    outcome = fedloom_("check", sites, tiny_file, "data.image_size=8", "participants=1")
    assert outcome.code == 0 and "Nothing would stop a run." in outcome.out
    assert "north" in outcome.out and "takes about" in outcome.out and "MB of memory" in outcome.out
    card = json.loads(fedloom_("check", sites, "data.image_size=8", "--no-estimate", "--json").out)
    assert card["schema"] == "fedloom.check/1" and card["estimate"] is None
    assert card["counts"]["south"]["all"] == {"cat": 8, "dog": 8} and card["findings"] == []


def test_all_that_is_wrong_is_said_at_once_and_no_run_is_tried(fedloom_: Fedloom, sites: Path) -> None:
    (sites / "north" / "cat" / "torn.png").write_bytes(b"\x89PNG")
    (sites / "south" / "dog" / "scan.dcm").touch()
    (sites / "south" / "Cat").mkdir()
    outcome = fedloom_("check", sites)
    assert outcome.code == InvalidData.exit_code and "takes about" not in outcome.out
    assert outcome.out.count("stops a run (") == 4 and all(name in outcome.out for name in ("torn.png", "scan.dcm", "'Cat' and 'cat'"))
    assert "4 things would stop a run" in outcome.err
    check_refused(fedloom_("check", sites, "--layout", "heap"), InvalidConfig, "There is no layout 'heap'")
    check_refused(fedloom_("check", sites / "none"), InvalidData, "is no folder")


def test_bytes_and_participations_are_those_of_the_run(tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path) -> None:
    settings = tiny("method=fedavg")
    told, result = estimate_run(settings), new_run(settings, tmp_path / "run", nobody)
    assert (told.bytes_up, told.bytes_down) == (result.ledger.bytes_up, result.ledger.bytes_down)
    assert told.participations == settings.rounds * settings.participants + settings.clients
    assert 0 < told.seconds[0] <= told.seconds[1] and told.memory_mb > 50


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in ("local", "perfedsde") else pytest.mark.slow) for name in sorted(METHODS)]
)
def test_every_method_can_be_estimated(method: str, tiny: Callable[..., Settings]) -> None:
    assert estimate_run(tiny(f"method={method}")).seconds[0] > 0
