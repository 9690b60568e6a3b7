"""Models judged at their clients, by `fedloom evaluate` and by `fedloom predict`: one temperature, one threshold, one set of numbers."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedloom.assemble import reopen_run
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.engine.store import Store, read_result
from fedloom.files import read_arrays, write_arrays
from fedloom.models.predict import read_model
from support.checks import Fedloom, check_refused


@pytest.fixture
def tests_of_a_client(finished_run: Path, tmp_path: Path) -> Path:
    """The test images of client-000 as files."""
    data, place = reopen_run(finished_run).federation.data_of("client-000").test, tmp_path / "digits"
    for number, (pixels, label) in enumerate(zip(data.images.numpy(), data.labels.tolist(), strict=True)):
        (place / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[0]).save(place / str(label) / f"{number}.png")
    return place


def model_of(run: Path) -> Path:
    return run / "clients" / "client-000" / "model.safetensors"


def lines_of(table: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(table.read_text().splitlines()))


def test_a_run_says_what_its_models_are_worth(finished_run: Path) -> None:
    result = read_result(finished_run)
    first = result["clients"][0]
    entry = next(entry for entry in Store(finished_run).read_ledger() if entry.final and entry.client == first["name"])
    assert entry.judged is not None
    matrix = entry.judged.matrix()
    assert matrix.sum() == first["test_examples"] and np.trace(matrix) / matrix.sum() == pytest.approx(first["test_accuracy"])
    _, facts = read_arrays(model_of(finished_run))
    assert (facts["temperature"], facts["threshold"]) == (entry.judged.temperature, entry.judged.threshold) and "confusion" not in facts
    pooled = result["judged"]
    assert np.sum(pooled["confusion"]) == sum(row["test_examples"] for row in result["clients"])
    assert [row["name"] for row in pooled["classes"]] == list("0123456789")
    assert sum(row["images"] for row in pooled["classes"]) == np.sum(pooled["confusion"])
    means = [row["judged"]["balanced_accuracy"] for row in result["clients"]]
    assert pooled["balanced_accuracy"] == pytest.approx(sum(means) / len(means))


def test_evaluate_finds_what_the_client_found(fedloom_: Fedloom, finished_run: Path, tests_of_a_client: Path, tmp_path: Path) -> None:
    judged = read_result(finished_run)["clients"][0]["judged"]
    command = ("evaluate", finished_run, tests_of_a_client, "--client", "client-000", "--csv", tmp_path / "all.csv")
    card = json.loads(fedloom_(*command, "--json").out)
    assert card["accuracy"] == read_result(finished_run)["clients"][0]["test_accuracy"] and card["confusion"] == judged["confusion"]
    for name in ("balanced_accuracy", "temperature", "threshold", "calibrated_error", "accepted", "noise_accepted"):
        assert card[name] == pytest.approx(judged[name], abs=1e-5)
    rows = lines_of(tmp_path / "all.csv")
    assert len(rows) == card["images"] and np.mean([row["truth"] == row["class"] for row in rows]) == pytest.approx(card["accuracy"])
    assert all(sum(float(row[f"p({digit})"]) for digit in range(10)) == pytest.approx(1, abs=1e-4) for row in rows)
    text = fedloom_("evaluate", model_of(finished_run), tests_of_a_client).out
    assert "accuracy" in text and "confusion matrix" in text and "of noise it is sure in" in text


def test_all_models_of_a_run_on_the_same_images(fedloom_: Fedloom, finished_run: Path, tests_of_a_client: Path, tmp_path: Path) -> None:
    cards = json.loads(fedloom_("evaluate", finished_run, tests_of_a_client, "--json", "--csv", tmp_path / "all.csv").out)["clients"]
    assert sorted(cards) == ["client-000", "client-001", "client-002"]
    assert len(lines_of(tmp_path / "all.csv")) == 3 * cards["client-000"]["images"]
    assert "client-002" in fedloom_("evaluate", finished_run, tests_of_a_client).out


def test_predict_takes_folders_and_runs_and_writes_csv(fedloom_: Fedloom, finished_run: Path, tests_of_a_client: Path) -> None:
    (tests_of_a_client / ".hidden").mkdir()
    Image.new("L", (8, 8)).save(tests_of_a_client / ".hidden" / "no.png")
    command = ("predict", finished_run, tests_of_a_client, "--client", "client-000")
    rows: list[dict[str, Any]] = json.loads(fedloom_(*command, "--json").out)
    files = sorted(tests_of_a_client.glob("*/*.png"))
    assert sorted(row["image"] for row in rows) == [str(path) for path in files if ".hidden" not in str(path)]
    threshold = read_model(model_of(finished_run)).threshold
    assert 0 < threshold < 1 and any(row["unsure"] for row in rows)
    assert all(row["unsure"] == (row["classes"][0]["probability"] < threshold) for row in rows)
    assert ": unsure: " in fedloom_(*command).out
    assert fedloom_(*command, "--csv", "seen.csv").code == 0
    table = lines_of(Path("seen.csv"))
    assert [row["class"] for row in table] == [row["classes"][0]["name"] for row in rows]


def test_the_temperature_of_the_file_is_used(finished_run: Path) -> None:
    arrays, facts = read_arrays(model_of(finished_run))
    images = np.random.default_rng(0).integers(0, 256, (4, 1, 8, 8), np.uint8)
    probabilities = []
    for temperature in (1.0, 4.0):
        write_arrays(model_of(finished_run), arrays, {**facts, "temperature": temperature})
        model = read_model(model_of(finished_run))
        probabilities.append(model.probabilities(images))
    assert (probabilities[1].log() * 4).softmax(1).numpy() == pytest.approx(probabilities[0].numpy(), abs=1e-5)
    for odd in ({"temperature": 0.0}, {"threshold": 1.5}, {"temperature": "warm"}):
        write_arrays(model_of(finished_run), arrays, {**facts, **odd})
        with pytest.raises(InvalidData, match="no model of Fedloom, or damaged"):
            read_model(model_of(finished_run))


def test_what_evaluate_and_predict_refuse(fedloom_: Fedloom, finished_run: Path, tests_of_a_client: Path, tmp_path: Path) -> None:
    model = model_of(finished_run)
    check_refused(fedloom_("predict", finished_run, tests_of_a_client), InvalidConfig, "is a folder. Of a run say which model: --client")
    check_refused(fedloom_("predict", model, tests_of_a_client, "--client", "client-000"), InvalidConfig, "is one model")
    (tmp_path / "empty").mkdir()
    check_refused(fedloom_("predict", model, tmp_path / "empty"), InvalidData, "holds no image")
    (next(tests_of_a_client.iterdir()) / "torn.png").write_bytes(b"\x89PNG")
    assert "torn.png" in fedloom_("evaluate", model, tests_of_a_client).err
    (tests_of_a_client / "zero").mkdir()
    check_refused(fedloom_("evaluate", model, tests_of_a_client), InvalidData, "a class 'zero', which the model does not know")


def test_a_client_s_folder_is_its_model(fedloom_: Fedloom, finished_run: Path, tests_of_a_client: Path) -> None:
    model = model_of(finished_run)
    for command in (("evaluate", "--json"), ("predict", "--json")):
        assert (
            fedloom_(command[0], model.parent, tests_of_a_client, *command[1:]).out
            == fedloom_(*command, model, tests_of_a_client).out
            != ""
        )


def test_images_that_were_trained_on_are_remarked_on(
    fedloom_: Fedloom, finished_run: Path, tests_of_a_client: Path, tmp_path: Path
) -> None:
    def remark(trained_on: Path, images: Path = tests_of_a_client, name: str = "folder") -> bool:
        """Whether evaluate says that a run on these images was trained on them."""
        (finished_run / "config.toml").write_text(f"[data]\nname = {json.dumps(name)}\nfolder = {json.dumps(str(trained_on))}\n")
        outcome = fedloom_("evaluate", finished_run, images, "--json")
        assert outcome.code == 0 and json.loads(outcome.out)
        return "holds images that this run trained on" in outcome.err

    assert remark(tests_of_a_client) and remark(tests_of_a_client.parent, name="sites")
    assert not remark(tmp_path / "others") and not remark(tests_of_a_client, name="digits")
    shutil.copytree(tests_of_a_client, tmp_path / "both" / "test")
    (tmp_path / "both" / "train").mkdir()
    assert not remark(tmp_path / "both", tmp_path / "both")  # of these two, test/ is judged, which nothing was trained on


def test_files_that_hold_no_image_are_named_in_plain_words(fedloom_: Fedloom, finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "page.png").write_text("<html>")
    check_refused(fedloom_("predict", model_of(finished_run), tmp_path / "page.png"), InvalidData, "page.png (it holds no PNG, JPEG, WEBP")
