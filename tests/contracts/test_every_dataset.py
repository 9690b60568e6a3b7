"""What every data set promises. A new entry of DATASETS needs a tiny sample of its layout here, and no other test."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedloom.core.errors import InvalidData
from fedloom.data.readers import DATASETS, Dataset, DataSettings, read

CLASSES = ("ant", "bee", "cow")


def put_pickle(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))


def put_image(path: Path, side: int, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (value, value, 255 - value)).save(path)


def cifar10(folder: Path) -> None:
    put_pickle(folder / "batches.meta", {"label_names": [f"class {number}" for number in range(10)]})
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        put_pickle(folder / name, {"data": np.ones((10, 3072), np.uint8), "labels": [*range(10)]})


def cifar100(folder: Path) -> None:
    put_pickle(folder / "meta", {"fine_label_names": [f"class {number}" for number in range(100)]})
    for name in ("train", "test"):
        put_pickle(folder / name, {"data": np.ones((100, 3072), np.uint8), "fine_labels": [*range(100)]})


def cinic10(folder: Path) -> None:
    for part in ("train", "valid", "test"):
        for number, name in enumerate(CLASSES):
            put_image(folder / part / name / "one.png", 32, 50 * number)


def tinyimagenet(folder: Path) -> None:
    for number, name in enumerate(CLASSES):
        put_image(folder / "train" / name / "images" / "one.JPEG", 64, 50 * number)
        put_image(folder / "val" / "images" / f"val_{number}.JPEG", 64, 50 * number)
    lines = [f"val_{number}.JPEG\t{name}\t0\t0\t9\t9\n" for number, name in enumerate(CLASSES)]
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))


def folder(folder: Path) -> None:
    for number, name in enumerate(CLASSES):
        for image in range(5):
            put_image(folder / name / f"{image}.png", 20, 50 * number + image)


def sites(place: Path) -> None:
    for member in ("north", "south"):
        folder(place / member)


SAMPLES: dict[str, Callable[[Path], None]] = {
    "digits": lambda folder: None,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cinic10": cinic10,
    "tinyimagenet": tinyimagenet,
    "folder": folder,
    "sites": sites,
}


@pytest.fixture(params=sorted(DATASETS))
def name(request: pytest.FixtureRequest) -> str:
    assert request.param in SAMPLES, f"add a tiny sample of {request.param} to SAMPLES"
    return str(request.param)


def read_sample(name: str, place: Path) -> Dataset:
    SAMPLES[name](place / DATASETS[name].make.place)
    return read(DataSettings(name, str(place)))


def test_shapes_types_and_ranges(name: str, tmp_path: Path) -> None:
    data = read_sample(name, tmp_path)
    assert data.name == name
    assert len(set(data.classes)) == len(data.classes) >= 2
    assert all(isinstance(one, str) and one for one in data.classes)
    assert data.train.images.shape[1:] == data.test.images.shape[1:]
    for pool in (data.train, data.test):
        assert pool.images.dtype == np.uint8 and pool.images.ndim == 4
        assert pool.labels.dtype == np.int64 and pool.labels.shape == (len(pool.images),)
        assert len(pool) == len(pool.images) > 0
        assert set(pool.labels) == set(range(len(data.classes)))
        assert pool.images.flags.writeable and pool.images.flags.c_contiguous  # so that torch can share them


def test_constants_fit_the_channels(name: str, tmp_path: Path) -> None:
    data = read_sample(name, tmp_path)
    assert len(data.mean) == len(data.std) == data.train.images.shape[1]
    assert all(0 < value < 1 for value in (*data.mean, *data.std))


def test_reading_twice_gives_the_same(name: str, tmp_path: Path) -> None:
    one, two = read_sample(name, tmp_path), read(DataSettings(name, str(tmp_path)))
    for first, second in ((one.train, two.train), (one.test, two.test)):
        assert np.array_equal(first.images, second.images)
        assert np.array_equal(first.labels, second.labels)


def test_an_empty_place_is_refused_with_its_name(name: str, tmp_path: Path) -> None:
    if name == "digits":
        pytest.skip("embedded: reads nothing from disk")
    (tmp_path / DATASETS[name].make.place).mkdir(exist_ok=True)
    with pytest.raises(InvalidData, match=DATASETS[name].make.place or tmp_path.name):
        read(DataSettings(name, str(tmp_path)))


def test_the_table_explains_itself(name: str) -> None:
    assert DATASETS[name].meaning
    assert name in next(field for field in fields(DataSettings) if field.name == "name").metadata["choices"]
