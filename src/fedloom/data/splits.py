"""Who holds which images: the division of a data set among clients, and the clients' own tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedloom.core.client_site import ClientData, Examples, Private
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.core.registry import did_you_mean
from fedloom.core.seeds import rng
from fedloom.core.server_site import ServerImages
from fedloom.core.settings import setting
from fedloom.data.readers import Dataset, Labels, Member
from fedloom.maths import partition
from fedloom.maths.partition import Positions

PARTS = ("train", "validation", "test")
MORE_EACH = "Lower clients, raise split.alpha or use more data"
RULES = ("label", "client", "plato", "shards", "iid", "members")


@dataclass(frozen=True)
class SplitSettings:
    """How the data set is divided among the clients."""

    rule: str = setting(
        "label",
        "label: Dir(alpha) over clients for each class, disjoint; client: Dir(alpha) over classes for each client, disjoint, equal sizes; "
        "plato: like client, but clients overlap; shards: a few classes each; iid: uniform; members: the folders of data.name=sites",
        choices=RULES,
    )
    alpha: float = setting(0.3, "label, client, plato: Dirichlet concentration; smaller: clients differ more", low=0.001)
    test: float = setting(
        0.0, "share of a client's images from the training pool that become its test images; 0: use the test pool", low=0, high=0.5
    )
    validation: float = setting(0.1, "share of a client's training images kept for selection", low=0.01, high=0.5)
    minimum: int = setting(10, "label: fewest training images of a client, validation included", low=3)
    size: int = setting(600, "plato: training images per client, validation included", low=3)
    test_size: int = setting(600, "plato: test images per client", low=1)
    apart: bool = setting(False, "plato: validation images come from a part of the training pool that no client trains on")
    shards: int = setting(2, "shards: shards per client", low=1)
    server: float = setting(0.0, "share of the training images that the server gets, without labels; no client has them", low=0, high=0.5)


@dataclass(frozen=True, eq=False)
class Split:
    """Positions in the training pool (train, validation) and the test pool (test), all clients in one flat array each.

    With ``own_tests`` test images come from the training pool too: they are images a client did not train on.
    """

    train: npt.NDArray[np.int32]
    train_offsets: Positions  # (clients + 1,): client c owns train[offsets[c]:offsets[c + 1]]
    validation: npt.NDArray[np.int32]
    validation_offsets: Positions
    test: npt.NDArray[np.int32]
    test_offsets: Positions
    own_tests: bool = False

    @property
    def clients(self) -> int:
        return len(self.train_offsets) - 1

    def part(self, which: str, client: int) -> npt.NDArray[np.int32]:
        """One client's positions; ``which`` is train, validation or test."""
        if which not in PARTS or not 0 <= client < self.clients:
            raise InvalidData(f"A split of {self.clients} clients has no part {which!r} of client {client}", part=which, client=client)
        offsets = getattr(self, f"{which}_offsets")
        return getattr(self, which)[offsets[client] : offsets[client + 1]]

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: getattr(self, name) for part in PARTS for name in (part, f"{part}_offsets")}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], own_tests: bool = False) -> Split:
        """The split that ``to_arrays`` described; checks everything that can be checked without the data set. Settings know own_tests."""
        expected = {name for part in PARTS for name in (part, f"{part}_offsets")}
        if set(arrays) != expected:
            odd = ", ".join(sorted(set(arrays) ^ expected))
            raise InvalidData(f"A saved split must hold exactly {', '.join(sorted(expected))}; {odd} differs", arrays=odd)
        for name in sorted(expected):
            if not isinstance(arrays[name], np.ndarray) or arrays[name].ndim != 1 or arrays[name].dtype.kind not in "iu":
                raise InvalidData(f"Damaged split: {name} must be one row of whole numbers", array=name)
        for part in PARTS:
            _check_part(part, arrays[part], arrays[f"{part}_offsets"])
        if len({len(arrays[f"{part}_offsets"]) for part in PARTS}) != 1:
            raise InvalidData("Damaged split: train, validation and test are for different numbers of clients")
        typed: dict[str, Any] = {name: arrays[name].astype(np.int64 if name.endswith("_offsets") else np.int32) for name in expected}
        split = cls(**typed, own_tests=own_tests)
        train, validation, test = (_owned(getattr(split, part), getattr(split, f"{part}_offsets")) for part in PARTS)
        pools = [("train and validation", np.concatenate([train, validation])), ("test", test)]
        if own_tests:
            pools = [("train, validation and test", np.concatenate([train, validation, test]))]
        for part, owned in pools:
            if len(np.unique(owned)) != len(owned):
                raise InvalidData(f"Damaged split: a client holds one image twice in {part}", part=part)
        return split


def reserved(settings: SplitSettings, images: int, seed: int) -> Positions:
    """Positions of the server's images among so many training images: drawn by chance, whatever their classes."""
    return np.sort(rng(seed, "split", "server").permutation(images)[: round(settings.server * images)]).astype(np.int64)


def server_images(settings: SplitSettings, dataset: Dataset, seed: int, device: torch.device) -> ServerImages | None:
    """Its own images, or its share of the training images; nothing if it has neither."""
    if dataset.server is None and not settings.server:
        return None
    own = dataset.train.images[reserved(settings, len(dataset.train), seed)] if dataset.server is None else dataset.server
    return ServerImages(torch.from_numpy(own).to(device))


def make_split(
    settings: SplitSettings, train_labels: Labels, test_labels: Labels, clients: int, seed: int, members: Sequence[Member] = ()
) -> Split:
    """Divide the pools. Every client gets at least two training, one validation and one test image, or the split is refused.

    Under ``plato`` a client's images depend on the seed and its number, not on how many clients there are. members: whose the images
    are already, for the rule of that name.
    """
    if settings.rule not in RULES:
        raise InvalidConfig(f"There is no split rule {settings.rule!r}. {did_you_mean(settings.rule, list(RULES))}", rule=settings.rule)
    if members or settings.rule == "members":
        _check_members(settings, members, clients)
    if clients < 1:
        raise InvalidData(f"A federation needs at least one client, got {clients}", clients=clients)
    pool = np.setdiff1d(np.arange(len(train_labels)), reserved(settings, len(train_labels), seed))
    train_labels = train_labels[pool]
    disjoint = settings.rule != "plato"
    if settings.test and not disjoint:
        raise InvalidConfig("Under split.rule=plato a client's test images would be others' training images. Set split.test=0", key="split")
    if settings.apart and disjoint:
        what = f"Under split.rule={settings.rule} clients share no images, so validation images are apart already"
        raise InvalidConfig(f"{what}. Set split.apart=false", key="split.apart")
    if not members and (len(train_labels) < (3 * clients if disjoint else 3) or len(test_labels) < (clients if disjoint else 1)):
        there = f"there are {len(train_labels)} and {len(test_labels)}. Use fewer clients or more data"
        raise InvalidData(f"{clients} clients need at least 3 training images and 1 test image each; {there}", clients=clients)
    if members:
        owned, tests = (_in_turn([getattr(member, part) for member in members]) for part in ("train", "test"))
    elif settings.test:
        owned, own_tests = _own_tests(settings, train_labels, _disjoint(settings, train_labels, clients, seed), seed)
        tests = [pool[own] for own in own_tests]
    elif disjoint:
        owned = _disjoint(settings, train_labels, clients, seed)
        tests = partition.matching_test(owned, train_labels, test_labels, rng(seed, "split", "test"), at_least=1)
    else:
        owned, tests = _overlapping(settings, train_labels, test_labels, clients, seed)
    if settings.apart:
        divided = _apart(settings, train_labels, max(train_labels.max(), test_labels.max()) + 1, clients, seed)
    else:
        divided = [[own[some] for some in held_out(settings, train_labels[own], seed, client)] for client, own in enumerate(owned)]
    trains, validations = ([pool[part] for part in some] for some in zip(*divided, strict=True))
    for which, parts, least in (("training", trains, 2), ("validation", validations, 1), ("test", tests, 1)):
        sizes = np.array([len(part) for part in parts])
        if sizes.min() < least:
            few = int(sizes.argmin())
            who = members[few].name if members else f"Client {few} of {clients}"
            cure = "Add images to its folder: without a folder test/ four are enough" if members else MORE_EACH
            raise InvalidData(f"{who} would have {sizes[few]} {which} images, it needs {least}. {cure}", client=few, part=which)
    return Split(*_flat(trains), *_flat(validations), *_flat(tests), own_tests=settings.test > 0)


def held_out(settings: SplitSettings, labels: Labels, seed: int, client: int) -> tuple[Positions, Positions]:
    """Of a client's training images: those it trains on and those that select."""
    return partition.stratified_holdout(labels, settings.validation, rng(seed, "split", "validation", client))


def _check_members(settings: SplitSettings, members: Sequence[Member], clients: int) -> None:
    if settings.rule != "members" or not members:
        raise InvalidConfig("data.name=sites and split.rule=members go together: there, images belong to members already", key="split.rule")
    if clients != len(members):
        raise InvalidConfig(f"clients is {clients}, but there are {len(members)} members. Set clients={len(members)}", key="clients")
    if settings.test or settings.server:
        what = "With members, test images are in their folders and the server's in data.server. Set split.test=0 and split.server=0"
        raise InvalidConfig(what, key="split")


def _in_turn(sizes: Sequence[int]) -> list[Positions]:
    """Positions of parts of these sizes that lie one after the other."""
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _own_tests(settings: SplitSettings, labels: Labels, owned: Sequence[Positions], seed: int) -> tuple[list[Positions], list[Positions]]:
    """What is left of every client's images, and its test images: about the same share of each of its classes."""
    parts = [partition.stratified_holdout(labels[own], settings.test, rng(seed, "split", "own test", c)) for c, own in enumerate(owned)]
    left, held_out = zip(*parts, strict=True)
    return [own[some] for own, some in zip(owned, left, strict=True)], [own[some] for own, some in zip(owned, held_out, strict=True)]


def _disjoint(settings: SplitSettings, labels: Labels, clients: int, seed: int) -> list[Positions]:
    draws = rng(seed, "split", settings.rule)
    if settings.rule == "label":
        return partition.by_label(labels, clients, settings.alpha, draws, minimum=settings.minimum)
    if settings.rule == "client":
        return partition.by_client(labels, clients, settings.alpha, draws)
    if settings.rule == "shards":
        return partition.shards(labels, clients, settings.shards, draws)
    return partition.iid(labels, clients, draws)


def _overlapping(
    settings: SplitSettings, train_labels: Labels, test_labels: Labels, clients: int, seed: int
) -> tuple[list[Positions], list[Positions]]:
    for name, size, pool in (("size", settings.size, train_labels), ("test_size", settings.test_size, test_labels)):
        if size > len(pool) / 2:
            what = f"split.{name} is {size}, more than half of the {len(pool)} images there are"
            raise InvalidData(f"{what}: clients would hold nearly the same. Lower it", setting=f"split.{name}")
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    trains, tests = [], []
    for client in range(clients):
        draws = rng(seed, "split", "plato", client)
        row = partition.proportions(1, classes, settings.alpha, draws)[0]
        trains.append(partition.plato(train_labels, row, settings.size, draws))
        tests.append(partition.plato(test_labels, row, settings.test_size, draws))
    return trains, tests


def _apart(settings: SplitSettings, labels: Labels, classes: int, clients: int, seed: int) -> list[list[Positions]]:
    """Every client's training and validation images, each from a part of the pool, by the class proportions that its test images have."""
    parts = partition.stratified_holdout(labels, settings.validation, rng(seed, "split", "apart"))
    held, drawn = round(settings.validation * settings.size), []
    for client in range(clients):
        draws = rng(seed, "split", "plato", client)
        row = partition.proportions(1, classes, settings.alpha, draws)[0]
        sizes = zip(parts, (settings.size - held, held), strict=True)
        drawn.append([part[partition.plato(labels[part], row, size, draws)] for part, size in sizes])
    return drawn


def _flat(parts: Sequence[Positions]) -> tuple[npt.NDArray[np.int32], Positions]:
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    return np.concatenate(parts).astype(np.int32), offsets


def _check_part(name: str, positions: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> None:
    sizes = np.diff(offsets.astype(np.int64))
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(positions) or sizes.min() < 1:
        raise InvalidData(f"Damaged split: {name}_offsets must rise from 0 to {len(positions)}, at least one image per client", part=name)
    if positions.min() < 0 or positions.max() > np.iinfo(np.int32).max:
        raise InvalidData(f"Damaged split: {name} holds positions that are not in any pool", part=name)


def _owned(positions: npt.NDArray[np.int32], offsets: Positions) -> Positions:
    """One number per (client, position)."""
    return (np.repeat(np.arange(len(offsets) - 1, dtype=np.int64), np.diff(offsets)) << 32) + positions


class Federation(Private):
    """All clients of a simulation: the pools lie on the device once, a client's tensors are cut from them when asked for."""

    def __init__(self, dataset: Dataset, split: Split, device: torch.device | str) -> None:
        tested = dataset.train if split.own_tests else dataset.test
        for part, pool in (("train", dataset.train), ("validation", dataset.train), ("test", tested)):
            if getattr(split, part).max() >= len(pool):
                what = f"its {part} part goes up to image {getattr(split, part).max()}, {dataset.name} has {len(pool)}"
                raise InvalidData(f"The split was made for another data set: {what}", part=part)
        self.dataset = dataset
        self.split = split
        self.device = torch.device(device)
        self.names = client_names(dataset, split.clients)
        self._number_of = {name: client for client, name in enumerate(self.names)}
        train = _on_device(dataset.train.images, dataset.train.labels, self.device)
        test = train if split.own_tests else _on_device(dataset.test.images, dataset.test.labels, self.device)
        self._pools = {"train": train, "validation": train, "test": test}

    @property
    def images(self) -> dict[str, tuple[int, int]]:
        """client -> how many training and test images it has."""
        return {
            name: (len(self.split.part("train", client)), len(self.split.part("test", client))) for name, client in self._number_of.items()
        }

    @property
    def one_class(self) -> tuple[str, ...]:
        """Clients whose test images are all of one class."""
        labels = (self.dataset.train if self.split.own_tests else self.dataset.test).labels
        own = {name: labels[self.split.part("test", client)] for name, client in self._number_of.items()}
        return tuple(name for name, tests in own.items() if tests.min() == tests.max())

    def data_of(self, name: str) -> ClientData:
        """A client's own examples, copied out of the pools."""
        if name not in self._number_of:
            raise InvalidData(f"There is no client {name!r}; the names run from {self.names[0]} to {self.names[-1]}", client=name)
        client = self._number_of[name]
        train, validation, test = (self._cut(part, client) for part in PARTS)
        return ClientData(train, validation, test)

    def _cut(self, part: str, client: int) -> Examples:
        pool = self._pools[part]
        positions = torch.from_numpy(self.split.part(part, client).astype(np.int64)).to(self.device)
        return Examples(pool.images[positions], pool.labels[positions])


def client_names(dataset: Dataset, clients: int) -> list[str]:
    """Of members, or numbered."""
    width = max(3, len(str(clients - 1)))
    return [member.name for member in dataset.members] or [f"client-{client:0{width}d}" for client in range(clients)]


def _on_device(images: npt.NDArray[np.uint8], labels: Labels, device: torch.device) -> Examples:
    return Examples(torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device))
