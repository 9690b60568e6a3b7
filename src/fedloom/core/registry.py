"""Name -> component. One registry per concept, filled where the components are defined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from fedloom.core.errors import InvalidConfig

T = TypeVar("T", bound=Callable[..., Any])


def did_you_mean(name: str, known: list[str]) -> str:
    """The cure for a mistyped name."""
    near = get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Known: {', '.join(sorted(known)) or 'none'}"


@dataclass(frozen=True)
class Entry(Generic[T]):
    name: str
    make: T
    settings: type  # the frozen dataclass behind the component's table in the settings
    meaning: str  # one line


class Registry(Generic[T]):
    """Components by name, each with its settings and a one-line meaning; ``@REGISTRY.add(name, Settings, meaning)`` adds one."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.entries: dict[str, Entry[T]] = {}

    def add(self, name: str, settings: type, meaning: str) -> Callable[[T], T]:
        def keep(make: T) -> T:
            if name in self.entries:
                raise InvalidConfig(f"There is a {self.what} named {name!r} already. Choose another name", name=name)
            self.entries[name] = Entry(name, make, settings, meaning)
            return make

        return keep

    def __getitem__(self, name: str) -> Entry[T]:
        try:
            return self.entries[name]
        except KeyError:
            raise InvalidConfig(f"There is no {self.what} named {name!r}. {did_you_mean(name, list(self.entries))}", name=name) from None

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self.entries[name] for name in sorted(self.entries))
