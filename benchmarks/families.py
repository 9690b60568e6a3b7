"""Which records stand where on docs/results.md, and which are left out: the one list to add a new record to. results_page.py reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import fleet

NAMES = {
    "control": "`fedavg`, one fixed network",
    "control-twice": "`fedavg`, twice the epochs",
    "control-drift": "`scaffold`, one fixed network",
    "control-frozen": "`scaffold`, its classifier frozen",
    "alone": "`local`, each alone",
    "all": "`perfedsde` without `drift`",
    "drift": "`perfedsde` with `drift`",
    "frozen": "`perfedsde` with `drift`, its classifier frozen",
    "published": "`perfedsde`, Algorithm 1 as published",
}


@dataclass(frozen=True)
class Family:
    """Rows that are compared with the first of them and share one correction of p. Several records are pooled."""

    rounds: int
    split: str
    records: tuple[str, ...] = ()  # of recipe.py, baselines.py or fleet.py
    runs: Mapping[str, str] = field(default_factory=dict)  # arm -> record of its run by record.py; adds bytes, or the arm
    arms: tuple[str, ...] = ()  # those shown; default: all
    tuning: str = ""  # whether something was chosen on its seeds
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)  # of arms


PLATO, SHARPER, LABEL = "plato 0.3", "plato 0.1", "label 0.3"
COURSES = {arm: f"cifar10-200-{arm}" for arm in ("control", "control-drift", "control-frozen", "drift", "frozen")}
BOTH = ("control", "control-drift", "drift")
RATES = {f"`fedavg`, rate {rate}": f"cifar10-control-rate-{rate}" for rate in ("0.1", "0.2")}
FAMILIES: dict[str, tuple[Family, ...]] = {
    "cifar10": (
        Family(200, PLATO, ("recipe-cifar10",), COURSES),
        Family(120, PLATO, ("recipe-cifar10-120",), tuning="tuning"),
        Family(120, PLATO, runs=RATES, tuning="tuning"),
        Family(100, PLATO, ("baselines-cifar10",), tuning="partly tuning"),
    ),
    "cifar100": (
        Family(200, SHARPER, ("recipe-cifar100",)),
        Family(100, SHARPER, runs={"`fedavg`, rate 0.1": "cifar100-control-rate-0.1"}, tuning="tuning"),
    ),
    "digits": (
        Family(12, LABEL, ("recipe-digits-fresh",)),
        Family(12, LABEL, ("recipe-digits-drift",)),
        Family(12, LABEL, ("recipe-digits",)),
        Family(12, LABEL, ("recipe-digits-parts",), arms=BOTH),
        Family(12, LABEL, ("recipe-digits-drift", "recipe-digits-fresh", "recipe-digits-parts"), arms=BOTH),
    ),
    "fleet": (
        Family(
            12,
            LABEL,
            ("fleet",),
            arms=("fedavg", "scaffold", "heterofl", "local", "perfedsde"),
            tuning="3 partly tuning",
            names=fleet.NAMES,
        ),
    ),
}
LEFT_OUT = {
    "cifar10-control": "50 rounds of `fedavg`, superseded by 100 and 200",
    "cifar10-control-strides-*": "a trial of other strides",
    "cifar10-perfedsde": "10 rounds, stopped among the personal models",
    "cifar10-paper-*": "20 rounds at most and no personal models; they say what a round costs",
    "quickstart*": "the quickstart before the anchor, or what secure sums change",
}
SYSTEMS = ("perfedsde", "perfedrlnas", "spider")
PUBLISHED = {
    "cifar10": (*SYSTEMS, "fedavg", "fedbabu", "fedrep", "ditto", "local", "knnper", "perfedavg", "fedmn"),
    "cifar100": (*SYSTEMS, "fedavg"),
}
SEARCHES = ("all", "drift", "frozen", "published")
