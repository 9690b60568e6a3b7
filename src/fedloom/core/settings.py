"""A setting: a dataclass field with one default and a one-line meaning, which becomes its help text."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(default: Any, meaning: str, choices: tuple[str, ...] = (), low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field; ``choices`` or the bounds ``low`` and ``high`` (both allowed values) limit what it accepts."""
    return field(default=default, metadata={"meaning": meaning, "choices": choices, "low": low, "high": high})
