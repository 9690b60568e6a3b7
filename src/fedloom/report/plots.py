"""Plots of lines and points, and heat maps, as SVG and PNG, the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from fedloom.report.figure import saved

STYLES = (
    {"color": "#d95f02", "linestyle": "--"},
    {"color": "#1f78b4", "linestyle": "--"},
    {"color": "#777777", "linestyle": ":"},
    {"color": "#1b9e77", "linestyle": "-"},
    {"color": "#7570b3", "linestyle": "-."},
)


@dataclass(frozen=True)
class Panel:
    """One plot: lines by name, each with its values in order; where they stand, if not at 1, 2, 3, …

    vertical: what its values are, if not what the whole figure's are. marks: places on the horizontal axis where something begins.
    """

    title: str
    lines: Mapping[str, Sequence[float]]
    places: Mapping[str, Sequence[float]] = field(default_factory=dict)
    points: tuple[str, ...] = ()  # lines that are shown as points, not joined
    vertical: str = ""
    marks: Mapping[str, float] = field(default_factory=dict)


def plot_lines(rows: Sequence[Sequence[Panel]], horizontal: str, vertical: str) -> dict[str, bytes]:
    """A grid of panels, as {"svg": …, "png": …}. Panels of a row share their vertical axis."""

    def fill(figure: Any) -> None:
        axes = figure.subplots(len(rows), len(rows[0]), squeeze=False, sharey="row")
        for panels, places in zip(rows, axes, strict=True):
            for panel, place in zip(panels, places, strict=True):
                for (name, values), style in zip(panel.lines.items(), cycle(STYLES)):
                    style = {"color": style["color"], "linestyle": "", "marker": "."} if name in panel.points else style
                    place.plot(panel.places.get(name, range(1, len(values) + 1)), values, label=name, **style)
                place.set_title(panel.title)
                place.set_xlabel(horizontal)
                place.grid(alpha=0.3)
                for name, where in panel.marks.items():
                    place.axvline(where, color="#999999", linewidth=0.8)
                    beside = {"xytext": (2, -3), "textcoords": "offset points", "rotation": 90, "va": "top", "size": 8}
                    place.annotate(name, (where, 1), xycoords=("data", "axes fraction"), **beside)
            places[0].set_ylabel(panels[0].vertical or vertical)
        for row in axes if any(panel.vertical for panels in rows for panel in panels) else axes[:1]:
            row[0].legend()

    return _pictures(4.5 * len(rows[0]), 3.2 * len(rows), fill)


def plot_matrix(
    values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], horizontal: str, vertical: str
) -> dict[str, bytes]:
    """A heat map with its numbers written into it, the largest of each row in bold, as {"svg": …, "png": …}."""

    def fill(figure: Any) -> None:
        place = figure.subplots()
        shown = place.imshow(values, cmap="viridis", aspect="auto")
        middle = (max(map(max, values)) + min(map(min, values))) / 2
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                style = {"color": "black" if value > middle else "white", "weight": "bold" if value == max(row) else "normal"}
                place.text(x, y, f"{value:.1f}", ha="center", va="center", size=7, **style)
        place.set_xticks(range(len(columns)), columns, rotation=90)
        place.set_yticks(range(len(rows)), rows)
        place.set_xlabel(horizontal)
        place.set_ylabel(vertical)
        figure.colorbar(shown)

    return _pictures(2.5 + 0.45 * len(columns), 2 + 0.32 * len(rows), fill)


def _pictures(width: float, height: float, fill: Callable[[Any], None]) -> dict[str, bytes]:
    """A figure of this size in inches, as {"svg": …, "png": …}."""
    # slow to import, needed here only
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # svg: text stays text, and names of parts do not depend on the day
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedloom"}):
        figure = Figure(figsize=(width, height), layout="constrained")
        fill(figure)
        return {kind: saved(figure, kind, dpi=150) for kind in ("svg", "png")}
