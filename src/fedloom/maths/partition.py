"""How a pool of labelled examples is divided among clients. Every part is an int64 array of positions in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.core.errors import InvalidData

Integers = npt.NDArray[np.integer[Any]]
Positions = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def by_label(
    labels: Integers, clients: int, alpha: float, rng: np.random.Generator, minimum: int = 10, tries: int = 100
) -> list[Positions]:
    """Each class is divided by a draw of Dir(alpha) over the clients; sizes differ, parts are disjoint and cover the pool.

    A client that already holds its even share of the pool gets nothing more. Redrawn until every client has ``minimum``.
    """
    _require(len(labels), clients, minimum)
    _require_positive(alpha)
    stock = np.bincount(labels)
    for _ in range(tries):
        counts = np.zeros((clients, len(stock)), np.int64)
        held = np.zeros(clients, np.int64)
        for label, size in enumerate(stock):
            open_clients = held * clients < len(labels)
            share = rng.dirichlet(np.full(clients, alpha)) * open_clients
            share = share if share.sum() > 0 else open_clients.astype(np.float64)
            cuts = np.cumsum(share)
            cuts = (cuts / cuts[-1] * size).astype(np.int64)  # divided by its own last entry: ends at exactly 1
            counts[:, label] = np.diff(cuts, prepend=0)
            held += counts[:, label]
        if held.min() >= minimum:
            return _deal(labels, counts, rng)
    what = f"No division of {len(labels)} examples among {clients} clients with split.alpha={alpha} gave every client {minimum} examples"
    cure = "Raise split.alpha, or lower clients or split.minimum"
    raise InvalidData(f"{what} in {tries} draws. {cure}", examples=len(labels), clients=clients, alpha=alpha, minimum=minimum)


def by_client(labels: Integers, clients: int, alpha: float, rng: np.random.Generator) -> list[Positions]:
    """Each client draws its classes from its own Dir(alpha); sizes are equal, parts are disjoint (FedDyn, Acar et al., ICLR 2021).

    All clients draw at once; when a class is asked for more often than it has examples, chance decides who gets them and
    the others go on with the classes that remain.
    """
    _require(len(labels), clients, 1)
    stock = np.bincount(labels)
    wishes = proportions(clients, len(stock), alpha, rng)
    counts = np.zeros((clients, len(stock)), np.int64)
    missing = np.full(clients, len(labels) // clients)
    while missing.any():  # every pass empties a class or serves everybody
        weight = wishes * (stock > 0)
        weight = np.where(weight.sum(axis=1, keepdims=True) > 0, weight, stock)  # nothing a client wished for is left
        asked = rng.multinomial(missing, weight / weight.sum(axis=1, keepdims=True))  # (clients, classes)
        for label in np.flatnonzero(asked.sum(axis=0) > stock):
            asked[:, label] = rng.multivariate_hypergeometric(asked[:, label], stock[label])
        counts += asked
        missing = missing - asked.sum(axis=1)
        stock = stock - asked.sum(axis=0)
    return _deal(labels, counts, rng)


def proportions(clients: int, classes: int, alpha: float, rng: np.random.Generator) -> Floats:
    """One draw of Dir(alpha) over the classes per client; (clients, classes), rows sum to 1."""
    _require_positive(alpha)
    return rng.dirichlet(np.full(classes, alpha), size=clients)


def plato(labels: Integers, proportions_row: Floats, size: int, rng: np.random.Generator) -> Positions:
    """One client's sample as in plato: every example weighs what its class weighs; ``size`` draws without replacement.

    Use the same row for the training and the test pool. Clients overlap. When the examples of positive weight are fewer
    than ``size``, the client gets all of them and no more.
    """
    weight = np.take(proportions_row, labels)
    size = min(size, int(np.count_nonzero(weight)))
    # Whoever arrives first in a race of exponential clocks is drawn first: the same law as drawing one by one.
    speed = weight / rng.standard_exponential(len(labels))
    return _largest(speed, size)


def shards(labels: Integers, clients: int, shards_per_client: int, rng: np.random.Generator) -> list[Positions]:
    """Sort by label, cut into equal shards, deal ``shards_per_client`` to each client; disjoint (McMahan et al., 2017)."""
    _require(len(labels), clients, shards_per_client)
    shuffled = rng.permutation(len(labels))
    pieces = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], clients * shards_per_client)
    owners = rng.permutation(len(pieces)).reshape(clients, shards_per_client)
    return [np.concatenate([pieces[piece] for piece in own]).astype(np.int64) for own in owners]


def iid(labels: Integers, clients: int, rng: np.random.Generator) -> list[Positions]:
    """Equal parts (within one example) in random order; disjoint, covers the pool."""
    _require(len(labels), clients, 1)
    return list(np.array_split(rng.permutation(len(labels)).astype(np.int64), clients))


def matching_test(
    train_parts: Sequence[Positions], train_labels: Integers, test_labels: Integers, rng: np.random.Generator, at_least: int = 0
) -> list[Positions]:
    """Divide the test pool so that each client's share of a class is its share of that class's training examples.

    Largest remainders are rounded up, ties by chance; parts are disjoint. A client left with fewer than ``at_least``
    receives further examples of its own classes from the clients that have most.
    """
    classes = int(max(train_labels.max(initial=0), test_labels.max(initial=0))) + 1
    held = class_counts(train_parts, train_labels, classes)
    stock = np.bincount(test_labels, minlength=classes)
    counts = np.zeros_like(held)
    for label in np.flatnonzero((held.sum(axis=0) > 0) & (stock > 0)):
        share = held[:, label] / held[:, label].sum()
        counts[:, label] = _largest_remainder(share * stock[label], int(stock[label]), held[:, label] > 0, rng)
    _top_up(counts, held, at_least)
    return _deal(test_labels, counts, rng)


def stratified_holdout(labels: Integers, share: float, rng: np.random.Generator) -> tuple[Positions, Positions]:
    """Positions of (training, validation); validation has about ``share`` of every class.

    A class with one example stays in training, and no class loses its last. With two examples or more and a positive
    share validation gets at least one: where every class has one example only, a random one of them.
    """
    if not 0 <= share < 1:
        raise InvalidData(f"The share held out must be at least 0 and below 1, got {share}", share=share)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]  # by class, in random order inside a class
    counts = np.bincount(labels)
    take = np.zeros_like(counts)
    if share > 0 and len(labels) >= 2:
        total = max(1, int(share * len(labels) + 0.5))
        take = np.minimum(_largest_remainder(share * counts, total, counts > 1, rng), np.maximum(counts - 1, 0))
        if not take.any():
            take[labels[order[int(rng.integers(len(order)))]]] = 1
    rank = np.arange(len(order)) - (np.cumsum(counts) - counts)[labels[order]]  # place inside the own class
    held_out = rank < take[labels[order]]
    return order[~held_out].astype(np.int64), order[held_out].astype(np.int64)


def class_counts(parts: Sequence[Positions], labels: Integers, classes: int) -> Positions:
    """How many examples of each class each part holds; (parts, classes)."""
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    positions = np.concatenate(parts) if len(parts) else np.empty(0, np.int64)
    flat = np.bincount(owner * classes + labels[positions], minlength=len(parts) * classes)
    return flat.reshape(len(parts), classes).astype(np.int64)


def _deal(labels: Integers, counts: Positions, rng: np.random.Generator) -> list[Positions]:
    """Random disjoint parts with exactly ``counts`` (clients, classes) examples; what is left over belongs to nobody."""
    clients, classes = counts.shape
    positions, owners = [], []
    for label in range(classes):
        owner = np.repeat(np.arange(clients), counts[:, label])
        positions.append(rng.permutation(np.flatnonzero(labels == label))[: len(owner)])
        owners.append(owner)
    flat = np.concatenate(positions)[np.argsort(np.concatenate(owners), kind="stable")].astype(np.int64)
    return list(np.split(flat, np.cumsum(counts.sum(axis=1))[:-1]))


def _largest(values: Floats, count: int) -> Positions:
    """Positions of the ``count`` largest values, in no particular order."""
    if count == 0:
        return np.empty(0, np.int64)
    # A cut guessed from every 16th value leaves few candidates to compare; where it was too high, all are compared.
    sample = values[::16]
    rank = min(len(sample), count // 8 + 16)
    candidates = np.flatnonzero(values >= np.partition(sample, len(sample) - rank)[len(sample) - rank])
    if len(candidates) < count:
        candidates = np.arange(len(values))
    best = np.argpartition(values[candidates], len(candidates) - count)[len(candidates) - count :]
    return candidates[best].astype(np.int64)


def _largest_remainder(
    quotas: npt.NDArray[np.floating[Any]], total: int, eligible: npt.NDArray[np.bool_], rng: np.random.Generator
) -> Positions:
    """Whole numbers near the ``quotas`` that add up to ``total``, or less where too few entries are eligible to be rounded up."""
    whole = np.where(eligible, np.floor(quotas + 1e-9), 0).astype(np.int64)  # 1e-9: 0.1 * 30 is a whole number
    missing = total - int(whole.sum())
    if missing <= 0:
        return whole
    remainder = np.where(eligible, quotas - whole, -np.inf)
    first = np.lexsort((rng.random(len(quotas)), -np.round(remainder, 9)))[: min(missing, int(eligible.sum()))]
    whole[first] += 1
    return whole


def _top_up(counts: Positions, held: Positions, at_least: int) -> None:
    """Move single examples (in place) from the richest owners of a class to clients below ``at_least``."""
    totals = counts.sum(axis=1)
    for client in np.flatnonzero(totals < at_least):
        while totals[client] < at_least:
            for label in np.argsort(-held[client], kind="stable")[: np.count_nonzero(held[client])]:
                wealth = np.where(counts[:, label] > 0, totals, 0)
                wealth[client] = 0
                donor = int(wealth.argmax())
                if wealth[donor] > at_least:
                    counts[donor, label] -= 1
                    counts[client, label] += 1
                    totals[donor] -= 1
                    totals[client] += 1
                    break
            else:
                what = f"The {counts.sum()} test examples cannot give each of {len(counts)} clients {at_least} of its own classes"
                cure = "Lower clients, raise split.alpha or use more test examples"
                raise InvalidData(f"{what}. {cure}", clients=len(counts), client=int(client))


def _require(examples: int, clients: int, each: int) -> None:
    need = clients * max(each, 1)
    if clients < 1:
        raise InvalidData(f"A federation needs at least one client, got {clients}", clients=clients)
    if examples < need:
        what = f"{clients} clients with at least {max(each, 1)} examples each need {need} examples, the pool has {examples}"
        raise InvalidData(f"{what}. Use fewer clients or more data", examples=examples, clients=clients)


def _require_positive(alpha: float) -> None:
    if not alpha > 0:
        raise InvalidData(f"alpha must be above 0, got {alpha}", alpha=alpha)
