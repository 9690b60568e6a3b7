"""Accuracy against simulated time, and the time to a given accuracy (PerFedRLNAS, Table 2 and Fig. 3).

Both come from the ledger: a round takes as long as its slowest participant on its simulated hardware, and after it the accuracy is the mean
over the clients seen so far of what each achieved at its latest participation, on test data. Final participations are no rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from fedloom.core.errors import InvalidConfig
from fedloom.core.result import LedgerEntry, mean_and_std
from fedloom.engine.store import Store


@dataclass(frozen=True)
class Moment:
    """After a round."""

    round: int  # completed
    seconds: float  # simulated, since the beginning
    accuracy: float
    clients: int  # seen so far


def pace(store: Store) -> list[Moment]:
    moments = course(store.read_ledger())
    if not moments:
        raise InvalidConfig(f"{store.folder} has no rounds to look at: its ledger holds no participation but final ones")
    return moments


def course(entries: Iterable[LedgerEntry]) -> list[Moment]:
    seconds, latest, moments = 0.0, {}, []
    rounds = groupby((entry for entry in entries if not entry.final), key=lambda entry: entry.round)
    for number, group in rounds:
        slowest = 0.0
        for entry in group:
            slowest = max(slowest, entry.simulated_seconds)
            if entry.test_accuracy is not None:
                latest[entry.client] = entry.test_accuracy
        seconds += slowest
        mean, _ = mean_and_std(list(latest.values()))
        moments.append(Moment(number + 1, round(seconds, 4), mean or 0.0, len(latest)))
    return moments


def reached(moments: Sequence[Moment], accuracy: float) -> Moment | None:
    """The first moment at which it is; chance alone may carry it there once."""
    return next((moment for moment in moments if moment.accuracy >= accuracy), None)
