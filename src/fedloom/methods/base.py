"""The registry of methods, and what a method's server half usually does with clients and seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedloom.core.method import Method
from fedloom.core.registry import Registry

TRAIN, FINISH = "train", "finish"  # the actions of an instruction: a round, the final participation

# A method is made from its own settings and a training.bench.Bench.
METHODS: Registry[Callable[..., Method[Any]]] = Registry("method")
