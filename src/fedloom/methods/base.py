"""The registry of methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedloom.core.method import Method
from fedloom.core.registry import Registry

# A method is made from its own settings and a training.tools.Tools.
METHODS: Registry[Callable[..., Method[Any]]] = Registry("method")
