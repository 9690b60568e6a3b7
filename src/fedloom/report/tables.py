"""A result in the terminal."""

from __future__ import annotations

from rich.table import Table

from fedloom.core.result import RunResult, mean_and_std

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
