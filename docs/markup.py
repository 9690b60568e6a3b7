"""Markdown from the code's own texts."""

from __future__ import annotations

import re
from collections.abc import Iterable


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *(list(row) for row in rows)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines] + [""]


def plain(text: str) -> str:
    """Text of the code as Markdown: what stands in backticks stays, other signs that Markdown reads are escaped."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.replace("``", "`").split()))
    return "".join(part if part.startswith("`") else re.sub(r"([*<\[\]])", r"\\\1", part) for part in parts)


def code(text: str) -> str:
    return f"`{text}`" if text else ""
