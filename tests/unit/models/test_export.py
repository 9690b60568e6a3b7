"""Exported networks in every format and space: the same logits, the same description, without us; and what a model sees in images."""

from __future__ import annotations

import ast
import json
import re
import resource
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import fedloom
from fedloom.assemble import reopen_run
from fedloom.commands import networks
from fedloom.core.errors import DamagedRun, InvalidConfig, InvalidData, UnusableFormat
from fedloom.data.readers import DataSettings, read
from fedloom.files import write_arrays
from fedloom.models import export, load_model
from fedloom.models.export import FORMATS
from fedloom.models.onnx_files import in_int8
from fedloom.models.personal import MODEL
from fedloom.models.predict import predict, read_image, read_model
from fedloom.models.supernet_weights import save_weights
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import make_supernet
from fedloom.testing.nets import measured, weights_of
from support.checks import Fedloom, check_refused, flip_last_byte

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CLASSES = ["Igel", "Füchsin", "owl"]
WARM = 1.7  # temperature


@dataclass(frozen=True)
class Exported:
    network: nn.Module
    facts: dict[str, Any]
    files: dict[str, Path]  # by format
    differences: dict[str, float | None]


def described(space: str, settings: Any, image: ImageShape, architecture: str) -> dict[str, Any]:
    return {
        "format": MODEL,
        "space": space,
        "settings": vars(settings).copy(),
        "image": vars(image).copy(),
        "classes": CLASSES,
        "mean": [0.4] * image.channels,
        "std": [0.2] * image.channels,
        "architecture": architecture,
        "temperature": WARM,
    }


def cases() -> Iterator[Any]:
    """Every space in every format; a transformer takes ten seconds to translate, so that one is for `make slow`."""
    for entry in SPACES.values():
        marks = [pytest.mark.slow] if entry.name == "nasvit" else []
        yield pytest.param((entry.name, tuple(FORMATS)), marks=marks, id=entry.name)


@pytest.fixture(scope="module", params=cases())
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A small network of each space with random weights and statistics, in all formats. Tracing takes seconds: once per space."""
    name, formats = request.param
    settings, image = SPACES[name].settings.tiny(), ImageShape(3, 8, len(CLASSES))
    supernet = make_supernet(name, settings, image)
    architecture = supernet.space.named["smallest"]
    weights = weights_of(supernet)
    seen = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    network = supernet.extract(weights, architecture, measured(supernet, supernet.take(weights, architecture), architecture, seen))
    facts, folder = described(name, settings, image, architecture.id), tmp_path_factory.mktemp(name)
    paths = {format: folder / f"model.{FORMATS[format][0]}" for format in formats}
    with pytest.MonkeyPatch.context() as patch:
        program = export._program(network, facts)  # the same for both
        patch.setattr(export, "_program", lambda network, facts: program)
        differences = {format: FORMATS[format][1](paths[format], network, facts) for format in formats}
    return Exported(network, json.loads(json.dumps(facts)), paths, differences)


def written(exported: Exported, format: str) -> Path:
    return exported.files[format]


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(count))


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


@pytest.mark.parametrize("shape", [(40, 23), (8, 8), (5, 60)])
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


# -- models that cannot be used ----------------------------------------------------------------------


LARGEST = make_supernet("mobilenetv3", SPACES["mobilenetv3"].settings.tiny(), ImageShape(1, 8, 3)).space.named["largest"].id


def small_model(path: Path, **changes: Any) -> Path:
    """A model file of one-channel images whose description is changed; None removes an entry."""
    settings, image = SPACES["mobilenetv3"].settings.tiny(), ImageShape(1, 8, 3)
    supernet = make_supernet("mobilenetv3", settings, image)
    smallest = supernet.space.named["smallest"]
    network = supernet.network(smallest)
    facts = {**described("mobilenetv3", settings, image, smallest.id), **changes}
    FORMATS["safetensors"][1](path, network, {name: value for name, value in facts.items() if value is not None})
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": None}, "classes"),
        ({"mean": None}, "mean"),
        ({"classes": ["one"]}, "contradicts itself"),
        ({"std": [0.0]}, "contradicts itself"),
        ({"std": [0.1, 0.2]}, "contradicts itself"),
        ({"format": "somebody's"}, "does not describe itself"),
    ],
)
def test_a_model_whose_description_is_wrong(fedloom_: Fedloom, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = small_model(tmp_path / "model.safetensors", **changes)
    check_refused(fedloom_("predict", path, "any.png"), InvalidData, path, words, "fedloom export")


@pytest.mark.parametrize(
    "changes",
    [{"space": None}, {"space": "nowhere"}, {"settings": {"width": -1}}, {"image": {"size": 8}}, {"architecture": "mobilenetv3:1-2"}],
)
def test_a_model_whose_network_is_wrong(fedloom_: Fedloom, tmp_path: Path, changes: dict[str, Any]) -> None:
    path = small_model(tmp_path / "model.safetensors", **changes)
    check_refused(fedloom_("predict", path, "any.png"), InvalidData, path, "is no model of Fedloom, or damaged", "fedloom export")


def test_a_model_without_finite_logits_has_no_prediction(fedloom_: Fedloom, tmp_path: Path) -> None:
    path = small_model(tmp_path / "model.safetensors")
    network, facts = load_model(path)
    next(module for module in network.modules() if isinstance(module, nn.BatchNorm2d)).running_var.fill_(-1)  # type: ignore[operator, union-attr]
    FORMATS["safetensors"][1](path, network, facts)
    Image.new("L", (8, 8), 90).save(tmp_path / "good.png")
    check_refused(fedloom_("predict", path, "good.png"), InvalidData, path, "has no prediction", "not finite")


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 no archive", b"\x08 no network", bytes(8) + b"{}"])
def test_a_file_that_is_no_model(fedloom_: Fedloom, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "mine").write_bytes(content)
    check_refused(fedloom_("predict", "mine", "any.png"), InvalidData, "mine is no model of Fedloom, or damaged", "fedloom export")


def test_files_of_others(fedloom_: Fedloom, finished_run: Path, tmp_path: Path) -> None:
    check_refused(fedloom_("predict", "nothing", "any.png"), InvalidData, "nothing cannot be read: No such file")
    check_refused(fedloom_("predict", finished_run, "any.png"), InvalidConfig, "is a folder. Of a run say which model: --client NAME")
    torch.save({"weight": torch.ones(2)}, tmp_path / "theirs.pt")
    check_refused(fedloom_("predict", "theirs.pt", "any.png"), InvalidData, "theirs.pt", "does not describe itself")
    write_arrays(tmp_path / "split.safetensors", {"a": np.ones(2)}, {"dataset": "digits"})
    check_refused(fedloom_("predict", "split.safetensors", "any.png"), InvalidData, "does not describe itself")
    supernet = make_supernet("mobilenetv3", SPACES["mobilenetv3"].settings.tiny(), ImageShape(1, 8, 3))
    save_weights(tmp_path / "whole.safetensors", supernet, supernet.initial(0), {})
    check_refused(fedloom_("predict", "whole.safetensors", "any.png"), InvalidData, "a whole supernet", "--architecture")
    path = finished_run / "clients" / "client-001" / "model.safetensors"
    flip_last_byte(path)
    check_refused(fedloom_("predict", path, "any.png"), InvalidData, path, "damaged: the digest does not match. Write it again with")


def test_files_may_be_named_by_text(tmp_path: Path) -> None:
    path, out = str(small_model(tmp_path / "model.safetensors")), str(tmp_path / "again.safetensors")
    network, facts = load_model(path)
    export.to_safetensors(out, network, facts)
    assert Path(out).read_bytes() == Path(path).read_bytes()
    Image.new("L", (8, 8), 90).save(tmp_path / "good.png")
    [seen], unreadable = predict(read_model(out), [str(tmp_path / "good.png")], 1)
    assert seen.image == str(tmp_path / "good.png") and unreadable == {}


def test_a_file_that_is_no_personal_model_is_named_as_what_it_is(tmp_path: Path) -> None:
    def refused(name: str, words: str) -> None:
        with pytest.raises(DamagedRun, match=f"{name} {words}"):
            load_model(tmp_path / name)

    supernet = make_supernet("mobilenetv3", SPACES["mobilenetv3"].settings.tiny(), ImageShape(1, 8, 3))
    save_weights(tmp_path / "whole.safetensors", supernet, supernet.initial(0), {})
    refused(
        "whole.safetensors", "is not a personal model .*: it names no architecture. `fedloom export` takes a network out of the weights"
    )
    refused("nothing", r"is missing\. If it belongs to a run, that folder is incomplete")
    save_file({"x": torch.ones(2)}, tmp_path / "theirs.safetensors")
    refused("theirs.safetensors", r"is damaged \(it does not describe itself\)\. Restore it from a copy, or make it again \(for a run: in")


def test_a_description_without_an_end(fedloom_: Fedloom, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "deep.pt2", "w") as archive:
        archive.writestr("deep/extra/fedloom.json", 100_000 * "[")
    check_refused(fedloom_("predict", "deep.pt2", "any.png"), InvalidData, "deep.pt2 is no model of Fedloom", "it nests too deeply")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": {"channels": 1, "size": 3000, "classes": 3}}, "3,000 pixels a side; at most 1,024"),
        ({"image": {"channels": 100_000, "size": 1024, "classes": 3}}, "numbers in an image"),
        ({"space": "darts", "settings": {"channels": 512, "cells": 64}}, "parameters; at most 268,435,456"),
        (
            {"settings": {"width": 4.0}, "image": {"channels": 1, "size": 1024, "classes": 3}, "architecture": LARGEST},
            "578,668,592,128 multiply-accumulates; at most",
        ),
    ],
)
def test_a_model_that_describes_more_than_memory_holds(fedloom_: Fedloom, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """Refused before it is built."""
    path = small_model(tmp_path / "model.safetensors", **changes)
    started, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check_refused(fedloom_("predict", path, "any.png"), InvalidData, path, words)
    assert time.monotonic() - started < 10 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200_000  # kilobytes


@pytest.mark.parametrize("command", [("predict", "bomb", "any.png"), ("import-weights", "mobilenetv3", "bomb")])
def test_an_archive_that_unpacks_to_gigabytes_is_not_unpacked(fedloom_: Fedloom, tmp_path: Path, command: tuple[str, ...]) -> None:
    with zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in ("bomb/extra/fedloom.json", "bomb/data.pkl"):
            with archive.open(name, "w", force_zip64=True) as file:
                for _ in range(100):
                    file.write(bytes(2**20))
    assert (tmp_path / "bomb").stat().st_size < 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check_refused(fedloom_(*command), InvalidData, "bomb", "compressed")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 50_000


def test_headers_of_torch_files_that_are_no_headers(exported: Exported, fedloom_: Fedloom, tmp_path: Path) -> None:
    table = "data/weights/model_weights_config.json"
    entry = {"path_name": "weight_0", "tensor_meta": {"dtype": 7, "sizes": [], "strides": [], "storage_offset": {"as_int": 0}}}
    for name, text in {
        "extra/fedloom.json": "[]",
        table: '{"config": []}',
        f"{table}#": '{"config": {"a": 3}}',
        f"{table}##": json.dumps({"config": {"a": {**entry, "tensor_meta": {**entry["tensor_meta"], "sizes": [{"as_int": -5}]}}}}),  # type: ignore[dict-item]
        f"{table}###": json.dumps({"config": {"a": {**entry, "tensor_meta": {**entry["tensor_meta"], "sizes": [{"as_int": 10**18}] * 9}}}}),  # type: ignore[dict-item]
        f"{table}####": json.dumps({"config": {"a": {**entry, "path_name": ["x"]}}}),
    }.items():
        with zipfile.ZipFile(exported.files["torch"]) as source, zipfile.ZipFile(tmp_path / "odd.pt2", "w") as target:
            for member in source.namelist():
                target.writestr(member, text if member.endswith(name.rstrip("#")) else source.read(member))
        check_refused(fedloom_("predict", "odd.pt2", "any.png"), InvalidData, "odd.pt2 is no model of Fedloom, or damaged")


def test_the_program_inside_a_torch_file_is_never_run(exported: Exported, tmp_path: Path) -> None:
    """Numbers and description are all that ``predict`` takes from it."""
    changed = tmp_path / "changed.pt2"
    with zipfile.ZipFile(exported.files["torch"]) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            target.writestr(name, b"anything" if name.endswith(("models/model.json", "sample_inputs/model.pt")) else source.read(name))
    with torch.no_grad():
        assert torch.allclose(read_model(changed).logits(images(2)), exported.network(images(2)), **CLOSE)


def test_a_torch_file_with_numbers_missing(exported: Exported, fedloom_: Fedloom, tmp_path: Path) -> None:
    with zipfile.ZipFile(exported.files["torch"]) as source, zipfile.ZipFile(tmp_path / "less.pt2", "w") as target:
        for name in source.namelist():
            if not name.endswith("weight_3"):
                target.writestr(name, source.read(name))
    check_refused(fedloom_("predict", "less.pt2", "any.png"), InvalidData, "less.pt2", "damaged")


@pytest.mark.parametrize("strides, offset", [((1, 3), 0), ((0, 0), 0), ((), 0), (None, 1)], ids=["turned", "repeated", "unknown", "later"])
def test_a_torch_file_with_numbers_laid_out_otherwise(
    exported: Exported, fedloom_: Fedloom, tmp_path: Path, strides: tuple[int, ...] | None, offset: int
) -> None:
    """They would be taken for other numbers."""
    with zipfile.ZipFile(exported.files["torch"]) as source, zipfile.ZipFile(tmp_path / "other.pt2", "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("model_weights_config.json"):
                table = json.loads(content)
                classifier = next(key for key in table["config"] if key.startswith("classifier.") and key.endswith(".weight"))
                meta = table["config"][classifier]["tensor_meta"]
                meta["storage_offset"]["as_int"] = offset
                meta["strides"] = meta["strides"] if strides is None else [{"as_int": stride} for stride in strides]
                content = json.dumps(table).encode()
            target.writestr(name, content)
    outcome = fedloom_("predict", "other.pt2", "any.png")
    check_refused(outcome, InvalidData, "other.pt2", f"the numbers of {classifier} do not lie in order", "fedloom export")


# -- images ------------------------------------------------------------------------------------------------


def test_images_are_read_as_training_images_are(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    pictures = []
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number, ending in enumerate(("png", "jpg", "webp")):
            path = tmp_path / "images" / name / f"{number}.{ending}"
            Image.fromarray(generator.integers(0, 256, (70, 50, 3), np.uint8)).save(path)
            pictures.append(path)
    pools = read(DataSettings("folder", str(tmp_path / "images"), 12))
    known = {image.tobytes() for pool in (pools.train, pools.test) for image in pool.images}
    assert {read_image(path, 3, 12).tobytes() for path in pictures} == known


def test_images_of_other_modes_become_what_the_model_takes(tmp_path: Path) -> None:
    for mode in ("RGBA", "L", "P", "1", "CMYK", "LA"):
        Image.new(mode, (5, 9), 1).save(tmp_path / f"{mode}.{'tiff' if mode == 'CMYK' else 'png'}")
    for path in tmp_path.iterdir():
        assert read_image(path, 3, 8).shape == (3, 8, 8) and read_image(path, 1, 8).shape == (1, 8, 8)


def test_images_that_cannot_be_read_do_not_stop_the_others(fedloom_: Fedloom, tmp_path: Path) -> None:
    model = small_model(tmp_path / "model.safetensors")
    Image.new("L", (8, 8), 90).save(tmp_path / "good.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "good.png").read_bytes()[:40])
    (tmp_path / "text.png").write_text("no image")
    Image.fromarray(np.full((8, 8), 4e4, np.float32)).save(tmp_path / "deep.tiff")
    names = ("torn.png", "good.png", "text.png", "deep.tiff", "missing.png", "good.png")
    outcome = fedloom_("predict", model, *names, "--top", 1)
    assert outcome.code == InvalidData.exit_code and [line.split(":")[0] for line in outcome.out.splitlines()] == ["good.png", "good.png"]
    assert outcome.err.startswith("fedloom: 4 of 6 images cannot be read: torn.png (") and outcome.err.count("\n") == 1
    assert (
        "deep.tiff (it has more than 16 bits per channel; save it with 8 or 16)" in outcome.err
        and "missing.png (No such file" in outcome.err
    )
    check_refused(fedloom_("predict", model, "text.png", "--json"), InvalidData, "1 of 1 images", "text.png")


def test_many_images_in_parts(fedloom_: Fedloom, tmp_path: Path) -> None:
    model = small_model(tmp_path / "model.safetensors")
    for number in range(70):
        Image.new("L", (8, 8), 3 * number).save(tmp_path / f"{number}.png")
    rows = json.loads(fedloom_("predict", model, *(f"{number}.png" for number in range(70)), "--json", "--top", 1).out)
    assert [row["image"] for row in rows] == [f"{number}.png" for number in range(70)]
    assert all(len(row["classes"]) == 1 for row in rows)
    [last] = json.loads(fedloom_("predict", model, "69.png", "--json", "--top", 1).out)
    assert last["classes"][0]["probability"] == pytest.approx(rows[-1]["classes"][0]["probability"], abs=1e-5)
