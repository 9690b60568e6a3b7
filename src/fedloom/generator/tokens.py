"""Architectures as the generator sees them: a table of genes and symbols.

Every gene with more than one choice is a row. Its symbols are its choices and, where the gene may lose its effect, one more for
"absent": the network must learn which blocks go together, and a row says so instead of repeating choice 0. Genes that sit at the
same place of a stage (kernel and expansion of a block) share a token of the network, so that attention runs over blocks.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.spaces.base import Gene, SearchSpace

Choices = npt.NDArray[np.int64]  # (architectures, genes of the space)
PROBES = 2000  # architectures that show which genes may lose their effect


class Tokens:
    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.genes = np.flatnonzero(space.sizes > 1)  # rows: genes of the space that decide something
        active = space.active_many(space.sample_many(rng("tokens", space.name), PROBES))
        self.may_be_absent = ~np.all(active, axis=0, keepdims=True)[0, self.genes]  # (rows,)
        sizes = space.sizes[self.genes]
        self.symbols = int(sizes.max()) + bool(self.may_be_absent.any())
        numbers = np.arange(self.symbols)
        allowed = numbers < sizes[:, None]
        allowed[:, -1] |= self.may_be_absent  # "absent" is the last symbol of all
        self.mask = torch.from_numpy(allowed)  # (rows, symbols) which symbols a row has
        self.choice_mask = torch.from_numpy(numbers < sizes[:, None])  # without "absent"

    def __len__(self) -> int:
        return len(self.genes)

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """(stage, place) of every row."""
        return [(self.space.genes[gene].stage, self.space.genes[gene].place) for gene in self.genes]

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """(stage, place) of every token of the network, in order of first appearance."""
        return list(dict.fromkeys(self.places))

    @cached_property
    def slots(self) -> Tensor:
        """(blocks, slots) the rows that share a token; ``len(self)`` where there is none."""
        rows: list[list[int]] = [[row for row, place in enumerate(self.places) if place == block] for block in self.blocks]
        widest = max(map(len, rows))
        return torch.tensor([row + [len(self)] * (widest - len(row)) for row in rows])

    @cached_property
    def follows(self) -> Tensor:
        """(rows, rows) the directed graph of genes: column j acts on what row i made."""
        return torch.from_numpy(self.space.follows[np.ix_(self.genes, self.genes)])

    @property
    def signature(self) -> dict[str, Any]:
        """What a generator must agree on with a space to serve it. Of values their order only: settings of a space scale them."""

        def order(gene: Gene) -> list[Any]:
            return [*gene.labels] or np.argsort(np.argsort(gene.values, kind="stable"), kind="stable").tolist()

        genes = [[gene.name, *order(gene)] for gene in self.space.genes]
        return {"space": self.space.name, "choices": [int(size) for size in self.space.sizes], "genes": genes}

    @cached_property
    def random(self) -> Tensor:
        """(256, rows, symbols) shares of random architectures, always the same: what gains are measured against."""
        return self.shares(self.encode(self.space.sample_many(rng("random architectures", self.space.name), 256)))

    # -- architectures to symbols and back -----------------------------------------
    def encode(self, choices: Choices) -> Tensor:
        """(n, genes) canonical choices -> (n, rows) symbols."""
        active = self.space.active_many(choices)[:, self.genes]
        return torch.from_numpy(np.where(active, choices[:, self.genes], self.symbols - 1))

    def one_hot(self, symbols: Tensor) -> Tensor:
        """(n, rows) symbols -> (n, rows, symbols), +1 for the symbol, -1 for the others, 0 where a row has no such symbol."""
        chosen = symbols[..., None] == torch.arange(self.symbols, device=symbols.device)
        return torch.where(chosen, 1.0, -1.0) * self.mask.to(symbols.device)

    def shares(self, symbols: Tensor) -> Tensor:
        """(n, rows) symbols -> (n, rows, symbols), 1 for the symbol, 0 for the others: a belief that is certain."""
        return self.one_hot(symbols).gt(0).float()

    def decode(self, x: Tensor) -> Choices:
        """(n, rows, symbols) any numbers, larger is likelier -> (n, genes) canonical choices: valid by construction.

        A gene takes its likeliest choice and loses it again if the other genes leave it without effect.
        """
        best = x.masked_fill(~self.choice_mask.to(x.device), -torch.inf).argmax(-1)
        choices = np.zeros((len(x), len(self.space.genes)), np.int64)
        choices[:, self.genes] = best.cpu().numpy()
        return self.space.canonical_many(choices)

    def architectures(self, choices: Choices) -> list[Architecture]:
        return [Architecture(self.space.name, tuple(row)) for row in choices.tolist()]
