"""Supernets: how the networks of a space compute with shared weights. One line per supernet makes it known."""

from fedloom.supernets import darts, mobilenetv3, nasvit, networks  # noqa: F401
