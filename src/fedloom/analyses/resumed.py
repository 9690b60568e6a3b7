"""Tables that an analysis writes as they grow, and goes on with after a stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fedloom.core.errors import DamagedRun, InvalidConfig
from fedloom.core.reading import parse_json
from fedloom.files import read_plain

Known = TypeVar("Known")


def known_of(file: Path, facts: Mapping[str, Any], cells: Callable[[dict[str, Any]], dict[Any, Known]]) -> dict[Any, Known]:
    """What a file of an earlier try holds; nothing without one. facts: what it must have been made with. cells: finds them in its table,
    and raises ValueError, KeyError or TypeError if they are none."""
    if not file.exists():
        return {}
    try:
        table = parse_json(read_plain(file))
        there = {key: table[key] for key in facts}
        _compare(file, facts, there)
        return cells(table)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedRun(f"{file} is damaged ({error}). Remove it, or choose another --out", path=str(file)) from error


def _compare(file: Path, here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Refuse a table that was made with something else."""
    for key, value in here.items():
        if there[key] != value:
            differ = "differ" if isinstance(value, list) else f"is {there[key]} there and {value} here"
            raise InvalidConfig(f"{file} was measured otherwise: {key} {differ}. Choose another --out, or remove it", path=str(file))


def is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1
