"""A run, or one of its clients, in the terminal: tables, and an architecture drawn with characters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedloom.core.result import LedgerEntry, mean_and_std
from fedloom.report.anchor import anchor_line
from fedloom.report.terminal.sparks import bar, spark_line
from fedloom.report.words import AT_SITES, many, one_class_words, privacy_words
from fedloom.spaces.base import BlockDiagram, CellGraph, Drawing

WIDTH = 24  # characters of the widest block
ROUNDS = 60  # characters of a line of rounds


def run_view(card: Mapping[str, Any], entries: Sequence[LedgerEntry]) -> Iterator[RenderableType]:
    """A run: how good, round by round and client by client, and where time and bytes went. card: result.json."""
    state = "finished" if card["finished"] else "not finished"
    what = f"{card['method']} on {card['space']}, {card['dataset']}, seed {card['seed']}"
    yield Text(f"{what}: {many(card['rounds'], 'round')}, {state}", style="bold")
    by_round: dict[int, list[float]] = {}
    for entry in entries:
        if not entry.final and entry.test_accuracy is not None:
            by_round.setdefault(entry.round, []).append(entry.test_accuracy)
    means = [mean_and_std(values)[0] or 0.0 for _, values in sorted(by_round.items())]
    if means:
        yield Text(f"accuracy by round  {spark_line(means, ROUNDS)}  {means[0]:.1%} -> {means[-1]:.1%}")
    else:
        yield Text("accuracy by round  there is none: no round had an accuracy that was written down")
    yield _clients(card)
    if words := one_class_words(card.get("one_class", ())):
        yield Text(words)
    if line := anchor_line(entries, card["protocol"]):
        yield Text(line)
    cost = card["cost"]
    whole = sum(cost["stages"].values()) or 1.0
    stages = Table("stage", "seconds", "", title="time")
    for stage, seconds in sorted(cost["stages"].items(), key=lambda pair: -pair[1]):
        stages.add_row(stage, f"{seconds:,.1f}", bar(seconds / whole, 20))
    yield stages
    left = ", ".join(card["uploads"]) or "nothing"
    yield Text(f"What left the clients: {left}; {cost['bytes_up'] / 1e6:,.1f} MB up, {cost['bytes_down'] / 1e6:,.1f} MB down")
    if words := privacy_words(card.get("privacy", {})):
        yield Text(words)


def _clients(card: Mapping[str, Any]) -> RenderableType:
    clients = card["clients"]
    if not clients:
        return Text(AT_SITES if card["finished"] else "There are no personal models yet.")
    table = Table("client", "test accuracy", "", "parameters", "MACs", title="personal models")
    for client in sorted(clients, key=lambda client: -client["test_accuracy"]):
        accuracy = client["test_accuracy"]
        table.add_row(client["name"], f"{accuracy:.1%}", bar(accuracy, 20), f"{client['parameters']:,}", f"{client['macs']:,}")
    return table


def client_view(name: str, entries: Sequence[LedgerEntry], drawing: Drawing | None, architecture: str) -> Iterator[RenderableType]:
    """One client: its participations and its architecture. entries: its own; drawing: of its personal model, if the file is there."""
    yield Text(name, style="bold")
    table = Table("round", "test accuracy", "validation", "MB up", "seconds", title="participations")
    for entry in entries:
        known = ["" if value is None else f"{value:.1%}" for value in (entry.test_accuracy, entry.validation_accuracy)]
        which = "final" if entry.final else str(entry.round + 1)
        table.add_row(which, *known, f"{entry.bytes_up / 1e6:.2f}", f"{sum(entry.seconds.values()):.1f}")
    yield table
    if drawing is None:
        yield Text(architecture or "It has no personal model yet.")
        return
    yield Text(architecture)
    yield Text(text_drawing(drawing))


def text_drawing(drawing: Drawing) -> str:
    """Blocks as bars as wide as they are against the widest; cells as lists of edges into each node."""
    if isinstance(drawing, BlockDiagram):
        return "\n".join(_blocks(drawing))
    return "\n\n".join("\n".join(_cell(graph)) for graph in drawing)


def _blocks(diagram: BlockDiagram) -> Iterator[str]:
    labels = max((len(box.label) for _, boxes in diagram.stages for box in boxes), default=0)
    for title, boxes in diagram.stages:
        yield title
        for number, box in enumerate(boxes):
            branch = "└─" if number == len(boxes) - 1 else "├─"
            yield f"  {branch} {box.label.ljust(labels)} {bar(max(box.share, 1 / (8 * WIDTH)), WIDTH)} {box.detail}".rstrip()


def _cell(graph: CellGraph) -> Iterator[str]:
    yield graph.title
    for place, node in enumerate(graph.nodes):
        into = [(start, operation) for start, end, operation in graph.edges if end == place]
        if not into:
            yield f"  {node}"
        for number, (start, operation) in enumerate(into):
            head = node if not number else " " * len(node)
            yield f"  {head} {'<-' if not number else '  '} {graph.nodes[start]}: {operation}"
