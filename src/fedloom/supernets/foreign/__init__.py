"""Public networks whose weights can be imported: how they name tensors, and the images they expect.

One module per space with ``SOURCE``, ``settings()`` (the public network as an instance of ours), ``table(supernet)`` (our names ->
theirs) and ``EXPECTED_LEFTOVERS`` (a regular expression of keys that have no counterpart, by design).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fedloom.supernets.base import Supernet
from fedloom.supernets.foreign import darts, mobilenetv3, nasvit


class Naming(Protocol):
    SOURCE: str
    EXPECTED_LEFTOVERS: str

    def settings(self) -> Any: ...
    def table(self, supernet: Supernet[Any]) -> dict[str, str]: ...


@dataclass(frozen=True)
class PublicNetwork:
    naming: Naming
    size: int  # side of its images in pixels
    mean: tuple[float, ...]  # of their channels, on the scale 0..1
    std: tuple[float, ...]
    fold: Callable[[str], str] = str  # the one spelling of a key that has several
    split: Callable[[Mapping[str, Tensor], Supernet[Any]], dict[str, Tensor]] | None = None  # cuts their tensors into several of ours


CIFAR10 = ((0.49139968, 0.48215827, 0.44653124), (0.24703233, 0.24348505, 0.26158768))  # as the DARTS repository gives them
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

PUBLIC: dict[str, PublicNetwork] = {
    "darts": PublicNetwork(darts, 32, *CIFAR10),
    "mobilenetv3": PublicNetwork(mobilenetv3, 224, *IMAGENET, fold=mobilenetv3.fold),
    "nasvit": PublicNetwork(nasvit, 224, *IMAGENET, split=nasvit.split),
}
