"""Surrogates: cheap models of a client's own scores. One line per surrogate makes it known."""

from fedloom.surrogates import rbf  # noqa: F401
