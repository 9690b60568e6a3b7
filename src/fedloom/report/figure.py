"""A figure that cannot be made without a title, named axes with units and a sentence that says what to see; and its pictures.

One drawing serves page and paper. On a page ink and colours are left to the style sheet, so that they follow light and dark.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from io import BytesIO
from typing import Any

from fedloom.report.words import plain

# Okabe and Ito's colours, which colour-blind readers tell apart; the style sheet has a lighter shade of each for dark paper.
COLOURS = {
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "vermilion": "#d55e00",
    "purple": "#cc79a7",
    "sky": "#56b4e9",
}
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = COLOURS.values()
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
MARKS = ("o", "s", "^", "D", "v", "P")
INK, FAINT = "#1b1b1a", "#8a8a86"
WIDTHS = {"half": 4.6, "third": 3.1}  # inches; a page shows them in so many columns, and a phone in one
DATED = {"svg": ("Date", "Creator"), "png": ("Software",), "pdf": ("CreationDate", "Creator", "Producer")}  # what files do not say
KINDS = tuple(DATED)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,
    "text.parse_math": False,  # names may hold a dollar sign
    "font.size": 7.8,
    "figure.titlesize": 7.8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
}


@dataclass(frozen=True)
class Axis:
    """What an axis shows, and in which unit; of what has none the unit says how it is counted or ordered."""

    name: str
    unit: str

    def __str__(self) -> str:
        return f"{self.name} ({self.unit})"


@dataclass(frozen=True)
class Numbers:
    """The same as a table, for those who do not see the picture."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """``fill`` draws into matplotlib's axes; title and axis names are put there from here."""

    key: str  # its name in links and files
    title: str
    horizontal: Axis
    vertical: Axis
    see: str  # what to see, in whole sentences
    fill: Callable[[Any], None]
    numbers: Numbers
    width: str = "half"
    height: float = 2.9  # inches
    thinned: str = ""  # what was left out or put together, in a sentence

    def __post_init__(self) -> None:
        words = {
            "key": self.key,
            "title": self.title,
            "horizontal axis": self.horizontal.name,
            "vertical axis": self.vertical.name,
            "unit of the horizontal axis": self.horizontal.unit,
            "unit of the vertical axis": self.vertical.unit,
            "sentence that says what to see": self.see,
        }
        for what, text in words.items():
            if not text.strip():
                raise ValueError(f"the figure {self.key or self.title!r} has no {what}")
        if not self.see.strip().endswith("."):
            raise ValueError(f"the figure {self.key!r} must say what to see in a sentence, not {self.see!r}")
        if self.width not in WIDTHS:
            raise ValueError(f"the figure {self.key!r} must be one of {', '.join(WIDTHS)}, not {self.width!r}")


@dataclass(frozen=True)
class Missing:
    """Stands where a figure cannot be drawn, and says why."""

    title: str
    why: str


Shown = Figure | Missing


def pictures(figure: Figure) -> dict[str, bytes]:
    """Files for a paper."""
    return {kind: _drawn(figure, kind, titled=True, dpi=300) for kind in KINDS}


def page_svg(figure: Figure) -> str:
    """For the inside of a page: no size of its own, names of parts that no other figure has, colours from the style sheet."""
    text = _drawn(figure, "svg", titled=False, dpi=144, transparent=True).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    head, body = text.split(">", 1)
    size = re.search(r'viewBox="[^"]+"', head)
    assert size is not None
    body = re.sub(r'\bid="([^"]+)"', lambda found: f'id="{figure.key}-{found[1]}"' if f"#{found[1]}" in body else "", body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{figure.key}-", body)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = body.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")
    for name, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    body = re.sub(r"\n\s*", "\n", body)
    label = escape(f"{figure.title}. {figure.see}", quote=False).replace('"', "&quot;")
    return f'<svg {size[0]} role="img" aria-label="{label}" preserveAspectRatio="xMidYMid meet">{body}'.rstrip()


def _drawn(figure: Figure, kind: str, titled: bool, **saving: Any) -> bytes:
    # slow to import, needed here only
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator

    with rc_context({**STYLE, "svg.hashsalt": figure.key}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # in names; the page's reader may have it
        canvas = Canvas(figsize=(WIDTHS[figure.width], figure.height), layout="constrained")
        axes = canvas.subplots()
        axes.grid(True)
        figure.fill(axes)
        axes.set_xlabel(plain(figure.horizontal))
        axes.set_ylabel(plain(figure.vertical))
        if figure.horizontal.unit == "number":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if titled:  # above the axes' legend, where that stands on top
            canvas.suptitle(plain(figure.title), x=0.01, ha="left", weight="bold")
        return saved(canvas, kind, **saving)


def saved(canvas: Any, kind: str, **saving: Any) -> bytes:
    """The same bytes for the same numbers."""
    file = BytesIO()
    canvas.savefig(file, format=kind, metadata=dict.fromkeys(DATED[kind]), **saving)
    return file.getvalue()


def draw_dots(axes: Any, x: Any, y: Any, colour: str, size: float, alpha: float, mark: str = "o", name: str | None = None) -> None:
    axes.plot(x, y, ls="", marker=mark, ms=size, mew=0, color=colour, alpha=alpha, label=name)
