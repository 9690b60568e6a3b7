"""Accuracy against simulated time, and the time to a given accuracy (PerFedRLNAS, Table 2 and Fig. 3).

Both come from the ledger: a round takes as long as its slowest participant on its simulated hardware, and after it the accuracy is the mean
over the clients seen so far of what each achieved at its latest participation, on test data. Final participations are no rounds. Training,
scoring and messages take time; runs of earlier versions did not count scoring, which made searching clients look too fast.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.core.errors import InvalidConfig
from fedloom.core.progress import Moment, Progress
from fedloom.engine.store import Store


def pace(store: Store) -> list[Moment]:
    moments = Progress.of(store.read_ledger()).moments
    if not moments:
        raise InvalidConfig(f"{store.folder} has no rounds to look at: its ledger holds no participation but final ones")
    return moments


def too_fast(store: Store) -> bool:
    """Whether clients scored architectures of which the ledger does not say what they took, as in runs of earlier versions."""
    return any(entry.evaluated_architectures and not entry.scored_macs for entry in store.read_ledger() if not entry.final)


def reached(moments: Sequence[Moment], accuracy: float) -> Moment | None:
    """The first moment at which it is; chance alone may carry it there once."""
    return next((moment for moment in moments if moment.accuracy >= accuracy), None)
