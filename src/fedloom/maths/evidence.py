"""Choosing with a prior: what comes first is kept unless measurements speak clearly enough for something else.

A few dozen images measure a loss with a large error, and the lowest of many such losses is mostly luck. Two networks that saw the same
images are better compared image by image: what makes an image hard for both cancels out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Losses = npt.NDArray[np.float64]  # (images,) of one network


def clearly_lower(losses: Losses, than: Losses, errors: float) -> bool:
    """Whether the mean loss is lower by more than this many standard errors of the paired differences.

    A loss that is not finite is lower than none and higher than all others. One image has no standard error: it shows nothing, unless
    ``errors`` is 0 and any lower mean is enough.
    """
    if not np.isfinite(losses).all():
        return False
    if not np.isfinite(than).all():
        return True
    gains = than - losses
    if len(gains) < 2:
        return bool(errors == 0 and gains.sum() > 0)
    return bool(gains.mean() > errors * gains.std(ddof=1) / len(gains) ** 0.5)


def kept(losses: Sequence[Losses], errors: float, first: int = 0) -> int:
    """The place of the candidate to keep: ``first``, or of those that are clearly lower the one with the lowest mean loss."""
    lower = [place for place, own in enumerate(losses) if clearly_lower(own, losses[first], errors)]
    return min(lower, key=lambda place: float(losses[place].mean()), default=first)
