"""Fedloom: a neural network of its own, architecture and weights, for every member of a federation."""

__version__ = "0.1.0"
