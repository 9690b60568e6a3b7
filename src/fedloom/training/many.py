"""Logits of many networks at once, for GPUs, whatever the supernet: a chain by its pieces, others as they say (``Supernet.many``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.supernets.base import Supernet, Weights
from fedloom.supernets.chain import Chain
from fedloom.training import prefixes
from fedloom.training.peak import allowed_bytes
from fedloom.training.prefixes import Groups, Network

GPU_SHARE = 0.25  # of a GPU's memory, for what networks have computed


def groups(supernet: Supernet[Any], weights: Mapping[int, Weights], parts: Mapping[int, Sequence[Tensor]], rows: int) -> Groups:
    return (Groups if isinstance(supernet, Chain) else Whole)(supernet, weights, parts, rows)


class Whole(Groups):
    """Networks that are one piece each: their supernet runs them together."""

    def run(self, networks: Sequence[Network]) -> Iterator[tuple[list[Network], Tensor]]:
        """Those of one client next to each other, and so those that have much in common."""
        clients = sorted(self.row, key=lambda client: self.row[client])
        parts = [torch.stack(some) for some in zip(*(self.parts[client] for client in clients), strict=True)]
        weights = {name: weight[None] for name, weight in self.weights.items()} if self.shared else self.weights
        first = parts[0][0]
        room = GPU_SHARE * allowed_bytes(first.device) if first.is_cuda else prefixes.HELD_BYTES
        most = room / (first.element_size() * len(first))
        waiting = [sorted(networks, key=lambda network: (self.row[network.client], network.pieces[0].choices))]  # type: ignore[attr-defined]
        while waiting:
            some = waiting.pop()
            walk = self.supernet.many([(self.row[network.client], network.pieces[0]) for network in some], weights)  # type: ignore[misc]
            if len(some) > 1 and walk.held > most:
                waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
                continue
            logits = [walk.run(part, 0 if number else self.rows) for number, part in enumerate(parts)]
            yield some, torch.cat([logits[0][:, self.rows :], *logits[1:]], 1)
