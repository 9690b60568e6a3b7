"""What several test files use that is no fixture."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedloom.core.errors import FedloomError
from fedloom.testing.tiny import tiny_text


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Fedloom = Callable[..., Outcome]


def check_refused(outcome: Outcome, kind: type[FedloomError], *words: object) -> None:
    """One sentence or two on one line, the error's own exit code, no traceback, nothing on the standard output."""
    assert outcome.code == kind.exit_code, outcome
    assert outcome.err.startswith("fedloom: ") and outcome.err.count("\n") == 1 and outcome.err.endswith("\n"), outcome
    assert "Traceback" not in outcome.err and outcome.out == ""
    for word in words:
        assert str(word) in outcome.err, outcome.err


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a folder; the lock is always empty and says nothing."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def flipped(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def shrinking(split: bool = True, clients: bool = True) -> list[str]:
    """Settings of the tiny federation as overrides, but for data and method. split, clients: few images for each, few of them as well."""
    tiny = tomllib.loads(tiny_text())
    left_out = ("data", "when") if split else ("data", "when", "split")
    tables = {name: value for name, value in tiny.items() if isinstance(value, dict) and name not in left_out}
    size = [f"{key}={tiny[key]}" for key in ("clients", "participants", "rounds") if clients or key != "clients"]
    return [*size, *(f"{table}.{key}={json.dumps(value)}" for table, values in tables.items() for key, value in values.items())]
