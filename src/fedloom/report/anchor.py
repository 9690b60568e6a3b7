"""The end of a search around an anchor, as the ledger's notes have it: who left the anchor, and what for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedloom.core.result import LedgerEntry, possible
from fedloom.report.words import many, signed


@dataclass(frozen=True)
class Settled:
    """A client that has its network. Losses are on the images that chose it; the anchor's is at the anchor's own fine-tuning rate."""

    name: str
    genes: int  # that differ from the anchor's
    architecture: str
    test_accuracy: float | None
    rate: float | None  # of fine-tuning; 0: untuned
    losses: tuple[float, float] | None  # of the anchor and of what was kept, where both were measured

    @classmethod
    def of(cls, entry: LedgerEntry) -> Settled | None:
        """Nothing of an entry that does not speak of an anchor."""
        notes = {name: value for name, value in entry.notes.items() if possible(value)}
        if not entry.final or "genes_from_anchor" not in notes:
            return None
        genes = round(notes["genes_from_anchor"])
        # Without finalists the prior is the best of the population. It is the anchor only where leaving one is leaving the other.
        same = "left_prior" in notes and (notes["left_prior"] > 0) == (genes > 0)
        losses = (notes["prior_loss"], notes["chosen_loss"]) if same and {"prior_loss", "chosen_loss"} <= notes.keys() else None
        known = entry.test_accuracy is not None and possible(entry.test_accuracy)
        return cls(entry.client, genes, entry.architecture, entry.test_accuracy if known else None, notes.get("finetune_rate"), losses)


@dataclass(frozen=True)
class Group:
    """Clients, and means over those of them that have the number; none where nobody has."""

    clients: tuple[Settled, ...]

    @property
    def genes(self) -> str:
        """How many differ from the anchor's; of somebody."""
        each = [client.genes for client in self.clients]
        low, high = min(each), max(each)
        return many(low, "gene") if low == high else f"{_mean(each):.1f} genes on average ({low} to {high})"

    @property
    def losses(self) -> tuple[float, float] | None:
        pairs = [client.losses for client in self.clients if client.losses]
        return (_mean([pair[0] for pair in pairs]), _mean([pair[1] for pair in pairs])) if pairs else None

    @property
    def without_losses(self) -> int:
        return sum(client.losses is None for client in self.clients)

    @property
    def test_accuracy(self) -> float | None:
        known = [client.test_accuracy for client in self.clients if client.test_accuracy is not None]
        return _mean(known) if known else None

    @property
    def architectures(self) -> int:
        return len({client.architecture for client in self.clients})

    @property
    def rates(self) -> list[tuple[float | None, int]]:
        """How many clients kept each, the most frequent first."""
        return Counter(client.rate for client in self.clients).most_common()


@dataclass(frozen=True)
class Departures:
    everybody: Group
    unknown: int  # clients that have their network and no note about an anchor

    @classmethod
    def of(cls, entries: Iterable[LedgerEntry]) -> Departures | None:
        """Of a ledger, or of its final entries; nothing without notes about an anchor."""
        final = {entry.client: Settled.of(entry) for entry in entries if entry.final}
        settled = tuple(one for _, one in sorted(final.items()) if one)
        return cls(Group(settled), len(final) - len(settled)) if settled else None

    @property
    def left(self) -> Group:
        return Group(tuple(client for client in self.everybody.clients if client.genes))

    @property
    def stayed(self) -> Group:
        return Group(tuple(client for client in self.everybody.clients if not client.genes))

    @property
    def counted(self) -> str:
        return f"{len(self.left.clients)} of {many(len(self.everybody.clients), 'client')} left the anchor"


def anchor_line(entries: Iterable[LedgerEntry], protocol: str) -> str:
    """The same in a line for the terminal; empty where there is no anchor."""
    found = Departures.of(entries)
    if not found:
        return ""
    if not found.left.clients:
        return found.counted
    line = f"{found.counted}, by {found.left.genes}"
    if losses := found.left.losses:
        line += f"; their {selecting(protocol)} loss {losses[0]:.3f} -> {losses[1]:.3f} (optimistic: the same images chose)"
    return line


def selecting(protocol: str) -> str:
    """Which images choose."""
    return "test" if protocol == "paper" else "validation"


def loss_change(losses: tuple[float, float] | None) -> tuple[str, str, str]:
    """Before, after and the difference, for a table."""
    if losses is None:
        return "–", "–", "–"
    return f"{losses[0]:.3f}", f"{losses[1]:.3f}", signed(losses[1] - losses[0], 3)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
