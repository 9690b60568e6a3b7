"""The memory that clients have and what training their networks takes (PerFedRLNAS, Yao and Li, AAAI 2024, Fig. 4).

From the ledger, for any method: what a network needs is worked out as everywhere (weights, momenta, gradients, activations of a
batch), what a client has is its tier's ``hardware.memory_mb``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fedloom.assemble import Reopened
from fedloom.config import tier_of_each
from fedloom.core.errors import InvalidConfig
from fedloom.core.hardware import Hardware
from fedloom.core.result import LedgerEntry


@dataclass(frozen=True)
class Use:
    """Of one client."""

    client: str
    tier: int
    memory_mb: float  # it has
    rounds_mb: float  # most that training in a round took, or would have taken
    network_mb: float  # training of its own network took, at its last participation
    participations: int  # in rounds
    over: int  # of them with a network that did not fit


@dataclass(frozen=True)
class MemoryUse:
    clients: tuple[Use, ...]  # who took part, by the memory they have
    over_by_round: tuple[float, ...]  # share of a round's participants whose network did not fit


def memory_use(run: Reopened) -> MemoryUse:
    settings, store = run.settings, run.store
    hardware = tier_of_each(settings, run.federation.names)
    if not any(own.memory_mb for own in hardware.values()):
        cure = "Run with hardware.memory_mb=[…], megabytes for each tier"
        raise InvalidConfig(f"No client of {store.folder} has a memory limit. {cure}", key="hardware.memory_mb")
    found = used(store.read_ledger(), hardware)
    if not found.clients:
        raise InvalidConfig(f"{store.folder} has no participation to look at yet: its ledger is empty")
    return found


def used(entries: Iterable[LedgerEntry], hardware: Mapping[str, Hardware]) -> MemoryUse:
    """A client without a limit never has too little."""
    uses: dict[str, Use] = {}
    rounds: dict[int, list[bool]] = {}
    for entry in entries:
        own = hardware[entry.client]
        # Where its client noted a share of its memory, that decided whether the network fits: it may be measured, and a network that
        # did not fit was not trained at all.
        share = entry.notes.get("memory") if own.memory_mb else None
        needed = round(entry.peak_memory_mb if share is None else share * own.memory_mb, 6)
        use = uses.get(entry.client, Use(entry.client, own.tier, own.memory_mb, 0.0, 0.0, 0, 0))
        if entry.final:
            use = replace(use, network_mb=needed)
        else:
            over = bool(own.memory_mb) and needed > own.memory_mb
            rounds.setdefault(entry.round, []).append(over)
            use = replace(use, rounds_mb=max(use.rounds_mb, needed), participations=use.participations + 1, over=use.over + over)
        uses[entry.client] = use
    shares = tuple(sum(those) / len(those) for _, those in sorted(rounds.items()))
    return MemoryUse(tuple(sorted(uses.values(), key=lambda use: (use.memory_mb, use.client))), shares)
