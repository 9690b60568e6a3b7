"""Models that cannot be used: damaged, of others, or made to do harm. Each is refused in a sentence."""

from __future__ import annotations

import json
import resource
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from fedloom.core.errors import DamagedRun, InvalidConfig, InvalidData
from fedloom.files import write_arrays
from fedloom.models import export, load_model
from fedloom.models.export import FORMATS
from fedloom.models.predict import predict, read_model
from fedloom.models.supernet_weights import save_weights
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import make_supernet
from support.checks import Fedloom, check_refused, flip_last_byte
from support.exported import CLOSE, Exported, images, small_model

LARGEST = make_supernet("mobilenetv3", SPACES["mobilenetv3"].settings.tiny(), ImageShape(1, 8, 3)).space.named["largest"].id


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
