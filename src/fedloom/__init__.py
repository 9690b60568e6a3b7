"""Fedloom gives every member of a federation its own neural network: its own architecture and its own weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.api import Comparison, Result, compare, run

__version__ = "0.1.0"
__all__ = ["Comparison", "Result", "compare", "run"]


def __getattr__(name: str) -> Any:
    """What is for scripts and notebooks, when it is asked for: it loads torch, which takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'fedloom' has no attribute {name!r}")
    from fedloom import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
