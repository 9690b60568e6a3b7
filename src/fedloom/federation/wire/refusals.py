"""Lines about what others do wrong, which they cannot use to fill a log or to write to a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from fedloom.core.errors import printable

APART = 1.0  # seconds between two lines of a kind


class Refusals:
    """Of each kind at most one line a second, which says how many more there were. Kinds are ours, never a stranger's words."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: dict[Hashable, float] = {}  # kind -> when
        self._waiting: dict[Hashable, tuple[str, int]] = {}  # kind -> the last that happened, and how many did since then

    def add(self, kind: Hashable, text: str) -> None:
        self._waiting[kind] = (text, self._waiting.get(kind, ("", 0))[1] + 1)
        self.flush()

    def flush(self) -> None:
        """Say what was held back long enough."""
        now = time.monotonic()
        for kind in [kind for kind in self._waiting if now - self._said.get(kind, -APART) >= APART]:
            text, count = self._waiting.pop(kind)
            self._said[kind] = now
            self._say(printable(text) + (f" (and {count - 1} more like it)" if count > 1 else ""))
