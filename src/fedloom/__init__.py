"""Fedloom gives every member of a federation its own neural network: its own architecture and its own weights."""

__version__ = "0.1.0"
