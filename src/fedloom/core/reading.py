"""JSON that anybody may have written."""

from __future__ import annotations

import json
from typing import Any

DIGITS = 20  # of a whole number: 64 bits and a sign


def parse_json(text: str | bytes) -> Any:
    """What it says. ValueError for whatever is no JSON, nests too deeply or holds whole numbers that no file of Fedloom holds."""
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"it holds a number of {len(digits):,} digits")
    return int(digits)
