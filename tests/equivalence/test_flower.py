"""A server and three sites, which share nothing but a port, end with what one process ends with; and every member keeps its own.

All methods: pytest -m network tests/equivalence/test_flower.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.data.members import read_member
from fedloom.engine.run import Watcher
from fedloom.federation.agreement import read_agreement
from fedloom.methods.base import METHODS
from fedloom.models.predict import read_model
from support.federation import SITES, Federation, check_same, federation, lines, rehearsed

pytestmark = pytest.mark.xdist_group("flower")


def test_flower_gives_what_one_process_gives(tmp_path: Path, nobody: Watcher) -> None:
    check(tmp_path, "perfedsde", nobody, onnx=("north",))


@pytest.mark.network
@pytest.mark.parametrize("method", list(METHODS))
def test_of_every_method(method: str, tmp_path: Path, nobody: Watcher) -> None:
    check(tmp_path, method, nobody, onnx=SITES if method == "perfedsde" else ("north",))


def check(folder: Path, method: str, nobody: Watcher, onnx: tuple[str, ...]) -> None:
    with federation(folder, method, onnx=onnx) as made:
        processes = [made.serve(), *map(made.site, SITES)]
        here = rehearsed(made, nobody)
        for process in processes:
            assert process.finish() == 0, process.said()
        check_same(made, here)
        check_server(made, here)
        for name in SITES:
            check_site(made, name, here)
            assert (made.site_folder(name) / "model.onnx").exists() == (name in onnx)
        for name in onnx:
            check_onnx(made, name)


def made_by_local(place: Path) -> bool:
    """Which shares nothing that a newcomer could have."""
    return bool(json.loads((place / "result.json").read_text())["method"] == "local")


def check_server(made: Federation, here: Path) -> None:
    """What it has of the sites is what their reports said, and who they are."""
    place = made.folder / "server-run"
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    shared = [] if made_by_local(place) else ["newcomers.safetensors"]
    state = ["state/lock", "state/seconds.json", "state/server.safetensors"]
    assert files == sorted(["config.toml", "federation.json", "ledger.jsonl", "result.json", *shared, *state])
    entries = lines(place / "ledger.jsonl")
    assert exchanged(entries) == exchanged(lines(here / "ledger.jsonl"))
    for entry in entries:
        assert entry["architecture"] == "" and entry["validation_accuracy"] is entry["test_accuracy"] is None and entry["notes"] == {}
        assert entry["evaluated_architectures"] == entry["trained_macs"] == 0
    result = json.loads((place / "result.json").read_text())
    assert result["finished"] and result["clients"] == [] and set(result["accuracy"].values()) == {None}
    for file in ("config.toml", "result.json"):
        assert "images/" not in (place / file).read_text().replace("server-images", "")  # nor where the sites' images are


def exchanged(entries: list[dict[str, Any]]) -> list[list[Any]]:
    names = ("round", "client", "final", "bytes_down", "bytes_up", "uploads")
    return sorted([entry[name] for name in names] for entry in entries)


def check_site(made: Federation, name: str, here: Path) -> None:
    """It has its model and its accuracy, those of the rehearsal, and a statement that adds up."""
    place = made.site_folder(name)
    (expected,) = (client for client in json.loads((here / "result.json").read_text())["clients"] if client["name"] == name)
    assert {path.stat().st_mode & 0o077 for path in place.rglob("*")} == {0}  # nobody else's business, also the exported model
    result = json.loads((place / "result.json").read_text())
    for key in ("test_accuracy", "validation_accuracy", "architecture"):
        assert result[key] == expected[key]
    left, own = lines(place / "left.jsonl"), lines(place / "ledger.jsonl")
    there = [entry for entry in lines(made.folder / "server-run" / "ledger.jsonl") if entry["client"] == name]
    assert [line["bytes"] for line in left] == [entry["bytes_up"] for entry in own] == [entry["bytes_up"] for entry in there]
    assert [line["round"] for line in left] == [entry["round"] for entry in own] and left[-1]["fields"] == {} and left[-1]["bytes"] == 0
    text, total = (place / "statement.txt").read_text(), sum(line["bytes"] for line in left)
    rounds = [line["round"] + 1 for line in left if line["fields"]]
    assert f"{len(left)} reports with {total:,} bytes of content left this site, in {len(rounds)} rounds" in text
    for field in {field for line in left for field in line["fields"]}:
        assert f"  {field}: {sum(line['fields'][field] for line in left if line['fields']):,} bytes: " in text
    assert rounds == ([] if read_agreement(made.file).settings.method == "local" else [1, 2, 3])


def check_onnx(made: Federation, name: str) -> None:
    """The exported model loads and is as accurate as the site was told."""
    classes, size = read_agreement(made.file).members.classes, 8
    model = read_model(made.site_folder(name) / "model.onnx")
    _, test = read_member(made.folder / "images" / name, classes, size)
    right = model.probabilities(test.images).argmax(1).numpy() == test.labels
    told = json.loads((made.site_folder(name) / "result.json").read_text())["test_accuracy"]
    assert np.isclose(float(right.mean()), told) and tuple(model.classes) == classes
