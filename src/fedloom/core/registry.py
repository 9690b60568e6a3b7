"""Name -> component. One registry per concept, filled where the components are defined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, NoReturn, TypeVar

from fedloom.core.errors import InvalidConfig

T = TypeVar("T")


def did_you_mean(name: str, known: list[str]) -> str:
    """The cure for a mistyped name."""
    near = get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Known: {', '.join(sorted(known)) or 'none'}"


@dataclass(frozen=True)
class Entry(Generic[T]):
    name: str
    make: T  # what makes the component, or is it
    settings: Any  # the frozen dataclass behind the component's table in the settings; None where it has no table
    meaning: str  # one line


class Registry(dict[str, Entry[T]]):
    """Names and the components they stand for; a name that is not there is refused with a hint.

    ``@REGISTRY.add("name", Settings, "meaning")`` above a class or function registers it; one without settings has ``meaning=`` alone.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def add(self, name: str, settings: type | None = None, meaning: str = "") -> Callable[[T], T]:
        def keep(make: T) -> T:
            if name in self:
                raise InvalidConfig(f"There is a {self.what} named {name!r} already. Choose another name", name=name)
            self[name] = Entry(name, make, settings, meaning)
            return make

        return keep

    def __missing__(self, name: str) -> NoReturn:
        raise InvalidConfig(f"There is no {self.what} named {name!r}. {did_you_mean(name, list(self))}", name=name)
