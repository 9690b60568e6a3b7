"""Plots of lines and points as SVG and PNG, the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import cycle

STYLES = (
    {"color": "#d95f02", "linestyle": "--"},
    {"color": "#1f78b4", "linestyle": "--"},
    {"color": "#777777", "linestyle": ":"},
    {"color": "#1b9e77", "linestyle": "-"},
    {"color": "#7570b3", "linestyle": "-."},
)


@dataclass(frozen=True)
class Panel:
    """One plot: lines by name, each with its values in order; where they stand, if not at 1, 2, 3, …"""

    title: str
    lines: Mapping[str, Sequence[float]]
    places: Mapping[str, Sequence[float]] = field(default_factory=dict)
    points: tuple[str, ...] = ()  # lines that are shown as points, not joined


def plot_lines(rows: Sequence[Sequence[Panel]], horizontal: str, vertical: str) -> dict[str, bytes]:
    """A grid of panels, as {"svg": …, "png": …}. Panels of a row share their vertical axis."""
    # slow to import, needed here only
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # svg: text stays text, and names of parts do not depend on the day
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedloom"}):
        figure = Figure(figsize=(4.5 * len(rows[0]), 3.2 * len(rows)), layout="constrained")
        axes = figure.subplots(len(rows), len(rows[0]), squeeze=False, sharey="row")
        for panels, places in zip(rows, axes, strict=True):
            for panel, place in zip(panels, places, strict=True):
                for (name, values), style in zip(panel.lines.items(), cycle(STYLES)):
                    style = {"color": style["color"], "linestyle": "", "marker": "."} if name in panel.points else style
                    place.plot(panel.places.get(name, range(1, len(values) + 1)), values, label=name, **style)
                place.set_title(panel.title)
                place.set_xlabel(horizontal)
                place.grid(alpha=0.3)
            places[0].set_ylabel(vertical)
        axes[0][0].legend()
        pictures = {}
        for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            file = BytesIO()
            figure.savefig(file, format=kind, dpi=150, metadata=metadata)
            pictures[kind] = file.getvalue()
        return pictures
