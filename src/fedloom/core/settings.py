"""A setting: a dataclass field with one default and a one-line meaning, which becomes its help text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field
from typing import Any


def setting(
    default: Any, meaning: str, choices: Collection[str] = (), low: float | None = None, high: float | None = None, path: bool = False
) -> Any:
    """A dataclass field; ``choices`` or the bounds ``low`` and ``high`` (both allowed values) limit what it accepts.

    ``path``: it names a file or folder that is read. A run keeps it as a full path, and members of a federation may have other ones.

    ``choices`` are looked at when a value is checked: those that are a table of components grow with it.
    """
    return field(default=default, metadata={"meaning": meaning, "choices": choices, "low": low, "high": high, "path": path})
