"""Splits and the federation cut from them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from fedloom import config
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.data.readers import Dataset, Pool
from fedloom.data.splits import PARTS, RULES, Federation, Split, SplitSettings, make_split, reserved, server_images
from fedloom.maths.partition import class_counts

DRAWN = [rule for rule in RULES if rule != "members"]  # that rule divides nothing

TRAIN = np.repeat(np.arange(5), 80)
TEST = np.repeat(np.arange(5), 20)
SMALL = {"size": 40, "test_size": 20}


def split_of(rule: str, clients: int = 8, seed: int = 0, **changes: Any) -> Split:
    return make_split(SplitSettings(rule=rule, **{**SMALL, **changes}), TRAIN, TEST, clients, seed)


@pytest.mark.parametrize("rule", DRAWN)
def test_every_rule_gives_every_client_enough_and_leaks_nothing(rule: str) -> None:
    split = split_of(rule)
    assert split.clients == 8
    assert split.train.dtype == split.validation.dtype == split.test.dtype == np.int32
    for client in range(8):
        train, validation, test = (split.part(which, client) for which in PARTS)
        assert len(train) >= 2 and len(validation) >= 1 and len(test) >= 1
        assert not set(train) & set(validation)
        assert set(TRAIN[validation]) <= set(TRAIN[train])
    if rule != "plato":
        both = np.concatenate([split.train, split.validation])
        assert len(np.unique(both)) == len(both)
        assert len(np.unique(split.test)) == len(split.test)


# -- tests from a client's own share --------------------------------------------------------------------
def test_spiders_split_is_60_20_20_of_the_training_images_alone() -> None:
    settings = config.load("spider-cifar10")
    labels = np.repeat(np.arange(10), 5000)
    split = make_split(settings.split, labels, np.repeat(np.arange(10), 1000), settings.clients, settings.seed)
    assert split.own_tests and split.clients == 8
    assert sum(len(getattr(split, part)) for part in PARTS) == 50_000
    assert len(np.unique(np.concatenate([split.train, split.validation, split.test]))) == 50_000
    for client in range(8):
        sizes = np.array([len(split.part(part, client)) for part in PARTS])
        assert np.abs(sizes / sizes.sum() - [0.6, 0.2, 0.2]).max() < 2 / sizes.sum()
        shares = class_counts([split.part(part, client) for part in PARTS], labels, 10) / sizes[:, None]
        assert np.abs(shares - shares[0]).max() < 10 / sizes[1]  # the same classes everywhere


@pytest.mark.parametrize("rule", [rule for rule in DRAWN if rule != "plato"])
def test_own_tests_are_images_that_nobody_trains_on(rule: str) -> None:
    split = split_of(rule, test=0.2)
    every = np.concatenate([split.train, split.validation, split.test])
    assert len(np.unique(every)) == len(every)
    assert Split.from_arrays(split.to_arrays(), own_tests=True).own_tests
    twice = {**split.to_arrays(), "test": np.concatenate([split.train[:1], split.test[1:]])}
    with pytest.raises(InvalidData, match="one image twice in train, validation and test"):
        Split.from_arrays(twice, own_tests=True)


@pytest.mark.parametrize("rule", [rule for rule in DRAWN if rule != "plato"])
def test_own_tests_and_the_servers_images_are_apart(rule: str) -> None:
    split = split_of(rule, test=0.2, server=0.1)
    every = np.concatenate([split.train, split.validation, split.test])
    kept = reserved(SplitSettings(server=0.1), len(TRAIN), 0)
    assert len(np.unique(every)) == len(every) and len(kept) and not np.isin(every, kept).any()
    for client in range(split.clients):  # the labels are those of the images that were meant
        classes = [set(TRAIN[split.part(part, client)].tolist()) for part in ("train", "test")]
        assert classes[1] <= classes[0] | set(TRAIN[split.part("validation", client)].tolist())


def test_own_tests_are_cut_from_the_training_pool() -> None:
    def pool(labels: np.ndarray, shade: int) -> Pool:
        return Pool(np.full((len(labels), 1, 2, 2), shade, np.uint8), labels)

    dataset = Dataset("two shades", tuple("abcde"), pool(TRAIN, 1), pool(TEST, 2), (0.5,), (0.5,))
    for share, shade in ((0.2, 1), (0.0, 2)):
        data = Federation(dataset, split_of("label", test=share), "cpu").data_of("client-003")
        assert data.test.images.unique().tolist() == [shade] and data.train.images.unique().tolist() == [1]


def test_own_tests_and_overlapping_clients_do_not_go_together() -> None:
    with pytest.raises(InvalidConfig, match=r"plato .* Set split\.test=0"):
        split_of("plato", test=0.2)


@pytest.mark.parametrize("rule", DRAWN)
def test_the_seed_decides_everything(rule: str) -> None:
    one, two, other = (split_of(rule, seed=seed).to_arrays() for seed in (3, 3, 4))
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert not np.array_equal(one["train"], other["train"])


@pytest.mark.parametrize("rule", ["label", "client", "plato", "shards"])
def test_test_images_follow_the_clients_own_classes(rule: str) -> None:
    split = split_of(rule, alpha=0.5)
    own = [np.concatenate([split.part("train", client), split.part("validation", client)]) for client in range(8)]
    trained = class_counts(own, TRAIN, 5) / np.array([[len(part)] for part in own])
    tests = [split.part("test", client) for client in range(8)]
    tested = class_counts(tests, TEST, 5) / np.array([[len(part)] for part in tests])
    assert abs(trained - tested).sum(axis=1).mean() / 2 < 0.2  # total variation distance


def test_plato_clients_do_not_depend_on_how_many_there_are() -> None:
    few, many = split_of("plato", clients=2), split_of("plato", clients=9)
    for which in PARTS:
        assert np.array_equal(few.part(which, 1), many.part(which, 1))


def test_plato_sizes() -> None:
    split = split_of("plato", alpha=100.0)
    assert np.diff(split.train_offsets).tolist() == [36] * 8
    assert np.diff(split.validation_offsets).tolist() == [4] * 8
    assert np.diff(split.test_offsets).tolist() == [20] * 8


def test_apart_nobody_trains_on_validation_images() -> None:
    usual, apart = split_of("plato"), split_of("plato", apart=True)
    assert set(usual.train) & set(usual.validation) and not set(apart.train) & set(apart.validation)
    assert np.array_equal(usual.test, apart.test)
    assert np.diff(apart.train_offsets).tolist() == [36] * 8 and np.diff(apart.validation_offsets).tolist() == [4] * 8
    for client in range(8):  # by the same proportions
        counts = [np.bincount(labels[apart.part(which, client)], minlength=5) for which, labels in (("train", TRAIN), ("test", TEST))]
        assert np.corrcoef(*counts)[0, 1] > 0.7
    with pytest.raises(InvalidConfig, match=r"share no images.*Set split\.apart=false"):
        split_of("label", apart=True)


def test_nobody_is_left_without_a_test_image() -> None:
    # 12 test images for 9 clients of very different sizes.
    split = make_split(SplitSettings(rule="label", alpha=0.5, minimum=3), TRAIN, np.array([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]), 9, 1)
    assert np.diff(split.test_offsets).min() == 1
    assert len(np.unique(split.test)) == len(split.test)


@pytest.mark.parametrize(
    ("rule", "clients", "changes", "words"),
    [
        ("iid", 134, {}, "fewer clients"),
        ("iid", 0, {}, "at least one client"),
        ("label", 50, {}, "fewer clients"),
        ("label", 20, {"alpha": 0.001}, "Raise split.alpha, or lower clients or split.minimum"),
        ("iid", 101, {}, "fewer clients"),
        ("plato", 4, {"size": 2}, "needs 2"),
    ],
)
def test_impossible_splits_name_the_cure(rule: str, clients: int, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidData, match=words):
        split_of(rule, clients=clients, **changes)


def test_an_unknown_rule_gets_a_hint() -> None:
    with pytest.raises(InvalidConfig, match="Did you mean 'label'"):
        split_of("labels")


def test_arrays_bring_a_split_back() -> None:
    split = split_of("label")
    back = Split.from_arrays(split.to_arrays())
    assert back.clients == 8
    assert all(np.array_equal(value, back.to_arrays()[name]) for name, value in split.to_arrays().items())
    assert back.train.dtype == np.int32 and back.train_offsets.dtype == np.int64


def damage(change: str) -> dict[str, Any]:
    arrays: dict[str, Any] = {name: value.copy() for name, value in split_of("label").to_arrays().items()}
    if change == "missing":
        del arrays["test"]
    elif change == "extra":
        arrays["labels"] = TRAIN
    elif change == "float":
        arrays["train"] = arrays["train"].astype(np.float32)
    elif change == "two rows":
        arrays["train"] = arrays["train"][None]
    elif change == "negative":
        arrays["train"][0] = -1
    elif change == "huge":
        arrays["train"] = arrays["train"].astype(np.int64) + 2**31
    elif change == "falling offsets":
        arrays["train_offsets"][1] = arrays["train_offsets"][2] + 1
    elif change == "no offsets":
        arrays["train_offsets"] = arrays["train_offsets"][:0]
    elif change == "cut short":
        arrays["test"] = arrays["test"][:-1]
    elif change == "fewer clients":
        arrays["test_offsets"] = np.delete(arrays["test_offsets"], 1)
    elif change == "leak":
        arrays["validation"][0] = arrays["train"][0]
    return arrays


CHANGES = [
    "missing", "extra", "float", "two rows", "negative", "huge", "falling offsets", "no offsets", "cut short", "fewer clients", "leak",
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_damaged_arrays_are_refused(change: str) -> None:
    with pytest.raises(InvalidData):
        Split.from_arrays(damage(change))


@pytest.mark.parametrize(("which", "client"), [("train", 8), ("train", -1), ("labels", 0)])
def test_parts_that_do_not_exist(which: str, client: int) -> None:
    with pytest.raises(InvalidData):
        split_of("iid").part(which, client)


def dataset() -> Dataset:
    images = np.arange(len(TRAIN) * 4, dtype=np.int64).astype(np.uint8).reshape(-1, 1, 2, 2)
    return Dataset("toy", tuple("abcde"), Pool(images, TRAIN), Pool(images[: len(TEST)] + 7, TEST), (0.5,), (0.25,))


def test_federation_hands_out_the_clients_own_tensors() -> None:
    data, split = dataset(), split_of("client")
    federation = Federation(data, split, "cpu")
    assert federation.names[0] == "client-000" and federation.names[-1] == "client-007"
    mine = federation.data_of("client-003")
    for which, pool in (("train", data.train), ("validation", data.train), ("test", data.test)):
        examples = getattr(mine, which)
        positions = split.part(which, 3)
        assert examples.images.dtype == torch.uint8 and examples.labels.dtype == torch.int64
        assert np.array_equal(examples.images.numpy(), pool.images[positions])
        assert np.array_equal(examples.labels.numpy(), pool.labels[positions])


def test_client_names_are_as_wide_as_needed() -> None:
    ones = np.arange(10_001, dtype=np.int32), np.arange(10_002, dtype=np.int64)
    labels = np.zeros(10_001, np.int64)
    pool = Pool(np.zeros((10_001, 1, 1, 1), np.uint8), labels)
    split = Split(*ones, *ones, *ones)
    federation = Federation(Dataset("toy", ("a",), pool, pool, (0.5,), (0.5,)), split, "cpu")
    assert federation.names[0] == "client-00000" and federation.names[-1] == "client-10000"
    assert federation.names == sorted(federation.names)


def test_federation_refuses_strangers_and_foreign_splits() -> None:
    federation = Federation(dataset(), split_of("iid"), "cpu")
    with pytest.raises(InvalidData, match="client-000 to client-007"):
        federation.data_of("client-008")
    small = Dataset("toy", tuple("abcde"), Pool(dataset().train.images[:9], TRAIN[:9]), dataset().test, (0.5,), (0.25,))
    with pytest.raises(InvalidData, match="another data set"):
        Federation(small, split_of("iid"), "cpu")


def test_federation_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match="stays at its client"):
        pickle.dumps(Federation(dataset(), split_of("iid"), "cpu"))


# -- the server's images ------------------------------------------------------------------------
@pytest.mark.parametrize("rule", DRAWN)
def test_the_servers_images_are_nobody_elses(rule: str) -> None:
    settings = SplitSettings(rule=rule, server=0.25, **SMALL)
    own = reserved(settings, len(TRAIN), seed=3)
    split = split_of(rule, seed=3, server=0.25)
    assert len(own) == len(np.unique(own)) == 100 and own.min() >= 0 and own.max() < len(TRAIN)
    assert not set(own) & {*split.train, *split.validation}
    if rule in ("label", "shards", "iid"):  # which leave none over
        assert {*own, *split.train, *split.validation} == set(range(len(TRAIN)))
    for client in range(8):
        assert set(TRAIN[split.part("validation", client)]) <= set(TRAIN[split.part("train", client)])
    assert not np.array_equal(own, reserved(settings, len(TRAIN), seed=4))


@pytest.mark.parametrize("rule", DRAWN)
def test_a_server_without_images_changes_nothing(rule: str) -> None:
    """The draws of a split do not move when none are kept back."""
    assert len(reserved(SplitSettings(rule=rule), len(TRAIN), 0)) == 0
    usual, same = split_of(rule).to_arrays(), split_of(rule, server=0.0).to_arrays()
    assert all(np.array_equal(usual[name], same[name]) for name in usual)


def test_the_server_gets_images_and_no_labels() -> None:
    images = np.arange(400 * 4, dtype=np.uint8).reshape(400, 1, 2, 2)
    dataset = Dataset("toy", ("0", "1", "2", "3", "4"), Pool(images, TRAIN), Pool(images[:100], TEST), (0.5,), (0.5,))
    settings = SplitSettings(server=0.1)
    held = server_images(settings, dataset, 0, torch.device("cpu"))
    assert len(held) == 40 and np.array_equal(held.images.numpy(), images[reserved(settings, 400, 0)])
    assert not hasattr(held, "labels")
