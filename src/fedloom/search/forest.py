"""A random forest of a client's own scores: HAPFNAS's performance predictor, with the numbers of its authors' code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.search.base import Numbers, Surrogate
from fedloom.search.rbf import finite, merged

TREES, DEPTH = 100, 15


@dataclass(frozen=True)
class Forest:
    """A fitted ``RandomForestRegressor``."""

    model: Any

    def predict(self, encodings: Numbers) -> Numbers:
        return np.asarray(self.model.predict(encodings), float) if len(encodings) else np.empty(0)


def fit_forest(encodings: Numbers, scores: Numbers) -> Surrogate:
    """All genes are tried at every split; trees are drawn from a fixed seed, so the same scores give the same forest."""
    from sklearn.ensemble import RandomForestRegressor  # here, because it takes a second to load

    points, values = merged(np.asarray(encodings, float), finite(np.asarray(scores, float)))
    return Forest(RandomForestRegressor(TREES, max_depth=DEPTH, max_features=1.0, random_state=0).fit(points, values))
