"""Federated methods, one file each, both halves in it. One line per method makes it known."""

from fedloom.methods import ditto, fedavg, fedbabu, fedprox, fedrep, fedrlnas, hapfnas, heterofl, local, perfedrlnas, perfedsde, spider  # noqa: F401
