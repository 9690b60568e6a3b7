"""A setting: a dataclass field with one default and a one-line meaning, which becomes its help text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field
from typing import Any


def setting(
    default: Any, meaning: str, choices: Collection[str] = (), low: float | None = None, high: float | None = None, path: bool = False
) -> Any:
    """A dataclass field with a meaning. ``choices``, or the bounds ``low`` and ``high`` (both included), limit its values.

    ``path``: the value names a file or folder. A run saves it as a full path. Members of a federation may have different ones.

    ``choices`` are read when a value is checked, so a table of components may grow later.
    """
    return field(default=default, metadata={"meaning": meaning, "choices": choices, "low": low, "high": high, "path": path})
