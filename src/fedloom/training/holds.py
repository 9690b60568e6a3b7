"""What holds a network back in training: a part of it that stays as it is, a pull towards given weights, a slope."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple

from fedloom.supernets.base import Supernet, Weights

Part = Literal["whole", "head", "body"]  # of a network; the head is its classifier, the body everything else


CLASSIFIERS: dict[str, Part] = {"trained": "whole", "frozen": "body"}  # of a network in rounds -> what rounds train
CLASSIFIER = "in rounds: trained like the rest, or frozen: it stays as it was drawn, as in FedBABU, and only fine-tuning trains it"


class Pull(NamedTuple):
    """A proximal term in the loss, strength / 2 |w - towards|^2: it adds strength (w - towards) to the gradient.

    slope: a linear term, <slope, w>, besides: it is added to every gradient. None: zero.
    """

    towards: Weights
    strength: float
    slope: Weights | None = None


def kind_of(pull: Pull | None) -> str:
    """Networks whose pulls are of one kind take the same steps, and can be in one stack."""
    return "free" if pull is None else "pulled" if pull.slope is None else "pulled on a slope"


def moving(supernet: Supernet[Any], part: Part, names: Iterable[str], still: Collection[str] = ()) -> frozenset[str] | None:
    """The parameters that training moves; none: all of them. still: more that do not move."""
    if part == "whole" and not still:
        return None
    return frozenset(name for name in names if name not in still and (part == "whole" or supernet.in_head(name) == (part == "head")))
