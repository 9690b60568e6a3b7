"""Exported networks in every format and space: the same logits, the same description, without us."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fedloom
from fedloom.assemble import reopen_run
from fedloom.commands import networks
from fedloom.core.errors import InvalidConfig, InvalidData, UnusableFormat
from fedloom.models import export, load_model
from fedloom.models.export import FORMATS
from fedloom.models.onnx_files import in_int8
from fedloom.models.predict import predict, read_model
from support.checks import Fedloom, check_refused
from support.exported import CLASSES, CLOSE, WARM, Exported, images, written

# -- every format ------------------------------------------------------------------------------------


def test_safetensors_hold_the_network_and_its_description(exported: Exported) -> None:
    network, facts = load_model(exported.files["safetensors"])
    assert facts == exported.facts and torch.equal(network(images(4)), exported.network(images(4)))
    assert exported.differences["safetensors"] is None


def test_onnx_gives_the_same_logits_for_any_number_of_images(exported: Exported) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = written(exported, "onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [one.name for one in (*session.get_inputs(), *session.get_outputs())] == ["pixels", "probabilities", "logits"]
    for count in (1, 2, 7):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 8, 8, 3), np.uint8)
        with torch.no_grad():
            expected = exported.network((torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - 0.4) / 0.2)
        probabilities, logits = session.run(None, {"pixels": pixels})
        assert logits.shape == (count, 3) and np.allclose(logits, expected, **CLOSE)
        assert np.allclose(probabilities, (expected / WARM).softmax(1), **CLOSE)
    assert expected.std(0).max() > 1e-3  # it looks at the image
    assert json.loads(session.get_modelmeta().custom_metadata_map["fedloom"]) == exported.facts
    difference = exported.differences["onnx"]
    assert difference is not None and difference < 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("shape", [(40, 23), (8, 8), (5, 60), (40, 100)])
def test_onnx_sees_in_raw_images_what_predict_sees(exported: Exported, tmp_path: Path, shape: tuple[int, int]) -> None:
    """Of any size: resizing, normalisation and softmax are in the graph."""
    onnxruntime = pytest.importorskip("onnxruntime")
    rough = Image.fromarray(np.random.default_rng(3).integers(0, 256, (6, 6, 3), np.uint8)).resize(shape)
    rough.save(tmp_path / "raw.png")
    session = onnxruntime.InferenceSession(exported.files["onnx"], providers=["CPUExecutionProvider"])
    (there,) = session.run(["probabilities"], {"pixels": np.asarray(rough)[None]})[0].tolist()
    (seen,), unreadable = predict(read_model(exported.files["safetensors"]), [tmp_path / "raw.png"], 3)
    assert not unreadable and dict(zip(CLASSES, there, strict=True)) == pytest.approx(dict(seen.classes), abs=2e-3)


def test_onnx_says_nothing_of_the_shapes_of_weights(exported: Exported) -> None:
    """Which onnxruntime's quantisation takes for shapes of activations, and fails."""
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(exported.files["onnx"]).graph
    weights = {one.name for one in graph.initializer}
    assert weights and not weights & {one.name for one in graph.value_info}


def test_torch_runs_its_format_without_us(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fedloom"]:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails from here on
    described = {"fedloom.json": ""}
    program = torch.export.load(exported.files["torch"], extra_files=described).module()
    assert json.loads(described["fedloom.json"]) == exported.facts
    with torch.no_grad():
        for count in (1, 2, 7):
            assert torch.allclose(program(images(count)), exported.network(images(count)), **CLOSE)


def test_files_say_nothing_about_the_machine_they_were_made_on(exported: Exported) -> None:
    here = str(Path(__file__).parents[3]).encode()
    with zipfile.ZipFile(exported.files["torch"]) as archive:
        contents = [archive.read(name) for name in archive.namelist()]
    for content in [*contents, *(path.read_bytes() for path in exported.files.values())]:
        assert here not in content and b"site-packages" not in content and b"/fedloom/" not in content


@pytest.mark.parametrize("format", FORMATS)
def test_a_prediction_from_every_format(exported: Exported, fedloom_: Fedloom, tmp_path: Path, format: str) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(picture).save(tmp_path / "one.png")
    outcome = fedloom_("predict", written(exported, format), "one.png", "--json", "--top", 9)
    assert outcome.code == 0, outcome
    [row] = json.loads(outcome.out)
    normalised = (torch.from_numpy(picture).permute(2, 0, 1)[None] / 255 - 0.4) / 0.2
    with torch.no_grad():
        expected = (exported.network(normalised) / WARM).softmax(1)[0]
    assert row["image"] == "one.png"
    assert [one["name"] for one in row["classes"]] == [CLASSES[k] for k in expected.argsort(descending=True)]
    assert {one["name"]: one["probability"] for one in row["classes"]} == pytest.approx(
        dict(zip(CLASSES, expected.tolist(), strict=True)), abs=1e-5
    )


# -- the command -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "ending"), [("safetensors", "safetensors"), ("torch", "pt2"), ("onnx", "onnx")])
def test_the_command_writes_the_format_it_is_asked_for(
    fedloom_: Fedloom, finished_run: Path, monkeypatch: pytest.MonkeyPatch, format: str, ending: str
) -> None:
    """What is in such a file is tested above; tracing takes seconds."""
    asked: list[tuple[Path, nn.Module, dict[str, Any]]] = []

    def write(path: Path, network: nn.Module, facts: dict[str, Any]) -> float | None:
        asked.append((path, network, facts))
        return None if format == "safetensors" else 1.25e-7

    monkeypatch.setitem(networks.FORMATS, format, (ending, write))
    outcome = fedloom_("export", finished_run, "--client", "client-001", "--format", format)
    assert outcome.code == 0 and outcome.err == "" and outcome.out.startswith(f"client-001.{ending}: mobilenetv3:")
    assert ("logits differ from torch's by at most 1.2e-07" in outcome.out) == (format != "safetensors")
    [(path, network, facts)] = asked
    _, stored = load_model(finished_run / "clients" / "client-001" / "model.safetensors")
    assert path == Path(f"client-001.{ending}") and facts == stored and not network.training


@pytest.mark.parametrize("client", ["../clients/client-001", "./client-001", "client-001/", ".."])
def test_a_path_is_no_clients_name(fedloom_: Fedloom, finished_run: Path, client: str) -> None:
    outcome = fedloom_("export", finished_run, "--client", client, "--out", "there.safetensors")
    check_refused(outcome, InvalidConfig, f"has no personal model of {client!r}", "client-001")
    assert not Path("there.safetensors").exists()


def test_all_clients_at_once(fedloom_: Fedloom, finished_run: Path) -> None:
    assert fedloom_("export", finished_run, "--all").code == 0
    names = [f"client-00{number}.safetensors" for number in range(3)]
    assert sorted(path.name for path in (finished_run / "models").iterdir()) == names
    assert fedloom_("export", finished_run, "--all", "--out", "there").code == 0
    assert Path("there/client-002.safetensors").read_bytes() == (finished_run / "models/client-002.safetensors").read_bytes()
    check_refused(fedloom_("export", finished_run, "--all", "--client", "client-000"), InvalidConfig, "--client NAME or --all")
    shutil.rmtree(finished_run / "clients")
    check_refused(fedloom_("export", finished_run, "--all"), InvalidConfig, "no personal models yet")


def test_int8_is_small_and_says_what_it_costs(fedloom_: Fedloom, finished_run: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    outcome = fedloom_("export", finished_run, "--client", "client-001", "--format", "onnx-int8")
    assert outcome.code == 0, outcome.err
    said = re.search(
        r"(\d+)% of the ([\d,]+) in float; test accuracy (.*)%, in float (.*)%: a loss of (.*) points on 8 images", outcome.out
    )
    assert said and int(said[2].replace(",", "")) > 10_000
    assert float(said[4]) - float(said[3]) == pytest.approx(float(said[5]), abs=0.11)
    data = Path("client-001.int8.onnx").read_bytes()
    assert len(data) == int(outcome.out.split(" bytes,")[0].rpartition(" ")[2].replace(",", ""))
    kinds = {one.type for one in onnxruntime.InferenceSession(data).get_inputs()}
    assert kinds == {"tensor(uint8)"}
    model = read_model("client-001.int8.onnx")  # predict takes it, too
    test = reopen_run(finished_run).federation.data_of("client-001").test
    right = (model.probabilities(test.images.numpy()).argmax(1) == test.labels).float().mean().item()
    assert f"test accuracy {right:.1%}" in outcome.out


def test_int8_needs_images(fedloom_: Fedloom, finished_run: Path) -> None:
    (finished_run / "federation.json").write_text("{}")
    asked = ("export", finished_run, "--client", "client-001", "--format", "onnx-int8")
    check_refused(fedloom_(*asked), InvalidConfig, "at its sites: name this site's folder", "--images FOLDER")
    check_refused(fedloom_(*asked, "--images", "pictures"), InvalidConfig, "sees grey ones")
    with pytest.raises(InvalidData, match="there are none"):
        in_int8(None, {}, np.empty((0, 1, 8, 8), np.uint8))


@pytest.mark.slow
def test_int8_of_trained_digits_loses_less_than_a_point(fedloom_: Fedloom) -> None:
    """With the size that a network of such a run has: at most 45 % of float."""
    assert fedloom_("run", "quickstart", "method=fedavg", "rounds=10", "run.folder=run").code == 0
    outcome = fedloom_("export", "run", "--all", "--format", "onnx-int8")
    assert outcome.code == 0, outcome.err
    assert max(map(int, re.findall(r"(\d+)% of the [\d,]+ in float", outcome.out))) <= 45
    said = re.search(r"clients lose (-?[\d.]+) points", outcome.out)
    assert said and float(said[1]) < 1, outcome.out


def test_formats_are_suggested(fedloom_: Fedloom, finished_run: Path) -> None:
    outcome = fedloom_("export", finished_run, "--client", "client-001", "--format", "onx")
    check_refused(outcome, InvalidConfig, "Did you mean 'onnx'?", "safetensors", "torch")


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_onnx_without_the_extra(
    fedloom_: Fedloom, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    outcome = fedloom_("export", finished_run, "--client", "client-001", "--format", "onnx")
    check_refused(outcome, UnusableFormat, missing, "pip install 'fedloom[export]'")
    assert not (tmp_path / "client-001.onnx").exists()


def test_a_prediction_from_onnx_without_the_extra(exported: Exported, fedloom_: Fedloom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    outcome = fedloom_("predict", written(exported, "onnx"), "any.png")
    check_refused(outcome, UnusableFormat, "onnxruntime", "pip install 'fedloom[export]'")


def test_nothing_needs_the_extra_to_be_imported() -> None:
    for path in Path(fedloom.__file__).parent.rglob("*.py"):
        for line in ast.parse(path.read_text()).body:
            names = (
                [alias.name for alias in line.names]
                if isinstance(line, ast.Import)
                else [line.module]
                if isinstance(line, ast.ImportFrom)
                else []
            )
            assert not any(str(name).startswith("onnx") for name in names), path


def test_an_export_that_changes_the_network_is_refused(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(by: float) -> Callable[[Tensor], Any]:
        return lambda x: exported.network(x).detach().numpy() + by

    with torch.no_grad():
        largest = max(1.0, float(exported.network(export._images(exported.facts, export.CHECKED)).abs().max()))
    assert export._compared(exported.network, exported.facts, wrong(1e-6)) < 1e-5
    for by in (2e-4 * largest, float("nan")):
        with pytest.raises(UnusableFormat, match="logits differ from the original's"):
            export._compared(exported.network, exported.facts, wrong(by))
