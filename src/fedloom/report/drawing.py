"""An architecture as a picture: one self-contained SVG file, a graph for cells, rows of boxes for blocks.

Colours are fixed ones of middle lightness, told apart also by colour-blind readers, on boxes of their own; only paper and free text
follow a reader's dark mode. Every operation is also written out, so that no meaning hangs on colour alone.
"""

from __future__ import annotations

import re
import unicodedata
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from itertools import pairwise

from fedloom.spaces.base import BlockDiagram, Box, CellGraph, Drawing

MARGIN, GAP = 24, 18
FONT = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, LIGHT_PAPER, DARK_PAPER = "#1c1c1c", "#ffffff", "#16181d"
DARK = f".fl-paper{{fill:{DARK_PAPER}}}.fl-ink{{fill:#e8e8e8}}.fl-line{{stroke:#9a9a9a}}.fl-tip{{fill:#9a9a9a}}"
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Kind:
    """A kind of operation: what its labels look like, its name in the legend, its colours and the dashes of its lines."""

    pattern: str
    name: str
    colour: str
    tint: str
    dashes: str = ""


OTHER = Kind("", "other", "#757575", "#e9e9e9")
KINDS = (
    Kind("none|zero", "none", "#757575", "#e9e9e9", "2 4"),
    Kind("skip|identity", "skip connection", "#a87400", "#f8e7c2", "9 4"),
    Kind("sep", "separable convolution", "#0072b2", "#cfe5f3"),
    Kind("dil", "dilated convolution", "#c95500", "#f9dcc8", "14 3"),
    Kind("max", "max pooling", "#00875f", "#cdebe0", "3 3"),
    Kind("avg|average|pool", "average pooling", "#ad5a88", "#f1d9e6", "10 3 3 3"),
    Kind("attention|transformer", "attention", "#ad5a88", "#f1d9e6"),
    Kind("3[x×]3", "3×3 kernel", "#0072b2", "#cfe5f3"),
    Kind("5[x×]5", "5×5 kernel", "#00875f", "#cdebe0"),
    Kind("7[x×]7", "7×7 kernel", "#c95500", "#f9dcc8"),
    Kind("1[x×]1", "1×1 kernel", "#a87400", "#f8e7c2"),
)


def kind_of(label: str) -> Kind:
    """By what the label says, so that an operation has the same colour in every picture."""
    return next((kind for kind in KINDS if re.search(kind.pattern, label.lower())), OTHER)


def draw(drawing: Drawing, title: str, subtitle: str = "") -> str:
    """The picture as the text of an SVG file."""
    sheet = Sheet()
    y = float(MARGIN)
    for text, size in ((title, 17), (subtitle, 12)):
        if text:
            sheet.text(MARGIN, y + size / 2, text, size, bold=size == 17, ink=True)
            y += size + 10
    y += GAP / 2
    if isinstance(drawing, BlockDiagram):
        y = _draw_blocks(sheet, drawing, y)
    else:
        for graph in drawing:
            y = _draw_cell(sheet, graph, y) + 2 * GAP
    _draw_legend(sheet, labels_of(drawing), y)
    return sheet.finish(title, _in_words(drawing))


def labels_of(drawing: Drawing) -> list[str]:
    if isinstance(drawing, BlockDiagram):
        return [box.label for _, boxes in drawing.stages for box in boxes]
    return [operation for graph in drawing for _, _, operation in graph.edges if operation]


def _in_words(drawing: Drawing) -> str:
    """The same for those who listen."""
    if isinstance(drawing, BlockDiagram):
        rows = [f"{title}: " + "; ".join(f"{box.label} ({box.detail})" for box in boxes) for title, boxes in drawing.stages]
    else:
        rows = []
        for graph in drawing:
            edges = (f"{graph.nodes[a]} to {graph.nodes[b]}{f' by {operation}' if operation else ''}" for a, b, operation in graph.edges)
            rows.append(f"{graph.title}: " + "; ".join(edges))
    return ". ".join(rows)


# -- paper and pens ----------------------------------------------------------------
class Sheet:
    """Elements as they are drawn, and how far they reach."""

    def __init__(self) -> None:
        self.elements: list[ET.Element] = []
        self.width = self.height = 0.0

    def add(self, tag: str, **attributes: object) -> ET.Element:
        named = {name.rstrip("_").replace("_", "-"): _number(value) for name, value in attributes.items() if value != ""}
        self.elements.append(ET.Element(tag, named))
        return self.elements[-1]

    def reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def text(self, x: float, y: float, text: str, size: int = 12, anchor: str = "start", bold: bool = False, ink: bool = False) -> None:
        """Text whose middle is at height ``y``. ink: it stands on the paper, and turns light on dark paper."""
        dark, weight = "fl-ink" if ink else "", "600" if bold else ""
        # A third of the size below the middle; not every program knows dominant-baseline.
        element = self.add("text", x=x, y=y + 0.35 * size, font_size=size, text_anchor=anchor, font_weight=weight, fill=INK, class_=dark)
        element.text = _clean(text)
        right = {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor]
        self.reach(x + right * width_of(text, size, bold), y + size)

    def box(self, x: float, y: float, width: float, height: float, kind: Kind | None = None, radius: float = 6) -> None:
        """With its top left corner at (x, y); without a kind a plain one."""
        fill, stroke = (kind.tint, kind.colour) if kind else ("#ececec", "#757575")
        self.add("rect", x=x, y=y, width=width, height=height, rx=radius, fill=fill, stroke=stroke, stroke_width=1.2)
        self.reach(x + width, y + height)

    def line(self, path: str, tip: tuple[float, float], kind: Kind | None = None) -> None:
        """A line that ends as an arrow pointing right; without a kind a thin one."""
        stroke, dashes = (kind.colour, kind.dashes) if kind else ("#757575", "")
        wide, on_paper = (2, "") if kind else (1.2, "fl-line")
        self.add("path", d=path, fill="none", stroke=stroke, stroke_width=wide, stroke_dasharray=dashes, class_=on_paper)
        x, y = tip
        self.add("path", d=f"M{x:g} {y:g}l-7 -3.5v7z", fill=stroke, class_="" if kind else "fl-tip")

    def finish(self, title: str, description: str) -> str:
        width, height = self.width + MARGIN, self.height + MARGIN
        size = {"width": _number(width), "height": _number(height)}
        root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, "viewBox": f"0 0 {size['width']} {size['height']}"})
        root.attrib |= {"role": "img", "font-family": FONT}
        for tag, text in (("title", title), ("desc", description), ("style", f"@media (prefers-color-scheme: dark){{{DARK}}}")):
            ET.SubElement(root, tag).text = _clean(text)
        ET.SubElement(root, "rect", {**size, "fill": LIGHT_PAPER, "class": "fl-paper"})
        root.extend(self.elements)
        ET.indent(root)
        return ET.tostring(root, encoding="unicode") + "\n"


def width_of(text: str, size: float, bold: bool = False) -> float:
    """About how wide a text is, rather too much: the reader's font is not known here."""
    return size * (1.1 if bold else 1) * sum(map(_width, text))


def _width(letter: str) -> float:
    if letter in "→mwMW@%" or unicodedata.east_asian_width(letter) in "WF":
        return 1.05
    return 0.75 if letter.isupper() else 0.62


def _number(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def _clean(text: str) -> str:
    """Without what no XML file may hold; the rest is escaped on writing."""
    return NOT_XML.sub("\ufffd", text)


def _draw_legend(sheet: Sheet, labels: list[str], y: float) -> None:
    present = {kind_of(label) for label in labels}
    x, right = float(MARGIN), max(sheet.width, 480.0)
    for kind in [kind for kind in (*KINDS, OTHER) if kind in present]:
        wide = 30 + width_of(kind.name, 12) + GAP
        if x > MARGIN and x + wide > right:
            x, y = float(MARGIN), y + 24
        sheet.box(x, y + 4, 22, 12, kind, radius=3)
        sheet.text(x + 30, y + 10, kind.name, 12, ink=True)
        x += wide


# -- blocks ------------------------------------------------------------------------
LOW, HIGH = 42, 100  # heights of a box of no width and of the full width


def _draw_blocks(sheet: Sheet, diagram: BlockDiagram, y: float) -> float:
    """A row per stage; boxes of one width, each as high as its block is wide."""
    boxes = [box for _, row in diagram.stages for box in row]
    wide = max([90.0, *(max(width_of(box.label, 13, bold=True), width_of(box.detail, 11)) + 16 for box in boxes)])
    left = MARGIN + max([0.0, *(width_of(title, 12) for title, _ in diagram.stages)]) + GAP

    def height(box: Box) -> float:
        return LOW + (HIGH - LOW) * min(max(box.share, 0.0), 1.0)

    rows = []  # where each row begins and ends, for the arrows from one to the next
    for title, row in diagram.stages:
        tall = max([float(LOW), *map(height, row)])
        middle = y + tall / 2
        sheet.text(MARGIN, middle, title, 12, ink=True)
        for place, box in enumerate(row):
            x = left + place * (wide + GAP)
            if place:
                sheet.line(f"M{x - GAP:g} {middle:g}H{x - 4:g}", (x, middle))
            sheet.box(x, middle - height(box) / 2, wide, height(box), kind_of(box.label))
            sheet.text(x + wide / 2, middle - 8.5, box.label, 13, "middle", bold=True)
            sheet.text(x + wide / 2, middle + 8.5, box.detail, 11, "middle")
        if row:
            rows.append((middle, y + tall, left + len(row) * (wide + GAP) - GAP))
        y += tall + GAP
    for (middle, bottom, right), (below, _, _) in pairwise(rows):
        turn, start = bottom + GAP / 2, left - GAP
        corner = f"M{right:g} {middle:g}h4q6 0 6 6V{turn - 6:g}q0 6 -6 6H{start + 6:g}q-6 0 -6 6V{below - 6:g}q0 6 6 6H{left - 4:g}"
        sheet.line(corner, (left, below))
        sheet.reach(right + 10, bottom)
    return y + GAP / 2


# -- cells -------------------------------------------------------------------------
NODE, LANE, PILL, CURVE = 30, 30, 22, 52  # height of a node, distance of lanes, height of a label, length of a curve


def _draw_cell(sheet: Sheet, graph: CellGraph, y: float) -> float:
    """Nodes in layers from left to right. Each edge has a lane to itself for as long as it runs, so labels cannot meet."""
    sheet.text(MARGIN, y + 8, graph.title, 14, bold=True, ink=True)
    layers = _layers(graph)
    rows = _rows(layers)
    lanes = _lanes(graph, layers, rows)
    used = [*rows, *lanes]
    centre = y + 30 + LANE / 2 - min(used) * LANE

    columns = range(max(layers) + 1)
    widths = [max(width_of(graph.nodes[n], 13, bold=True) + 16 for n, layer in enumerate(layers) if layer == column) for column in columns]
    pills = [max([16.0, *(width_of(text, 11) + 14 for _, b, text in graph.edges if layers[b] == column and text)]) for column in columns]
    lefts = [float(MARGIN)]
    for column in columns[1:]:
        lefts.append(lefts[-1] + widths[column - 1] + 2 * CURVE + pills[column])

    def port(node: int, edge: int, side: int) -> float:
        """Where an edge touches its node: edges side by side, in the order of their lanes."""
        touching = sorted((lanes[i], i) for i, ends in enumerate(graph.edges) if ends[side] == node)
        step = min(5.0, (NODE - 8) / len(touching))
        return centre + rows[node] * LANE + step * (touching.index((lanes[edge], edge)) - (len(touching) - 1) / 2)

    labels = []
    for edge, (a, b, operation) in enumerate(graph.edges):
        kind = kind_of(operation) if operation else None
        start, end, level = lefts[layers[a]] + widths[layers[a]], lefts[layers[b]], centre + lanes[edge] * LANE
        leaves, arrives = port(a, edge, 0), port(b, edge, 1)
        begin, stop, half = start + CURVE, end - CURVE, CURVE / 2
        path = (
            f"M{start:g} {leaves:g}C{start + half:g} {leaves:g} {begin - half:g} {level:g} {begin:g} {level:g}H{stop:g}"
            f"C{stop + half:g} {level:g} {end - half:g} {arrives:g} {end - 5:g} {arrives:g}"
        )
        sheet.line(path, (end, arrives), kind)
        if kind:
            labels.append((stop - pills[layers[b]] / 2, level, operation, kind))
    for x, level, operation, kind in labels:  # after all lines, so that none runs over a label
        wide = width_of(operation, 11) + 14
        sheet.box(x - wide / 2, level - PILL / 2, wide, PILL, kind, radius=PILL / 2)
        sheet.text(x, level, operation, 11, "middle")
    for node, name in enumerate(graph.nodes):
        wide, level = widths[layers[node]], centre + rows[node] * LANE
        sheet.box(lefts[layers[node]], level - NODE / 2, wide, NODE)
        sheet.text(lefts[layers[node]] + wide / 2, level, name, 13, "middle", bold=True)
    return centre + max(used) * LANE + LANE / 2


def _layers(graph: CellGraph) -> list[int]:
    """For each node the number of edges on the longest way to it."""
    layers = [0] * len(graph.nodes)
    for node in range(len(graph.nodes)):  # in topological order
        layers[node] = max([layers[a] + 1 for a, b, _ in graph.edges if b == node], default=0)
    return layers


def _rows(layers: list[int]) -> list[int]:
    """For each node its place above (negative) or below the middle, in lanes; those of one layer two lanes apart."""
    members = [[node for node, other in enumerate(layers) if other == layer] for layer in layers]
    return [2 * same.index(node) - (len(same) - 1) for node, same in enumerate(members)]


def _lanes(graph: CellGraph, layers: list[int], rows: list[int]) -> list[int]:
    """For each edge a lane that no other edge uses between the same layers and no node on its way stands in, near its ends.

    Short edges choose first, so that long ones pass outside of them.
    """
    lanes = [0] * len(graph.edges)
    taken: set[tuple[int, int]] = set()  # (lane, gap between two layers)
    nodes = set(zip(rows, layers, strict=True))
    order = sorted(range(len(graph.edges)), key=lambda e: (layers[graph.edges[e][1]] - layers[graph.edges[e][0]], e))
    most = 2 * (len(graph.edges) + len(graph.nodes))
    for number, edge in enumerate(order):
        a, b, _ = graph.edges[edge]
        wanted, side = (rows[a] + rows[b]) / 2, 1 if number % 2 else -1
        for lane in sorted(range(-most, most + 1), key=lambda lane: (abs(lane - wanted), -side * lane)):
            gaps = {(lane, gap) for gap in range(layers[a], layers[b])}
            if not gaps & taken and not nodes & {(lane, layer) for layer in range(layers[a] + 1, layers[b])}:
                taken |= gaps
                lanes[edge] = lane
                break
    return lanes
