"""What a public network is to us: names, settings and images of weights that others trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedloom.core.registry import Registry
from fedloom.supernets.base import Supernet

State = Mapping[str, Tensor]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation of its channels


@dataclass(frozen=True)
class PublicNetwork:
    source: str  # {width}, for example, stands for that setting
    settings: Any  # the public network as an instance of ours
    table: Callable[[Supernet[Any]], dict[str, str]]  # our names -> theirs, for every parameter and running statistic
    expected_leftovers: Callable[[Supernet[Any]], str]  # a regular expression of keys that have no counterpart, by design
    size: int  # side of its images in pixels
    mean: tuple[float, ...]  # of their channels, on the scale 0..1
    std: tuple[float, ...]
    fold: Callable[[str], str] = str  # the one spelling of a key that has several
    split: Callable[[State, Supernet[Any]], State] = lambda state, supernet: state  # cuts their tensors into several of ours
    cut_for: tuple[str, ...] = ()  # settings of an instance by which ``split`` chooses what it cuts
    fixed: tuple[str, ...] = ()  # settings that make it another network, though no name or shape of a weight tells


PUBLIC: Registry[PublicNetwork] = Registry("public network")
