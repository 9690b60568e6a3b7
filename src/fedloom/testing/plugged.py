"""Plugins that are there for a test and gone after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedloom import config, plugins


@contextmanager
def taken_back() -> Iterator[None]:
    """What a plugin registers meanwhile is not there for the next test."""
    undo = plugins.remember()
    try:
        yield
    finally:
        undo()


@contextmanager
def plugged(*names: str) -> Iterator[None]:
    with taken_back():
        config.plug_in(names)
        yield
