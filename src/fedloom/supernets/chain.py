"""Supernets whose networks are chains of pieces, so that networks that begin alike are scored without computing that twice."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.spaces.base import Cost
from fedloom.supernets.base import Region, Space, Supernet, Weights
from fedloom.supernets.normalisation import Statistics


class Link(Protocol):
    """What a piece of a chain says about itself, besides being hashable."""

    @property
    def gives(self) -> int: ...  # numbers of one image that it hands on

    @property
    def cost(self) -> Cost: ...


class Chain(Supernet[Space]):
    """Says ``pieces``, ``piece_regions`` and ``run_piece``; the regions and the computation of a network follow."""

    in_groups = True

    def __init__(self, space: Space) -> None:
        super().__init__(space)
        # Asked for at every training step. One cache per supernet.
        self.piece_regions = lru_cache(maxsize=4096)(self.piece_regions)  # type: ignore[method-assign]

    @abstractmethod
    def pieces(self, architecture: Architecture) -> tuple[Any, ...]: ...

    @abstractmethod
    def piece_regions(self, piece: Any) -> Mapping[str, Region]: ...

    @abstractmethod
    def run_piece(self, piece: Any, x: Tensor, weights: Weights, statistics: Statistics | None = None) -> Tensor: ...

    def piece_cost(self, piece: Link) -> Cost:
        return piece.cost

    def piece_gives(self, piece: Link) -> int:
        return piece.gives

    def regions(self, architecture: Architecture) -> Mapping[str, Region]:
        found: dict[str, Region] = {}
        for piece in self.pieces(architecture):
            found |= self.piece_regions(piece)
        return found

    def forward(self, images: Tensor, weights: Weights, architecture: Architecture, statistics: Statistics | None = None) -> Tensor:
        x = images
        for piece in self.pieces(architecture):
            x = self.run_piece(piece, x, weights, statistics)
        return x
