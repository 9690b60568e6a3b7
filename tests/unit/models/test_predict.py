"""What a model sees in images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.core.errors import InvalidData
from fedloom.data.readers import DataSettings, read
from fedloom.models.predict import read_image
from support.checks import Fedloom, check_refused
from support.exported import small_model


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
