"""Numbers as characters, for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

LEVELS = "▁▂▃▄▅▆▇█"
PARTS = " ▏▎▍▌▋▊▉"  # eighths of a character


def spark_line(values: Sequence[float], width: int) -> str:
    """A character for each value, lowest to highest; more values than fit are averaged in neighbouring groups."""
    if len(values) > width:
        ends = [round(place * len(values) / width) for place in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = (high - low) or 1.0
    return "".join(LEVELS[round((value - low) / span * (len(LEVELS) - 1))] for value in values)


def bar(share: float, width: int) -> str:
    """A bar of this share (0 to 1) of the width."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (PARTS[rest] if rest else "")).ljust(width)
