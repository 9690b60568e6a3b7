"""A run that uses a generator of one's own goes on from any directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fedloom import config
from fedloom.generator.files import shipped
from support.checks import Fedloom


def test_a_generator_named_by_a_short_path_is_found_from_elsewhere(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    shutil.copy(shipped("mobilenetv3"), "mine.safetensors")
    outcome = fedloom_(
        "run", tiny_file, "run.folder=made", "perfedsde.generator_file=mine.safetensors", "perfedsde.generator=diffusion", "rounds=1"
    )
    assert outcome.code == 0, outcome
    kept = config.from_table(config.read_toml(tmp_path / "made" / "config.toml")).components["perfedsde"]
    assert kept.generator_file == str(tmp_path / "mine.safetensors") and kept.features == ""
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert fedloom_("resume", os.path.join("..", "made")).code == 0
