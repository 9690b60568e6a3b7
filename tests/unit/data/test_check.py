"""Images looked over before a run: every bad file in one go."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.core.errors import InvalidData
from fedloom.data.check import Checked, check_images
from fedloom.data.images import class_name, confused
from fedloom.data.members import read_member, read_members
from fedloom.data.readers import DataSettings, read

NFC, NFD = (unicodedata.normalize(form, "bösartig") for form in ("NFC", "NFD"))


def noise(path: Path, seed: int, side: int = 24, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(path, **options)  # type: ignore[arg-type]
    return path


def good(place: Path, seed: int = 0, classes: tuple[str, ...] = ("cat", "dog"), each: int = 6) -> Path:
    for number, name in enumerate(classes):
        for count in range(each):
            noise(place / name / f"{count}.png", seed + 100 * number + count)
    return place


def found(checked: Checked) -> set[tuple[str, str]]:
    """Kind and file name of every finding."""
    return {(finding.kind, Path(finding.place).name) for finding in checked.findings}


def test_twenty_kinds_of_bad_files_are_named_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, cats = good(tmp_path / "pictures"), tmp_path / "pictures" / "cat"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5_000)
    (cats / "empty.png").touch()
    (cats / "text.jpg").write_text("no image at all")
    torn = noise(cats / "torn.png", 50)
    torn.write_bytes(torn.read_bytes()[:300])
    cut = noise(cats / "cut.jpg", 51, side=60)
    cut.write_bytes(cut.read_bytes()[:-400])
    flipped = bytearray(noise(cats / "flipped.png", 52).read_bytes())
    flipped[60] ^= 0xFF
    (cats / "flipped.png").write_bytes(flipped)
    web = noise(cats / "web.webp", 53)
    web.write_bytes(web.read_bytes()[:40])
    noise(cats / "really-bmp.png", 54, format="BMP")
    noise(cats / "large.png", 55, side=80)
    noise(cats / "larger.png", 56, side=120)
    (cats / "link.png").symlink_to(tmp_path / "nowhere.png")
    os.mkfifo(cats / "pipe.png")
    for ending in ("bmp", "gif", "tiff"):
        noise(cats / f"photo.{ending}", 57)
    for ending in ("heic", "avif", "dcm", "svg"):
        (cats / f"scan.{ending}").write_bytes(b"of another program")
    noise(cats / "kittens" / "0.png", 58)
    (place / "owl").mkdir()
    good(place, 1000, ("Dog",))
    checked = check_images(place, 8)
    kinds = {
        ("empty file", "empty.png"),
        ("no image", "text.jpg"),
        ("truncated", "torn.png"),
        ("truncated", "cut.jpg"),
        ("damaged", "flipped.png"),
        ("damaged", "web.webp"),
        ("wrong ending", "really-bmp.png"),
        ("huge image", "large.png"),
        ("huge image", "larger.png"),
        ("broken link", "link.png"),
        ("not readable", "pipe.png"),
        (".bmp file", "photo.bmp"),
        (".gif file", "photo.gif"),
        (".tiff file", "photo.tiff"),
        (".heic file", "scan.heic"),
        (".avif file", "scan.avif"),
        (".dcm file", "scan.dcm"),
        (".svg file", "scan.svg"),
        ("a folder", "kittens"),
        ("empty class", "owl"),
        ("class names", "pictures"),
    }
    assert {(finding.kind, Path(finding.place).name) for finding in checked.problems} == kinds and len(kinds) > 20
    assert all(finding.place in finding.what and "\n" not in finding.what for finding in checked.problems)
    assert checked.counts[""]["all"] == {"cat": 6, "dog": 6, "Dog": 6, "owl": 0}


def test_what_a_run_would_do_with_odd_images_is_said(tmp_path: Path) -> None:
    place = good(tmp_path, classes=("cat", "dog"))
    cats = place / "cat"
    frames = [Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24, 24, 3), np.uint8)) for seed in (70, 71)]
    frames[0].save(cats / "moving.webp", save_all=True, append_images=frames[1:], lossless=True)
    noise(cats / "tiny.png", 72, side=5)
    Image.fromarray(np.random.default_rng(73).integers(0, 256, (20, 90, 3), np.uint8)).save(cats / "narrow.png")
    Image.fromarray(np.random.default_rng(74).integers(0, 256, (20, 20, 4), np.uint8)).save(cats / "clear.png")
    Image.new("RGB", (20, 20), (9, 9, 9)).save(cats / "blank.png")
    Image.new("RGB", (20, 20), (9, 9, 9)).save(place / "dog" / "blank.png")  # no copy of the other: there is nothing in it
    Image.fromarray(np.random.default_rng(75).integers(0, 4000, (20, 20)).astype(np.uint16)).save(cats / "scan.png")
    (cats / "Thumbs.db").touch()
    noise(place / "stray.jpg", 76)
    (place / "dog" / "copy.png").write_bytes((place / "dog" / "0.png").read_bytes())
    (place / "dog" / "mislabelled.png").write_bytes((cats / "0.png").read_bytes())
    good(place, 500, ("owl",), each=2)
    checked = check_images(place, 16)
    remarks = {("animated", "moving.webp"), ("small", "tiny.png"), ("narrow", "narrow.png"), ("transparent", "clear.png")}
    remarks |= {("blank", "blank.png"), ("dark", "scan.png"), ("not an image", "Thumbs.db"), ("outside", "stray.jpg")}
    remarks |= {("twice", "0.png"), ("two classes", "0.png"), ("few", "owl")}
    assert found(checked) == remarks and checked.problems == []


def test_copies_between_sites_and_between_training_and_test(tmp_path: Path) -> None:
    for seed, site in ((0, "north"), (40, "south")):
        for part in ("train", "test"):
            good(tmp_path / site / part, seed + 10 * (part == "test"), each=4)
    shared = (tmp_path / "north" / "train" / "cat" / "0.png").read_bytes()
    (tmp_path / "south" / "train" / "cat" / "theirs.png").write_bytes(shared)
    leaked = (tmp_path / "south" / "train" / "dog" / "1.png").read_bytes()
    (tmp_path / "south" / "test" / "dog" / "leaked.png").write_bytes(leaked)
    checked = check_images(tmp_path, 8)
    assert checked.layout == "sites" and checked.problems == []
    assert found(checked) == {("two sites", "0.png"), ("train and test", "1.png")}
    assert checked.counts["south"]["test"] == {"cat": 4, "dog": 5}


@pytest.mark.parametrize("layout", ["auto", "folder", "sites", "site"])
def test_layouts(tmp_path: Path, layout: str) -> None:
    good(tmp_path / "train")
    good(tmp_path / "test", 50, ("cat",))
    problems = {finding.kind for finding in check_images(tmp_path, 8, layout).problems}
    assert problems == ({"one-sided class"} if layout in ("auto", "folder") else set())


def test_folders_that_hold_too_little(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="is no folder"):
        check_images(tmp_path / "none", 8)
    assert {finding.kind for finding in check_images(tmp_path, 8).problems} == {"no classes"}
    good(tmp_path / "train", classes=("cat",), each=2)
    assert {finding.kind for finding in check_images(tmp_path, 8).problems} == {"half a split", "one class", "too few"}


# -- names ------------------------------------------------------------------------------
def test_both_unicode_forms_of_a_name_are_one_class(tmp_path: Path) -> None:
    assert NFC != NFD and class_name(NFD) == NFC
    good(tmp_path / "north", classes=(NFC, "x"))
    good(tmp_path / "south", 300, classes=(NFD, "x"))
    assert read_members(tmp_path, 8).classes == (NFC, "x")
    assert len(read_member(tmp_path / "south", (NFC, "x"), 8)[0]) == 10
    assert check_images(tmp_path, 8).problems == [] and check_images(tmp_path, 8).classes == (NFC, "x")
    assert read(DataSettings("folder", str(tmp_path / "south"), 8)).classes == (NFC, "x")


@pytest.mark.parametrize(("one", "other"), [("Cat", "cat"), ("cat ", "cat"), ("ﬁn", "fin")])
def test_names_that_a_person_takes_for_one_are_refused(tmp_path: Path, one: str, other: str) -> None:
    assert confused([one, other, "dog"]) == [tuple(sorted((one, other)))]
    good(tmp_path / "north", classes=(one, "x"))
    good(tmp_path / "south", 300, classes=(other, "x"))
    for refused in (lambda: read_members(tmp_path, 8), lambda: read_member(tmp_path / "north", (other, "x"), 8)):
        with pytest.raises(InvalidData, match="differ in case, spaces or Unicode form only"):
            refused()
    assert [finding.kind for finding in check_images(tmp_path, 8).problems] == ["class names"]


def test_both_unicode_forms_in_one_folder_are_refused_and_can_be_told_apart(tmp_path: Path) -> None:
    good(tmp_path, classes=(NFC, NFD))
    with pytest.raises(InvalidData, match=r"'bo\\u0308sartig' and 'b\\xf6sartig'"):
        read(DataSettings("folder", str(tmp_path), 8))
    assert "class names" in {finding.kind for finding in check_images(tmp_path, 8).problems}


# -- 16 bits ----------------------------------------------------------------------------
def test_images_of_16_bits_keep_their_greys(tmp_path: Path) -> None:
    good(tmp_path / "train")
    good(tmp_path / "test", 50)
    ramp = np.repeat(np.linspace(0, 65_535, 8).astype(np.uint16)[None], 8, 0)  # a clipped one would be white from the second pixel on
    Image.fromarray(ramp).save(tmp_path / "test" / "cat" / "0.png")
    seen = read(DataSettings("folder", str(tmp_path), 8)).test.images[0]
    assert np.array_equal(seen, np.repeat((ramp >> 8).astype(np.uint8)[None], 3, 0))
    assert check_images(tmp_path, 8).problems == []
