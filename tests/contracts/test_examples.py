"""The examples, run as they are with tiny settings, and the method of own_method.py held against what it should be."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom import comparing, config
from fedloom.assemble import new_run, reopen_run
from fedloom.assemble.builder import make_tools
from fedloom.assemble.environment import plugin_digests
from fedloom.core.messages import Report
from fedloom.data.readers import read
from fedloom.engine.run import Watcher
from fedloom.methods.base import METHODS
from fedloom.testing.plugged import plugged
from support.checks import Fedloom, shrinking

EXAMPLES = Path(__file__).parents[2] / "examples"
METHOD = str(EXAMPLES / "own_method.py")
TINY = shrinking()


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run an example in a folder of the test's own; what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *overrides: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *TINY, *overrides])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_notebook(tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells one after the other, with a tiny federation in place of the quickstart, and no process for each run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparing, "execute", lambda runs, jobs, view, minutes: comparing.execute_side_by_side(runs, len(runs), view))
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sum('"quickstart"' in text for text in code) == 2 and all(cell.get("outputs", []) == [] for cell in cells)
    names: dict[str, Any] = {}
    for number, text in enumerate(code):
        exec(compile(text.replace('"quickstart"', repr(str(tiny_file))), f"cell {number}", "exec"), names)
    assert len(names["result"].clients) == 3 and len(names["comparison"].methods) == 2
    assert (tmp_path / "table.tex").exists()


def test_quickstart(example: Callable[..., str], tmp_path: Path) -> None:
    out = example("quickstart.py", "method=fedavg", "seed=3")
    assert "What left the clients: examples, update;" in out
    assert len(re.findall(r"^client-00\d +\d+\.\d% ", out, re.MULTILINE)) == 3
    counted = re.search(r"(\d+\.\d%) of its 8 test images, and the result says (\d+\.\d%)", out)
    assert counted and counted[1] == counted[2] != "0.0%"
    assert (tmp_path / "runs" / "example-quickstart" / "result.json").exists()


@pytest.mark.parametrize(
    ("asked", "ending"), [((), "safetensors"), pytest.param(("--onnx",), "onnx", marks=pytest.mark.slow)], ids=["safetensors", "onnx"]
)
def test_own_images(asked: tuple[str, ...], ending: str, example: Callable[..., str], tmp_path: Path) -> None:
    out = example("own_images.py", "method=local", *asked)
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == ["four", "one", "three", "two", "zero"]
    assert len(re.findall(r"^pictures/(\w+)/\d+\.png: \w+ \d+%, \w+ \d+%$", out, re.MULTILINE)) == 5
    assert "cannot be read" not in out
    assert len(list((tmp_path / "runs" / "example-own-images").glob(f"client-00?.{ending}"))) == 1


def test_own_method_runs_and_says_what_left(fedloom_: Fedloom) -> None:
    with plugged(METHOD):
        outcome = fedloom_("run", "quickstart", f'plugins=["{METHOD}"]', "method=fedavgm", *TINY)
        assert outcome.code == 0, outcome
        assert "fedavgm on digits" in outcome.out and "what left the clients: examples, update" in outcome.out
        result = json.loads(Path("runs/quickstart/result.json").read_text())
        assert result["environment"]["plugins"] == plugin_digests([METHOD]) and plugin_digests([METHOD]).keys() == {"own_method.py"}
        assert "averaged with momentum" in fedloom_("list", "methods", "--plugin", METHOD).out


def test_own_method_without_momentum_is_fedavg(tmp_path: Path, nobody: Watcher) -> None:
    with plugged(METHOD):
        weights = {}
        for method, *own in (("fedavg",), ("fedavgm", "fedavgm.architecture=smallest", "fedavgm.momentum=0")):
            settings = config.load("quickstart", [f'plugins=["{METHOD}"]', f"method={method}", *TINY, *own])
            new_run(settings, tmp_path / method, nobody)
            weights[method] = reopen_run(tmp_path / method).state().weights
    for name, array in weights["fedavg"].items():
        np.testing.assert_allclose(weights["fedavgm"][name], array, rtol=1e-4, atol=1e-5)


def test_own_method_repeats_a_part_of_its_last_step() -> None:
    with plugged(METHOD):
        settings = config.load("quickstart", [f'plugins=["{METHOD}"]', "method=fedavgm", *TINY, "fedavgm.momentum=0.5"])
        tools = make_tools(settings, read(settings.data), "cpu")
        method = METHODS["fedavgm"].make(settings.components["fedavgm"], tools)
        first = method.start(0)
        ones, threes = ({name: np.full_like(array, value) for name, array in first.weights.items()} for value in (1, 3))
        reports = [Report("a", 0, {"update": ones}, {"examples": 30}), Report("b", 0, {"update": threes}, {"examples": 10})]
        second = method.absorb(first, reports)  # moves by (30 * 1 + 10 * 3) / 40 = 1.5
        third = method.absorb(second, reports)  # and by 0.5 * 1.5 + 1.5 = 2.25
        last = method.absorb(third, [])  # nobody reported: it stays
    for name, array in first.weights.items():
        np.testing.assert_allclose(second.weights[name], array + 1.5, rtol=1e-5)
        np.testing.assert_allclose(third.weights[name], array + 3.75, rtol=1e-5)
        assert (last.weights[name] == third.weights[name]).all()
    assert (second.round, third.round, last.round) == (1, 2, 3)
