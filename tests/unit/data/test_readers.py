"""Readers on tiny data sets written in the published layouts, whole and damaged."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.data import readers
from fedloom.data.readers import Dataset, DataSettings, read


def read_from(name: str, folder: Path, image_size: int = 8) -> Dataset:
    return read(DataSettings(name, str(folder), image_size))


def write_pickle(path: Path, content: Any, old_numpy: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = pickle.dumps(content, protocol=2)
    new, old = b"numpy._core.multiarray", b"numpy.core.multiarray"
    path.write_bytes(data.replace(new, old) if old_numpy else data.replace(old, new))


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def write_cifar10(folder: Path, old_numpy: bool = False) -> Path:
    place = folder / "cifar-10-batches-py"
    write_pickle(place / "batches.meta", {b"label_names": [b"class %d" % number for number in range(10)]})
    for number, name in enumerate([*(f"data_batch_{batch}" for batch in range(1, 6)), "test_batch"]):
        write_pickle(place / name, {b"data": rows(4, number), b"labels": [number, 0, 1, 9], b"batch_label": b"x"}, old_numpy)
    return place


def write_cifar100(folder: Path) -> Path:
    place = folder / "cifar-100-python"
    write_pickle(place / "meta", {"fine_label_names": [f"fine {number}" for number in range(100)], "coarse_label_names": []})
    for name in ("train", "test"):
        write_pickle(place / name, {"data": rows(3), "fine_labels": [0, 50, 99], "coarse_labels": [0, 1, 2]})
    return place


def write_image(path: Path, colour: Sequence[int] | int = (200, 100, 50), side: int | tuple[int, int] = 32, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (side, side) if isinstance(side, int) else side, colour if isinstance(colour, int) else tuple(colour)).save(path)


def write_classes(place: Path, classes: Sequence[str] = ("cat", "dog"), each: int = 5, side: int = 12) -> None:
    for number, name in enumerate(classes):
        for image in range(each):
            write_image(place / name / f"{image}.png", (100 * number, image, 7), side)


# -- CIFAR ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old_numpy", [False, True])
def test_cifar10(tmp_path: Path, old_numpy: bool) -> None:
    write_cifar10(tmp_path, old_numpy)
    data = read_from("cifar10", tmp_path)
    assert data.classes[:2] == ("class 0", "class 1") and len(data.classes) == 10
    assert data.train.images.shape == (20, 3, 32, 32) and data.test.images.shape == (4, 3, 32, 32)
    assert data.train.labels.tolist() == [label for number in range(5) for label in (number, 0, 1, 9)]
    # A row is 1024 red, then 1024 green, then 1024 blue values, line by line.
    assert data.train.images[4, 2, 3, 5] == rows(4, 1)[0, 2 * 1024 + 3 * 32 + 5]


def test_cifar100_has_fine_labels(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    data = read_from("cifar100", tmp_path)
    assert len(data.classes) == 100 and data.classes[99] == "fine 99"
    assert data.train.labels.tolist() == data.test.labels.tolist() == [0, 50, 99]


class Payload:
    def __init__(self, act: Any, *arguments: Any) -> None:
        self.act, self.arguments = act, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.act, self.arguments


@pytest.mark.parametrize("act", ["system", "eval", "import"])
def test_a_pickle_that_acts_is_refused_and_nothing_runs(tmp_path: Path, act: str) -> None:
    place, trace = write_cifar10(tmp_path), tmp_path / "trace"
    payload = {
        "system": Payload(os.system, f"touch {trace}"),
        "eval": Payload(eval, f"open({str(trace)!r}, 'w')"),
        "import": Payload(__import__, "this"),
    }[act]
    write_pickle(place / "data_batch_3", {b"data": payload})
    with pytest.raises(InvalidData, match=r"data_batch_3.*which no such data set needs"):
        read_from("cifar10", tmp_path)
    assert not trace.exists()


def test_no_codec_but_latin1_is_served(tmp_path: Path) -> None:
    import codecs

    place = write_cifar10(tmp_path)
    write_pickle(place / "test_batch", {b"data": Payload(codecs.encode, "aaaa", "rot13")})
    with pytest.raises(InvalidData, match=r"test_batch.*encoding"):
        read_from("cifar10", tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 100, 5000])
def test_a_truncated_cifar_file_is_named(tmp_path: Path, keep: int) -> None:
    path = write_cifar10(tmp_path) / "data_batch_2"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InvalidData, match=r"data_batch_2.*again"):
        read_from("cifar10", tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {1: 2},
        {b"labels": [0]},
        {b"data": rows(2)[:, :3071], b"labels": [0, 1]},
        {b"data": rows(2).astype(np.float64), b"labels": [0, 1]},
        {b"data": rows(2)[0], b"labels": [0]},
        {b"data": rows(0), b"labels": []},
        {b"data": rows(2), b"labels": [0]},
        {b"data": rows(2), b"labels": [0, 0.5]},
        {b"data": rows(2), b"labels": [0, 10]},
        {b"data": rows(2), b"labels": [-1, 0]},
        {b"data": rows(2), b"fine_labels": [0, 0]},
    ],
)
def test_wrong_contents_are_named(tmp_path: Path, content: Any) -> None:
    write_pickle(write_cifar10(tmp_path) / "data_batch_5", content)
    with pytest.raises(InvalidData, match="data_batch_5"):
        read_from("cifar10", tmp_path)


def test_a_missing_cifar_file_is_named(tmp_path: Path) -> None:
    (write_cifar10(tmp_path) / "test_batch").unlink()
    with pytest.raises(InvalidData, match="test_batch"):
        read_from("cifar10", tmp_path)


def test_class_names_must_be_complete(tmp_path: Path) -> None:
    write_pickle(write_cifar100(tmp_path) / "meta", {"fine_label_names": ["apple"]})
    with pytest.raises(InvalidData, match="meta must hold 100"):
        read_from("cifar100", tmp_path)


# -- image folders --------------------------------------------------------------------------------------


def test_cinic10_leaves_the_valid_part_alone(tmp_path: Path) -> None:
    for part, each in (("train", 3), ("valid", 2), ("test", 1)):
        write_classes(tmp_path / "CINIC-10" / part, ("bird", "ant"), each, side=32)
    write_image(tmp_path / "CINIC-10/train/ant/grey.png", 9, 32, mode="L")
    data = read_from("cinic10", tmp_path)
    assert data.classes == ("ant", "bird")
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1] and data.test.labels.tolist() == [0, 1]
    assert data.train.images[3, :, 0, 0].tolist() == [9, 9, 9]
    assert data.test.images[0, :, 0, 0].tolist() == [100, 0, 7]  # red, green, blue of the second class written


def test_published_image_sizes_are_checked(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_classes(tmp_path / "CINIC-10" / part, side=32)
    write_image(tmp_path / "CINIC-10/test/dog/odd.png", side=31)
    with pytest.raises(InvalidData, match=r"odd\.png must be 32 x 32 pixels, is 31 x 31"):
        read_from("cinic10", tmp_path)


def write_tinyimagenet(folder: Path) -> Path:
    place = folder / "tiny-imagenet-200"
    for number, name in enumerate(("n02", "n01")):
        for image in range(2):
            write_image(place / "train" / name / "images" / f"{name}_{image}.JPEG", (90 * number,) * 3, 64)
        write_image(place / "val" / "images" / f"val_{number}.JPEG", (90 * number,) * 3, 64)
    (place / "wnids.txt").write_text("n09\nn02\nn01\n")  # order and content differ: must not matter
    (place / "val" / "val_annotations.txt").write_text("val_1.JPEG\tn01\t0\t0\t9\t9\nval_0.JPEG\tn02\t0\t0\t9\t9\n")
    return place


def test_tinyimagenet_takes_classes_from_its_folders(tmp_path: Path) -> None:
    write_tinyimagenet(tmp_path)
    data = read_from("tinyimagenet", tmp_path)
    assert data.classes == ("n01", "n02")
    assert data.train.labels.tolist() == [0, 0, 1, 1] and data.test.labels.tolist() == [0, 1]
    assert data.test.images[:, 0, 0, 0].tolist() == data.train.images[[0, 2], 0, 0, 0].tolist() == [90, 0]


@pytest.mark.parametrize("text", ["val_0.JPEG\tn77\t0\t0\t9\t9\n", "val_0.JPEG\n", "../../x.JPEG\tn01\t0\n", "", None])
def test_tinyimagenet_annotations_are_checked(tmp_path: Path, text: str | None) -> None:
    annotations = write_tinyimagenet(tmp_path) / "val" / "val_annotations.txt"
    if text is None:
        annotations.unlink()
    else:
        annotations.write_text(text)
    with pytest.raises(InvalidData, match="val_annotations"):
        read_from("tinyimagenet", tmp_path)


def test_folder_without_test_sets_a_fifth_aside(tmp_path: Path) -> None:
    write_classes(tmp_path, each=10)
    (tmp_path / "notes.txt").write_text("not a class")
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    data = read_from("folder", tmp_path)
    assert data.classes == ("cat", "dog")
    assert data.train.images.shape == (16, 3, 8, 8) and data.test.images.shape == (4, 3, 8, 8)
    assert np.bincount(data.test.labels).tolist() == [2, 2]
    again = read_from("folder", tmp_path)
    assert np.array_equal(data.test.images, again.test.images)


def test_folder_with_train_and_test(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", each=3)
    write_classes(tmp_path / "test", each=2)
    data = read_from("folder", tmp_path)
    assert data.classes == ("cat", "dog")
    assert (len(data.train), len(data.test)) == (6, 4)
    (tmp_path / "test" / "fox").mkdir()
    with pytest.raises(InvalidData, match="'fox' is in one of them only"):
        read_from("folder", tmp_path)


def test_folder_takes_every_kind_of_image(tmp_path: Path) -> None:
    write_classes(tmp_path, ("other",), each=2)
    write_image(tmp_path / "mine/a.JPG", side=(500, 300))
    write_image(tmp_path / "mine/b.jpeg", side=5)
    write_image(tmp_path / "mine/c.webp", side=16)
    write_image(tmp_path / "mine/d.png", (200, 100, 50, 128), mode="RGBA")
    write_image(tmp_path / "mine/e.png", 1, mode="1")
    data = read_from("folder", tmp_path, 16)
    images = np.concatenate([data.train.images, data.test.images])
    labels = np.concatenate([data.train.labels, data.test.labels])
    assert images.shape == (7, 3, 16, 16)
    colours = sorted(image[:, 8, 8].tolist() for image in images[labels == 0])
    assert np.allclose(colours[:4], [[200, 100, 50]] * 4, atol=4) and colours[4] == [255, 255, 255]


@pytest.mark.parametrize("name", ["late.bmp", "late.GIF", "late.tif", "late.heic"])
def test_an_image_that_is_not_read_is_named(tmp_path: Path, name: str) -> None:
    write_classes(tmp_path)
    (tmp_path / "dog" / name).touch()
    with pytest.raises(InvalidData, match=rf"dog.{name} is an image of a kind that is not read \(\.png, .*Save it as one of these"):
        read_from("folder", tmp_path)


def test_a_folder_inside_a_class_is_named(tmp_path: Path) -> None:
    write_classes(tmp_path)
    write_image(tmp_path / "dog/puppies/0.png")
    with pytest.raises(InvalidData, match=r"dog.puppies is a folder inside a folder of images.*Move its images up or remove it"):
        read_from("folder", tmp_path)


def test_files_that_are_no_images_are_passed_over(tmp_path: Path) -> None:
    write_classes(tmp_path)
    before = read_from("folder", tmp_path)
    for name in ("notes.txt", ".DS_Store", "Thumbs.db", ".hidden.bmp"):
        (tmp_path / "dog" / name).touch()
    (tmp_path / "dog" / ".thumbnails").mkdir()
    after = read_from("folder", tmp_path)
    assert np.array_equal(after.train.images, before.train.images) and np.array_equal(after.test.images, before.test.images)


def test_a_photograph_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    write_classes(tmp_path / "train")
    write_classes(tmp_path / "test", each=1)
    picture = Image.new("RGB", (16, 16))
    picture.paste((255, 255, 255), (0, 0, 16, 8))  # white above black
    exif = Image.Exif()
    exif[274] = 3  # orientation: upside down
    picture.save(tmp_path / "test" / "cat" / "0.png", exif=exif)
    top_down = read_from("folder", tmp_path).test.images[0, 0, :, 0]
    assert top_down[0] < 50 < 200 < top_down[-1]


@pytest.mark.parametrize("damage", ["garbage", "truncated", "empty", "other format"])
def test_a_corrupt_image_is_named(tmp_path: Path, damage: str) -> None:
    write_classes(tmp_path, each=2)
    bad = tmp_path / "dog" / "bad.png"
    noise = Image.fromarray(rows(1).reshape(32, 32, 3))
    if damage == "garbage":
        bad.write_bytes(b"not an image at all")
    elif damage == "truncated":
        noise.save(bad)
        bad.write_bytes(bad.read_bytes()[:500])
    elif damage == "empty":
        bad.touch()
    else:
        noise.save(bad, format="GIF")
    with pytest.raises(InvalidData, match=r"dog.bad\.png"):
        read_from("folder", tmp_path)


@pytest.mark.parametrize("limit", [100, 40])  # 12 x 12 = 144 pixels: a warning above the limit, an error above twice the limit
def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    write_classes(tmp_path, each=2, side=12)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(InvalidData, match=r"0\.png.*decompression bomb"):
        read_from("folder", tmp_path)


def test_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="at least 2; found 0"):
        read_from("folder", tmp_path)
    write_classes(tmp_path)
    (tmp_path / "bird").mkdir()
    with pytest.raises(InvalidData, match="bird holds no image"):
        read_from("folder", tmp_path)


# -- embedded, and the table ----------------------------------------------------------------------------


def test_digits() -> None:
    data = read(DataSettings())
    assert data.train.images.shape == (1198, 1, 8, 8) and data.test.images.shape == (599, 1, 8, 8)
    assert data.train.images.min() == 0 and data.train.images.max() == 255
    scaled = np.concatenate([data.train.images, data.test.images]) / 255
    assert (scaled.mean(), scaled.std()) == pytest.approx((data.mean[0], data.std[0]), abs=1e-3)


def test_digits_are_those_of_scikit_learn_wherever_it_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    data, found = load_digits(), readers.digits_file()
    assert np.array_equal(found, np.column_stack([data.data, data.target]))
    monkeypatch.setattr(readers, "find_spec", lambda name: None)
    elsewhere = readers.digits_file.__wrapped__()
    assert elsewhere.dtype == found.dtype and np.array_equal(elsewhere, found)


@pytest.mark.parametrize("name", [name for name in readers.DATASETS if name != "digits"])
def test_a_missing_set_says_where_to_put_it(tmp_path: Path, name: str) -> None:
    source = readers.DATASETS[name].make
    with pytest.raises(InvalidData) as caught:
        read_from(name, tmp_path / "nowhere")
    assert str(tmp_path / "nowhere" / source.place) in str(caught.value)
    assert source.archive in str(caught.value)


def test_an_unknown_set_gets_a_hint() -> None:
    with pytest.raises(InvalidConfig, match="Did you mean 'cifar10'"):
        read(DataSettings("cifar1"))
