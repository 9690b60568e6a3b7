"""What a server may do besides averaging. Pure: new arrays out, inputs untouched."""

from __future__ import annotations

import numpy as np

from fedloom.core.messages import Array, Arrays


def with_momentum(change: Arrays, velocity: Arrays, momentum: float) -> tuple[dict[str, Array], dict[str, Array]]:
    """FedAvgM (Hsu, Qi and Brown, 2019): v <- momentum v + change, and the weights move by v. Returns the step and the new v.

    velocity: that of the last round; empty before the first. An entry whose mean change is exactly 0 was trained by nobody: it does not
    move, and its velocity waits, as in local training the momentum of an entry waits that a step does not train.
    """
    steps, known = {}, {}
    for name, array in change.items():
        trained, before = array != 0, velocity.get(name, np.zeros_like(array))
        after = array.dtype.type(momentum) * before + array
        steps[name], known[name] = np.where(trained, after, array), np.where(trained, after, before)
    return steps, known


def running_mean(mean: Arrays, weights: Arrays, number: int) -> dict[str, Array]:
    """The mean of the first ``number`` weights, from the mean of those before the last of them; ``mean`` is not read for the first."""
    if number == 1:
        return dict(weights)
    return {name: mean[name] + (array - mean[name]) / array.dtype.type(number) for name, array in weights.items()}
