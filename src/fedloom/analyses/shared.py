"""What the commands that look at runs share."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.core.errors import InvalidConfig
from fedloom.files import write_file
from fedloom.report.terminal import console as console
from fedloom.report.terminal import say as say

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")]
PrintJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def check_finite(option: str, value: float | None) -> None:
    """nan and inf pass typer's own bounds."""
    if value is not None and not math.isfinite(value):
        raise InvalidConfig(f"{option} must be a finite number, got {value!r}")


def write(target: Path, name: str, facts: Mapping[str, Any], pictures: Mapping[str, bytes], quiet: bool = False) -> None:
    """NAME.json, .svg and .png in the folder ``target``."""
    for ending, content in {"json": (json.dumps(facts, indent=2) + "\n").encode(), **pictures}.items():
        write_file(target / f"{name}.{ending}", content)
    if not quiet:
        say(f"{target}/{name}.svg, .png and .json")
