"""The registry of methods."""

from __future__ import annotations

from typing import Any

from fedloom.core.method import Method
from fedloom.core.registry import Registry

METHODS: Registry[type[Method[Any]]] = Registry("method")
