# ruff: noqa: F401
"""Federated methods, one file each, both halves in it. One line per method makes it known."""

from fedloom.methods import (
    dbe,
    ditto,
    fedala,
    fedavg,
    fedbabu,
    fedmn,
    fednas,
    fedoras,
    fedprox,
    fedrep,
    fedrlnas,
    fedtp,
    hapfnas,
    heterofl,
    knnper,
    local,
    perfedavg,
    perfedrlnas,
    perfedsde,
    scaffold,
    spider,
)
