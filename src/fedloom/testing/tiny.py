"""The smallest federation that still does everything, on the embedded digits; a run of it takes less than a second.

The settings of methods and spaces say themselves what is small: their ``tiny()`` returns such an instance. Without it, the defaults serve.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedloom.core.registry import Entry
from fedloom.methods.base import METHODS
from fedloom.spaces.base import SPACES

FEDERATION = """\
method = "perfedsde"
clients = 3
participants = 2
rounds = 2

[data]
name = "digits"

[split]
rule = "plato"
size = 12
test_size = 8
validation = 0.3

[training]
epochs = 1
batch = 8
crop = 1
flip = false
cutout = 0
calibration = 8
finetune_epochs = 1
finetune_rates = [0.02]

[inline]
device = "cpu"
threads = 1
"""


def tiny_file(folder: Path) -> Path:
    """A settings file in this folder, with a table for every method and space that is registered now."""
    path = folder / "tiny.toml"
    path.write_text(tiny_text())
    return path


def tiny_text() -> str:
    return "\n".join([FEDERATION, *_tables()])


def tiny_settings(kind: type) -> Any:
    """Settings of a method or space, small enough for tests."""
    return getattr(kind, "tiny", kind)()


def _tables() -> Iterator[str]:
    entries: list[Entry[Any]] = [*SPACES.values(), *METHODS.values()]
    for entry in entries:
        tiny = tiny_settings(entry.settings)
        yield _table(entry.name, {item.name: getattr(tiny, item.name) for item in fields(tiny) if getattr(tiny, item.name) != item.default})
    for method in METHODS.values():
        space = {"space": method.make.spaces[0]} if method.make.spaces else {}
        if needs := {**space, **method.make.tiny_needs}:
            yield _table(f"when.{method.name}", needs)


def _table(name: str, values: Mapping[str, object]) -> str:
    """A table in TOML, whose values are JSON's."""
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""])
