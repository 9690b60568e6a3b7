"""Every command on every search space, from a run to a prediction."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.methods.base import METHODS
from fedloom.spaces.base import SPACES
from support import Fedloom

spaces = pytest.mark.parametrize("space", [entry.name for entry in SPACES])


@spaces
@pytest.mark.parametrize("method", [entry.name for entry in METHODS])
def test_run_and_resume(fedloom_: Fedloom, tiny_file: Path, space: str, method: str) -> None:
    ran = fedloom_("run", tiny_file, f"space={space}", f"method={method}", "run.folder=it")
    assert ran.code == 0, ran.err
    result = json.loads(Path("it/result.json").read_text())
    assert len(result["clients"]) == 3
    assert all(client["architecture"].startswith(f"{space}:") and 0 <= client["test_accuracy"] <= 1 for client in result["clients"])
    again = fedloom_("resume", "it")
    assert again.code == 0, again.err


@spaces
def test_masked_search(fedloom_: Fedloom, tiny_file: Path, space: str) -> None:
    for sampling in ("archive", "fair"):
        changes = ("training.execution=masked", f"perfedsde.sampling={sampling}", f"run.folder={sampling}")
        ran = fedloom_("run", tiny_file, f"space={space}", *changes)
        assert ran.code == 0, ran.err


@spaces
def test_export_predict_draw_and_card(fedloom_: Fedloom, tiny_file: Path, space: str) -> None:
    assert fedloom_("run", tiny_file, f"space={space}", "rounds=1", "run.folder=it").code == 0
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save("image.png")
    answers = []
    formats = {"safetensors": "safetensors", "torch": "pt2", "onnx": "onnx"}
    if space == "nasvit":  # takes long to translate: test_export has it, among the slow tests
        del formats["onnx"]
    for format, ending in formats.items():
        exported = fedloom_("export", "it", "--client", "client-000", "--format", format, "--out", f"model.{ending}")
        assert exported.code == 0, exported.err
        seen = fedloom_("predict", f"model.{ending}", "image.png", "--json", "--top", 10)
        assert seen.code == 0, seen.err
        (image,) = json.loads(seen.out)
        answers.append({one["name"]: one["probability"] for one in image["classes"]})
        assert sum(answers[-1].values()) == pytest.approx(1, abs=1e-4)
        assert answers[-1] == pytest.approx(answers[0], abs=1e-4)
    drawn = fedloom_("draw", "it", "--client", "client-000", "--out", "picture.svg")
    assert drawn.code == 0 and Path("picture.svg").read_text().startswith("<svg"), drawn.err
    card = fedloom_("space", space, "--json", "--classes", 7)
    assert card.code == 0 and json.loads(card.out)["genes"] > 20, card.err
