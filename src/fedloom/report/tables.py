"""A result, or a search space, in the terminal."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from fedloom.core.result import RunResult, mean_and_std
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
    """Three lines: how good, how personal, at what cost."""
    mean, std = mean_and_std([client.test_accuracy for client in result.clients])
    ledger = result.ledger
    uploads = ", ".join(sorted(ledger.uploads)) or "nothing"
    kinds = len({client.architecture for client in result.clients})
    selected = " (selected on test data, as the papers did)" if result.protocol == "paper" else ""
    return (
        f"{result.method} on {result.dataset}: test accuracy {mean or 0:.2%} ± {std or 0:.2%} over {len(result.clients)} clients"
        f"{selected}\n"
        f"{kinds} different architecture{'s' * (kinds != 1)}; what left the clients: {uploads}\n"
        f"{result.seconds:.1f} s, {ledger.bytes_up / 1e6:.1f} MB up, {ledger.bytes_down / 1e6:.1f} MB down, "
        f"{ledger.trained_macs / 1e9:.3g} GMAC trained, {ledger.evaluated_architectures} architectures scored"
    )


def space_card(supernet: Supernet[Any]) -> dict[str, Any]:
    """A search space in numbers: how many architectures, what they and the supernet weigh, and what each gene decides."""
    space = supernet.space
    named = {name: space.cost(architecture) for name, architecture in space.named.items()}
    return {
        "space": space.name,
        "genes": len(space.genes),
        "architectures": space.architectures,
        "supernet_parameters": sum(math.prod(shape) for shape in supernet.shapes.values()),
        "named": {name: {"parameters": cost.parameters, "macs": cost.macs} for name, cost in named.items()},
        "choices": {gene.name: list(gene.values) for gene in space.genes},
    }


def space_table(card: dict[str, Any]) -> Table:
    """The card for reading; genes with equal choices share a line."""
    table = Table("", "", title=card["space"], show_header=False)
    table.add_row("genes", str(card["genes"]))
    table.add_row("architectures", f"{card['architectures']:.2e}")
    table.add_row("supernet", f"{card['supernet_parameters']:,} parameters")
    for name, cost in card["named"].items():
        table.add_row(name, f"{cost['parameters']:,} parameters, {cost['macs']:,} MACs")
    alike: dict[tuple[str, str], int] = {}
    for gene, values in card["choices"].items():
        line = (gene.partition(" of ")[0], ", ".join(map(str, values)))
        alike[line] = alike.get(line, 0) + 1
    for (kind, values), count in alike.items():
        table.add_row(f"{kind} ({count} genes)", values)
    return table
