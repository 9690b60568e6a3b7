"""Numbers as people write them, and text from elsewhere made harmless."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.maths.paired import PairedDifference

NOT_XML = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what no page may hold, and control characters
AT_SITES = "The personal models, their accuracies and architectures are at the sites: the server knows none of them."
TIGHT = "\u00a0"  # a number and its unit stay on one line
LONGEST = 80  # letters of a name that is shown


def plain(text: object, longest: int = LONGEST) -> str:
    """One line of text that any file may hold; a long one is cut."""
    one_line = " ".join(NOT_XML.sub("\ufffd", str(text)).split())
    return one_line if len(one_line) <= longest else f"{one_line[: longest - 1]}…"


def percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f}{TIGHT}%"


def points(share: float | None) -> str:
    """A difference of shares in percentage points, with its sign."""
    return "–" if share is None else signed(100 * share, 1)


def signed(number: float, digits: int) -> str:
    """A difference with its sign. What rounds to nothing has none."""
    text = f"{number:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def one_class_words(clients: Sequence[str]) -> str:
    """A remark on clients whose test images are all of one class; none where there are none."""
    if not clients:
        return ""
    names = [plain(name) for name in clients]
    whose = "Its accuracy says" if len(names) == 1 else "Their accuracies say"
    return f"All test images of {listed(names)} are of one class. {whose} little: always naming that class is right."


def difference_words(found: PairedDifference | None) -> tuple[str, str, str]:
    """Mean, interval and p of a paired difference, for a table."""
    if found is None:
        return "–", "–", "–"
    between = "–" if found.low is None or found.high is None else f"{points(found.low)} to {points(found.high)}"
    return points(found.mean), between, f"{found.p:.2g}"


def count(number: float) -> str:
    """12, 1,234, 56.7 thousand, 8.90 million, …"""
    for unit, name in ((1e15, "quadrillion"), (1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e4, "thousand")):
        if abs(number) >= unit:
            scale = 1e3 if name == "thousand" else unit
            return f"{three_digits(number / scale)}{TIGHT}{name}"
    return f"{number:,.0f}"


def byte_count(number: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(number) >= unit:
            return f"{three_digits(number / unit)}{TIGHT}{name}"
    return f"{number:.0f}{TIGHT}B"


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.0f}{TIGHT}ms"
    if seconds < 120:
        return f"{three_digits(seconds)}{TIGHT}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes}{TIGHT}min {rest}{TIGHT}s"
    return f"{minutes // 60}{TIGHT}h {minutes % 60}{TIGHT}min"


def correlation(value: float) -> str:
    """Two digits, and no sign before nothing."""
    text = f"{value:.2f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", "−")


def three_digits(number: float) -> str:
    """1.23, 12.3, 123, 1,234."""
    size = abs(number)
    return f"{number:,.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"


def privacy_words(privacy: Mapping[str, Any]) -> str:
    """What result.json says of noise, as a sentence; nothing where there was none."""
    if not privacy:
        return ""
    server, others = (f"{privacy['epsilon'][reader]:.3g}" for reader in ("server", "others"))
    alike = privacy["epsilon"]["server"] == privacy["epsilon"]["others"]
    more = "the server among them" if alike else f"and {server} against the server, which reads single updates"
    return (
        f"Differential privacy of a client, with delta = {privacy['delta']:g}: epsilon = {others} against whoever sees the weights of all "
        f"rounds, {more} (updates at most {privacy['clip']:g} long, noise {privacy['noise']:g} times that in a round's sum)"
    )


def many(number: int, one: str, several: str = "") -> str:
    """1 client, 2 clients."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """a, b and c; a, b, c and 4 more."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


def change(first: float, last: float, tolerance: float = 0.0005) -> str:
    """rises, falls or stays: what a course does from its first value to its last."""
    return "rises" if last - first > tolerance else "falls" if first - last > tolerance else "stays"
