"""Every client's architecture, small; and large where there are few."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.core.architecture import Architecture
from fedloom.core.errors import FedloomError
from fedloom.core.result import ClientResult
from fedloom.report.drawing import KINDS, OTHER, Kind, draw, kind_of, labels_of
from fedloom.report.page.blocks import folded, missing, scrolling
from fedloom.report.page.html import Html, tag
from fedloom.report.view import RunView
from fedloom.report.words import count, percent, plain, points
from fedloom.spaces.base import BlockDiagram, Box, Drawing

LARGE = 16  # clients whose architectures are also drawn large; of more only the best, the middle and the last
DENSE = 40  # clients whose small drawings are smaller still
WIDE, TALL, GAP = 13, 16, 2  # of a block in a small drawing


def architectures_block(run: RunView, gained: dict[str, float]) -> list[Html]:
    if not run.clients:
        return [missing("No client has its personal model yet, so no client has an architecture of its own.")]
    if run.space is None:
        return [missing(run.no_space)]
    drawings = {}
    for text in {client.architecture for client in run.clients}:
        try:
            run.space.check(Architecture.parse(text))
            drawings[text] = run.space.drawing(Architecture.parse(text))
        except FedloomError as error:
            return [missing(f"The architectures of this run do not fit its space: {error}.")]
    kinds = {kind_of(label) for drawing in drawings.values() for label in labels_of(drawing)}
    legend = tag(
        "ul", *(_legend_item(kind) for kind in (*KINDS, OTHER) if kind in kinds), class_="legend", aria_label="Colours of operations"
    )
    shared = len(drawings) == 1 and len(run.clients) > 1
    cards = [_card(client, drawings[client.architecture], gained) for client in run.by_accuracy[: 0 if shared else None]]
    if shared:
        client = run.clients[0]
        small = miniature(drawings[client.architecture], "everybody")
        cards = [tag("li", tag("strong", "everybody"), small, tag("span", f"{count(client.parameters)} parameters"), class_="card")]
    return [legend, tag("ul", *cards, class_="cards dense" if len(cards) > DENSE else "cards"), *_large(run, drawings)]


def _legend_item(kind: Kind) -> Html:
    return tag("li", tag("span", class_="swatch", style=f"background:{kind.colour}", aria_hidden="true"), kind.name)


def _rows(drawing: Drawing) -> list[list[Box]]:
    """Rows of boxes: stages, or cells whose edges are boxes."""
    if isinstance(drawing, BlockDiagram):
        return [list(boxes) for _, boxes in drawing.stages if boxes]
    return [
        [Box(operation, f"{graph.nodes[a]} to {graph.nodes[b]}", 0.8) for a, b, operation in graph.edges if operation] for graph in drawing
    ]


def _card(client: ClientResult, drawing: Drawing, gained: dict[str, float]) -> Html:
    own = f", {points(gained[client.name])} over local" if client.name in gained else ""
    small = f"{percent(client.test_accuracy)}{own}"
    size = f"{count(client.parameters)} parameters"
    return tag(
        "li",
        tag("strong", plain(client.name)),
        miniature(drawing, plain(client.name)),
        tag("span", small),
        tag("span", size),
        class_="card",
    )


def miniature(drawing: Drawing, name: str) -> Html:
    """A row for each stage (or cell), a bar for each block (or edge): coloured by operation, as high as the block is wide."""
    rows = _rows(drawing)
    paths: dict[str, list[str]] = {}
    for y, row in enumerate(rows):
        for x, box in enumerate(row):
            high = round(5 + (TALL - 5) * min(max(box.share, 0), 1))
            place = f"M{x * (WIDE + GAP)} {y * (TALL + GAP) + (TALL - high) // 2}h{WIDE}v{high}h-{WIDE}z"
            paths.setdefault(kind_of(box.label).colour, []).append(place)
    drawn = "".join(f'<path fill="{colour}" d="{"".join(places)}"/>' for colour, places in paths.items())
    width, height = max((len(row) for row in rows), default=1) * (WIDE + GAP), max(len(rows), 1) * (TALL + GAP)
    words = "; ".join(f"{len(row)} in row {number}" for number, row in enumerate(rows, 1))
    label = str(tag("i", title=f"Architecture of {name}: {words}"))[len('<i title="') : -len('"></i>')]
    return Html(f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{label}">{drawn}</svg>')


def _large(run: RunView, drawings: dict[str, Drawing]) -> list[Html]:
    ranked = run.by_accuracy
    chosen: Sequence[ClientResult] = ranked
    if len(ranked) > LARGE:
        chosen = [ranked[0], ranked[len(ranked) // 2], ranked[-1]]
    if len(drawings) == 1:
        chosen = chosen[:1]
    blocks = []
    for client in chosen:
        numbers = f"{client.parameters:,} parameters, {client.macs:,} multiply-accumulates"
        who = "Everybody" if len(drawings) == 1 else plain(client.name)
        picture = draw(drawings[client.architecture], who, numbers)
        about = tag("p", "Its id: ", tag("code", client.architecture, class_="long"))
        blocks.append(folded(f"{who}, drawn large", scrolling(Html(picture), f"Architecture of {who}"), about))
    rest = tag("p", "The best, the middle and the last client are drawn large; fedloom draw draws any other.", class_="small")
    return [tag("div", *blocks, class_="large"), *([rest] if len(ranked) > LARGE and len(drawings) > 1 else [])]
