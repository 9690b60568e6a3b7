"""What an engine is, and the registry of engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fedloom.core.messages import Instruction, Report
from fedloom.core.registry import Registry


class Link(Protocol):
    """A way to reach clients. An engine is a link."""

    @property
    def at_once(self) -> int:
        """How many clients it keeps busy."""

    def clients(self) -> Sequence[str]: ...

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        """Reports of the clients that answered; fewer than asked for is no error."""


ENGINES: Registry[Callable[..., Link]] = Registry("engine")
