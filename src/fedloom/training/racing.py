"""A race: all architectures are scored on a part of the images, the better third of them then on all.

Those that do not reach the final keep their first score, which is ``rough``: it ranks after every score on all images, also when
populations are merged. So what comes first has always been measured in full, and the order of the rest is that of the first stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fedloom.core.client_site import Examples
from fedloom.training.scoring import Request, Scored, Scorer, best_first, spread
from fedloom.training.together import together

FINAL = 1 / 3  # share of the architectures that reach it, rounded up
FEWEST = 32  # images that measure normalisation statistics in the first stage, where there are as many


def race(scorer: Scorer, requests: Sequence[Request], share: float) -> list[list[Scored]]:
    """What ``scorer.score_many`` gives, with rough scores. share: of the images, and of those for statistics, in the first stage."""
    quick = scorer.quick(rough_calibration(scorer, share))
    first = together(quick.score_many, [replace(request, examples=first_images(request.examples, share)) for request in requests])
    finalists = [[one.architecture for one in best_first(scored)[: math.ceil(FINAL * len(scored))]] for scored in first]
    final = together(scorer.score_many, [replace(one, architectures=best) for one, best in zip(requests, finalists, strict=True)])
    return [_merged(rough, exact) for rough, exact in zip(first, final, strict=True)]


def rough_calibration(scorer: Scorer, share: float) -> int:
    """Images that measure statistics in the first stage."""
    full = scorer.settings.calibration
    return min(full, max(FEWEST, round(share * full)))


def first_images(examples: Examples, share: float) -> Examples:
    """This share of the examples, at least one, evenly spread over them: always the same ones."""
    chosen = spread(examples, max(1, round(share * len(examples))))
    return Examples(examples.images[chosen], examples.labels[chosen])


def _merged(rough: Sequence[Scored], exact: Sequence[Scored]) -> list[Scored]:
    """In the order of the first stage."""
    known = {one.architecture: one for one in exact}
    return [known.get(one.architecture) or replace(one, score=replace(one.score, rough=True)) for one in rough]
