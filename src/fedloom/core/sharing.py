"""What runs side by side in one process have in common: each thing is made once, by whoever needs it first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

Thing = TypeVar("Thing")
_made: ContextVar[dict[Hashable, Any] | None] = ContextVar("what is shared", default=None)


@contextmanager
def sharing() -> Iterator[None]:
    """Meanwhile ``once`` remembers. It holds for whoever is begun in it, and is forgotten afterwards."""
    before = _made.set({})
    try:
        yield
    finally:
        _made.reset(before)


def once(make: Callable[[], Thing], *key: Hashable) -> Thing:
    """What ``make`` makes; the same again for the same key while ``sharing`` lasts. key: all that it depends on, its kind first."""
    made = _made.get()
    if made is None:
        return make()
    if key not in made:
        made[key] = make()
    return cast(Thing, made[key])
