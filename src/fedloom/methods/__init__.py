"""Federated methods, one file each, both halves in it. One line per method makes it known."""

from fedloom.methods import ditto, fedavg, fedbabu, fedprox, fedrep, hapfnas, local, perfedavg, perfedrlnas, perfedsde, scaffold, spider  # noqa: F401
