"""A device that is neither CPU nor CUDA and has no float64, as a Mac's GPU, gives what a CPU gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.assemble.environment import usable_device
from fedloom.core.errors import InvalidConfig
from support import other_device


@pytest.mark.parametrize("method", ["fedavg", *(pytest.param(method, marks=pytest.mark.slow) for method in ("perfedsde", "fednas"))])
def test_a_run_on_another_device(method: str, tiny_file: Path, tmp_path: Path) -> None:
    here = fedloom.run(str(tiny_file), folder=tmp_path / "here", method=method)
    command = [sys.executable, other_device.__file__, str(tiny_file), str(tmp_path / "there"), method]
    place = {"PYTHONPATH": str(Path(fedloom.__file__).parents[1])}
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | place)
    assert ended.returncode == 0, ended.stderr
    there = fedloom.Result(tmp_path / "there")
    assert there.facts["environment"]["device"] == "other" and here.facts["environment"]["device"] == "cpu"
    assert there.accuracy == here.accuracy
    for name in [client["name"] for client in here.facts["clients"]]:
        one, other = (result.model(name)[0].state_dict() for result in (here, there))
        assert one.keys() == other.keys()
        for part in one:
            np.testing.assert_allclose(other[part], one[part], rtol=1e-3, atol=1e-4)


def test_mps_is_used_where_torch_finds_it_and_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert usable_device("mps").type == "mps" and usable_device("auto").type == "cpu"  # only where it is asked for
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InvalidConfig, match=r"inline.device is mps, but torch finds no GPU of a Mac .*Use inline.device=cpu"):
        usable_device("mps", "inline.device")
