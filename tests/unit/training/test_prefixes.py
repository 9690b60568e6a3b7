"""Trees of networks by hand: a piece is a digit, and a network writes its digits one after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.supernets.elastic import Statistics
from fedloom.training import prefixes
from fedloom.training.prefixes import Groups, Network, grow, nodes_below, one_by_one, trees

CHAINS = [(1, 2, 3), (1, 2, 4), (1, 3), (2, 3), (1, 2, 3), (2, 1, 2, 3)]
ROWS = 1


class Digits:
    """Numbers of all pieces are in one weight. The mean of the first images, which is measured, is added in the last piece, 3 or 4."""

    takes_groups = False

    def __init__(self) -> None:
        self.calls: list[int] = []

    def piece_regions(self, piece: int) -> dict[str, Any]:
        return {"digits": (slice(piece, piece + 1),)}

    def take_piece(self, weights: dict[str, Tensor], piece: int) -> dict[str, Tensor]:
        return {"digits": weights["digits"][piece : piece + 1]}

    def piece_cost(self, piece: int) -> Any:
        return SimpleNamespace(activations=10)

    def piece_gives(self, piece: int) -> int:
        return {1: 5, 2: 3}.get(piece, 1)

    def run_piece(self, piece: int, x: Tensor, weights: dict[str, Tensor], statistics: Statistics) -> Tensor:
        self.calls.append(piece)
        if statistics.rows:
            statistics[f"{piece}"] = (x[: statistics.rows].mean(0), x[: statistics.rows].mean(0))
        return 10 * x + weights["digits"] + (statistics[f"{piece}"][0] if piece > 2 else 0)


def networks_of(chains: list[tuple[int, ...]], client: int = 0) -> list[Network]:
    return [Network(client, place, chain) for place, chain in enumerate(chains)]


def by_hand(chain: tuple[int, ...], x: float, measured: float, factor: int = 1) -> float:
    for piece in chain:
        added = measured if piece > 2 else 0.0
        x, measured = (10 * value + factor * piece + added for value in (x, measured))
    return x


WEIGHTS = {"digits": torch.arange(5.0)}
TWICE = {"digits": 2 * torch.arange(5.0)}


def test_the_tree_by_hand() -> None:
    (root,) = grow(networks_of(CHAINS))
    assert [node.piece for node in nodes_below([root])] == [1, 2, 3, 4, 3, 2, 3, 1, 2, 3]
    assert [network.place for node in nodes_below([root]) for network in node.ends] == [0, 4, 1, 2, 3, 5]


def test_one_by_one_by_hand() -> None:
    digits, images = Digits(), torch.tensor([[1.0], [7.0], [8.0]])
    found = {network.place: logits for network, logits in one_by_one(digits, WEIGHTS, networks_of(CHAINS), images, ROWS)}  # type: ignore[arg-type]
    for place, chain in enumerate(CHAINS):
        assert found[place].flatten().tolist() == [by_hand(chain, x, 1.0) for x in (1.0, 7.0, 8.0)]
    assert len(digits.calls) == 10


@pytest.mark.parametrize("held", [1e9, 1])
@pytest.mark.parametrize("call", [1e9, 1])
def test_groups_by_hand(held: float, call: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients with weights of their own, further images with the statistics of the first, a piece that comes after itself."""
    monkeypatch.setattr(prefixes, "HELD_BYTES", held)
    monkeypatch.setattr(prefixes, "CALL_BYTES", call)
    chains = [*CHAINS, (1, 1, 2, 3)]
    networks = [*networks_of(chains, 4), *networks_of(chains[2:], 9)]
    parts = {4: [torch.tensor([[1.0], [7.0]]), torch.tensor([[8.0]])], 9: [torch.tensor([[2.0], [5.0]]), torch.tensor([[6.0]])]}
    groups = Groups(Digits(), {4: WEIGHTS, 9: TWICE}, parts, ROWS)  # type: ignore[arg-type]
    found = {network: row for some, logits in groups.run(networks) for network, row in zip(some, logits, strict=True)}
    assert set(found) == set(networks)
    for network in networks:
        first, (x, y), factor = (1.0, (7.0, 8.0), 1) if network.client == 4 else (2.0, (5.0, 6.0), 2)
        assert found[network].flatten().tolist() == [by_hand(network.pieces, value, first, factor) for value in (x, y)]  # type: ignore[arg-type]


def test_a_piece_waits_for_all_that_have_it() -> None:
    """Blocks before it may be more in some networks than in others."""
    digits = Digits()
    for _ in Groups(digits, {0: WEIGHTS}, {0: [torch.ones(3, 1)]}, ROWS).run(networks_of([(1, 3), (1, 2, 3), (2, 3)])):  # type: ignore[arg-type]
        pass
    assert digits.calls == [1, 2, 3]


@pytest.mark.parametrize(("most", "sizes"), [(8, [6]), (7, [3, 1, 2]), (0, [1] * 6)])
def test_trees_that_hold_too_much_are_walked_in_parts(most: int, sizes: list[int]) -> None:
    """Below 1 at most 5 are held: its own output, or 3 + 1 + 1. Below 2 it is 3."""
    chains = [(1, 2, 3), (1, 2, 4), (1, 3), (1, 4), (2, 3), (2, 4)]
    networks = networks_of(chains)
    found = [[network for node in nodes_below(roots) for network in node.ends] for roots in trees(Digits(), networks, most)]  # type: ignore[arg-type]
    assert [len(some) for some in found] == sizes
    assert [network.place for some in found for network in some] == [*range(6)]
