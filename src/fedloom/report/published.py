"""Numbers that papers report, to stand beside runs: as published, with their protocol, never as ours."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from string import ascii_lowercase

TITLE = "Published in papers, under their own protocols; not run here"


@dataclass(frozen=True)
class Published:
    """One accuracy of one table. Names of method, data set and space are those of Fedloom; accuracy and spread are shares."""

    method: str
    what: str  # network or variant
    dataset: str
    space: str  # whose table it stands in
    accuracy: float
    spread: float | None  # over clients
    hours: float | None
    source: str
    protocol: str

    @property
    def shown(self) -> str:
        """Accuracy and spread in %."""
        spread = "" if self.spread is None else f" ± {100 * self.spread:.2f}"
        return f"{100 * self.accuracy:.2f}{spread}"


@cache
def published() -> tuple[Published, ...]:
    table = tomllib.loads(files("fedloom.report").joinpath("published.toml").read_text())
    return tuple(
        Published(
            method=row["method"],
            what=row["what"],
            dataset=row["dataset"],
            space=own["space"],
            accuracy=row["accuracy"] / 100,
            spread=row["spread"] / 100 if "spread" in row else None,
            hours=row.get("hours"),
            source=own["source"],
            protocol=table["protocols"][own["protocol"]],
        )
        for own in table["tables"]
        for row in own["rows"]
    )


def published_beside(datasets: Collection[str], spaces: Collection[str], methods: Collection[str]) -> list[Published]:
    """What belongs beside such runs: the same data set, and the same space or one of the methods. Better ones first."""
    fitting = [one for one in published() if one.dataset in datasets and (one.space in spaces or one.method in methods)]
    return sorted(fitting, key=lambda one: (one.dataset, one.protocol, one.space, -one.accuracy))


def protocols_of(rows: Sequence[Published]) -> dict[str, str]:
    """protocol -> a letter for it, where rows have no room for the words."""
    return {protocol: letter for protocol, letter in zip(dict.fromkeys(one.protocol for one in rows), ascii_lowercase, strict=False)}
