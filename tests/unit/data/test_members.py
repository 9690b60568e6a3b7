"""Images that lie with their members."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.data.members import blank, classes_of_members, read_member, read_members, unlabelled
from fedloom.data.readers import DataSettings, Member, read
from fedloom.data.splits import SplitSettings, held_out, make_split
from support.federation import write_images


def test_a_member_need_not_have_every_class(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cat": 2, "owl": 3})
    write_images(tmp_path / "test", {"dog": 1, "owl": 1})
    train, test = read_member(tmp_path, ("cat", "dog", "owl"), 8)
    assert train.labels.tolist() == [0, 0, 2, 2, 2] and test.labels.tolist() == [1, 2] and train.images.shape == (5, 3, 8, 8)


def test_without_test_images_a_share_is_set_aside(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 10, "owl": 5})
    train, test = read_member(tmp_path, ("cat", "dog", "owl"), 8)
    assert sorted(test.labels.tolist()) == [0, 0, 2] and len(train) == 12
    again = read_member(tmp_path, ("cat", "dog", "owl"), 8)[1]
    assert np.array_equal(test.images, again.images)


def test_a_member_with_a_class_that_the_federation_has_not(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 2, "cats": 2})
    with pytest.raises(InvalidData, match=r"has a class 'cats', which the federation has not \(cat, dog\)\. Rename or move it"):
        read_member(tmp_path, ("cat", "dog"), 8)


@pytest.mark.parametrize("part", ["train", "test"])
def test_one_of_train_and_test(tmp_path: Path, part: str) -> None:
    write_images(tmp_path / part, {"cat": 2})
    with pytest.raises(InvalidData, match=r"must hold train/ and test/, and has one of them\. Have both, or"):
        read_member(tmp_path, ("cat", "dog"), 8)


def test_members_without_images(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="at least 1; found 0"):
        read_member(tmp_path, ("cat", "dog"), 8)
    with pytest.raises(InvalidData, match="is missing"):
        read_member(tmp_path / "none", ("cat", "dog"), 8)
    (tmp_path / "cat").mkdir()
    with pytest.raises(InvalidData, match="holds no image"):
        read_member(tmp_path, ("cat", "dog"), 8)
    (tmp_path / "cat" / "torn.png").write_bytes(b"\x89PNG")
    with pytest.raises(InvalidData, match=r"cat/torn\.png cannot be read as an image"):
        read_member(tmp_path, ("cat", "dog"), 8)


def test_all_members_together(tmp_path: Path) -> None:
    write_images(tmp_path / "b", {"owl": 10})
    write_images(tmp_path / "a" / "train", {"cat": 4})
    write_images(tmp_path / "a" / "test", {"dog": 2})
    (tmp_path / ".hidden").mkdir()
    dataset = read_members(tmp_path, 8)
    assert dataset.classes == classes_of_members(tmp_path) == ("cat", "dog", "owl")
    assert dataset.members == (Member("a", 4, 2), Member("b", 8, 2))
    assert dataset.train.labels.tolist() == [0] * 4 + [2] * 8 and dataset.test.labels.tolist() == [1, 1, 2, 2]
    assert read(DataSettings("sites", str(tmp_path), 8)).members == dataset.members
    with pytest.raises(InvalidData, match="must hold a folder for every member"):
        read_members(tmp_path / ".hidden", 8)


def test_members_with_one_class_between_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_images(tmp_path / name, {"cat": 5})
    with pytest.raises(InvalidData, match=r"have one class between them, 'cat', and at least 2 are needed\. Add a folder"):
        read_members(tmp_path, 8)
    write_images(tmp_path / "b", {"dog": 5})
    assert read_members(tmp_path, 8).classes == ("cat", "dog")


def test_what_a_server_knows_of_images(tmp_path: Path) -> None:
    known = blank(("a", "b"), 16)
    assert known.classes == ("a", "b") and known.train.images.shape == (0, 3, 16, 16) and len(known.test) == 0
    write_images(tmp_path, {"any": 3})
    assert unlabelled(tmp_path / "any", 8).shape == (3, 3, 8, 8)
    with pytest.raises(InvalidData, match="any is a folder inside a folder of images"):
        unlabelled(tmp_path, 8)
    (tmp_path / "none").mkdir()
    with pytest.raises(InvalidData, match="holds no image for the server"):
        unlabelled(tmp_path / "none", 8)


LABELS = np.tile(np.arange(5), 6)


def test_members_keep_their_images() -> None:
    settings = SplitSettings(rule="members", validation=0.2)
    split = make_split(settings, LABELS, LABELS[:5], 2, 3, [Member("a", 10, 2), Member("b", 20, 3)])
    for client, (first, last) in enumerate([(0, 10), (10, 30)]):
        train, validation = split.part("train", client), split.part("validation", client)
        assert sorted([*train, *validation]) == list(range(first, last))
        fit, select = held_out(settings, LABELS[first:last], 3, client)  # as the site itself divides them
        assert np.array_equal(train, first + fit) and np.array_equal(validation, first + select)
    assert split.part("test", 0).tolist() == [0, 1] and split.part("test", 1).tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    "changes, clients, members, said",
    [
        ({}, 3, 2, "clients is 3, but there are 2 members. Set clients=2"),
        ({"rule": "iid"}, 2, 2, "data.name=sites and split.rule=members go together"),
        ({}, 2, 0, "data.name=sites and split.rule=members go together"),
        ({"test": 0.2}, 2, 2, "Set split.test=0 and split.server=0"),
        ({"server": 0.2}, 2, 2, "Set split.test=0 and split.server=0"),
    ],
)
def test_what_does_not_go_with_members(changes: dict[str, Any], clients: int, members: int, said: str) -> None:
    own = [Member("a", 10, 2), Member("b", 20, 3)][:members]
    with pytest.raises(InvalidConfig, match=said):
        make_split(replace(SplitSettings(rule="members"), **changes), LABELS, LABELS[:5], clients, 0, own)


def test_a_member_with_too_little(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="it needs"):
        make_split(SplitSettings(rule="members"), LABELS, LABELS[:5], 2, 0, [Member("a", 1, 2), Member("b", 29, 3)])
