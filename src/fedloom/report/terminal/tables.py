"""A result, or a search space, in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.table import Table

from fedloom.core.architecture import Architecture
from fedloom.core.result import RunResult, mean_and_std
from fedloom.report.anchor import anchor_line
from fedloom.report.words import one_class_words, privacy_words
from fedloom.supernets.base import Supernet

SHOWN_CLIENTS = 12


def client_table(result: RunResult) -> Table:
    """The clients' own models, best first; the middle of a long list is left out."""
    table = Table("client", "test accuracy", "validation", "parameters", "MACs", "train", "test", title="personal models")
    clients = sorted(result.clients, key=lambda client: -client.test_accuracy)
    half = SHOWN_CLIENTS // 2
    shown = clients if len(clients) <= SHOWN_CLIENTS else clients[:half] + clients[-half:]
    for index, client in enumerate(shown):
        if len(clients) > SHOWN_CLIENTS and index == half:
            table.add_row(f"… {len(clients) - SHOWN_CLIENTS} more", *[""] * 6)
        table.add_row(
            client.name,
            f"{client.test_accuracy:.1%}",
            f"{client.validation_accuracy:.1%}",
            f"{client.parameters:,}",
            f"{client.macs:,}",
            str(client.train_examples),
            str(client.test_examples),
        )
    return table


def summary(result: RunResult) -> str:
    """How good, how personal, who left an anchor if there is one, how private with noise, at what cost; a line each."""
    mean, std = mean_and_std([client.test_accuracy for client in result.clients])
    ledger = result.ledger
    uploads = ", ".join(sorted(ledger.uploads)) or "nothing"
    kinds = len({client.architecture for client in result.clients})
    more = [one_class_words(result.one_class), anchor_line(ledger.final.values(), result.protocol), privacy_words(result.privacy)]
    selected = " (selected on test data, as the papers did)" if result.protocol == "paper" else ""
    return (
        f"{result.method} on {result.dataset}: test accuracy {mean or 0:.2%} ± {std or 0:.2%} over {len(result.clients)} clients"
        f"{selected}\n"
        f"{kinds} different architecture{'s' * (kinds != 1)}; what left the clients: {uploads}\n"
        f"{''.join(f'{line}{chr(10)}' for line in more if line)}"
        f"{result.seconds:.1f} s, {ledger.bytes_up / 1e6:.1f} MB up, {ledger.bytes_down / 1e6:.1f} MB down, "
        f"{ledger.trained_macs / 1e9:.3g} GMAC trained, {ledger.evaluated_architectures} architectures scored"
    )


def space_card(supernet: Supernet[Any], latency_ms: Callable[[Architecture], float] | None = None) -> dict[str, Any]:
    """A search space in numbers: how many architectures, what they and the supernet weigh, and what each gene decides."""
    space = supernet.space
    parameters = sum(math.prod(shape) for shape in supernet.shapes.values())
    named: dict[str, dict[str, float]] = {}
    published: dict[str, dict[str, int]] = {}
    for name, architecture in space.named.items():
        cost = space.cost(architecture)
        named[name] = {"parameters": cost.parameters, "macs": cost.macs, "activations": cost.activations}
        if latency_ms:
            named[name]["latency_ms"] = latency_ms(architecture)
        published[name] = dict(zip(("parameters", "macs"), space.as_published(architecture), strict=True))
    return {
        "space": space.name,
        "image": asdict(space.image),
        "genes": len(space.genes),
        "architectures": space.architectures,
        "supernet_parameters": parameters,
        "named": named,
        "as_published": {"supernet_parameters": space.supernet_as_published() or parameters, "named": published},
        "choices": {gene.name: gene.shown for gene in space.genes},
    }


def space_table(card: dict[str, Any]) -> Table:
    """The card for reading; genes with equal choices share a line. Counts of the public implementation only where they differ."""
    table = Table("", "", title=card["space"], show_header=False)
    image = card["image"]
    kind = {1: "grey", 3: "colour"}.get(image["channels"], f"{image['channels']} channels")
    table.add_row("for images", f"{kind}, {image['size']} x {image['size']} pixels, {image['classes']} classes")
    table.add_row("genes", str(card["genes"]))
    table.add_row("architectures", f"{card['architectures']:.3g} ({card['architectures']:,})")
    theirs = card["as_published"]["supernet_parameters"]
    differs = theirs != card["supernet_parameters"]
    table.add_row("supernet", f"{card['supernet_parameters']:,} parameters" + f"; {theirs:,} as published" * differs)
    for name, cost in card["named"].items():
        line = f"{cost['parameters']:,} parameters"
        theirs = card["as_published"]["named"][name]["parameters"]
        line += f" ({theirs:,} as published)" if theirs != cost["parameters"] else ""
        line += f", {cost['macs']:,} MACs, {cost['activations']:,} activations"
        table.add_row(name, line + (f", {cost['latency_ms']:.1f} ms an image" if "latency_ms" in cost else ""))
    alike: dict[tuple[str, str], int] = {}
    for gene, values in card["choices"].items():
        row = (gene.partition(" of ")[0], ", ".join(map(str, values)))
        alike[row] = alike.get(row, 0) + 1
    for (kind, values), count in alike.items():
        table.add_row(f"{kind} ({count} gene{'s' * (count > 1)})", values)
    return table
