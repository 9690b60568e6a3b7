"""A run's way to its accuracy, from its ledger: what had been reached after each round, and what it had cost by then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fedloom.core.result import LedgerEntry, mean_and_std


@dataclass(frozen=True)
class Moment:
    """After a round. ``accuracy``: mean over the clients seen so far of what each achieved at its latest participation, on test data."""

    round: int  # completed
    seconds: float  # simulated, since the beginning; a round takes as long as its slowest participant
    accuracy: float
    clients: int  # seen so far
    worked: float = 0.0  # seconds measured at all clients together
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass
class Progress:
    """Entries in the order of the ledger. Final participations are no rounds."""

    _closed: list[Moment] = field(default_factory=list)
    _latest: dict[str, float] = field(default_factory=dict)  # client -> accuracy
    _round: int = -1
    _before: float = 0.0  # simulated seconds of the rounds before this one
    _slowest: float = 0.0
    _worked: float = 0.0
    _up: int = 0
    _down: int = 0

    @classmethod
    def of(cls, entries: Iterable[LedgerEntry]) -> Progress:
        progress = cls()
        for entry in entries:
            progress.add(entry)
        return progress

    def add(self, entry: LedgerEntry) -> None:
        if entry.final:
            return
        if entry.round != self._round:
            self._closed += self._now()
            self._before, self._slowest, self._round = self._before + self._slowest, 0.0, entry.round
        self._slowest = max(self._slowest, entry.simulated_seconds)
        self._worked += sum(entry.seconds.values())
        self._up += entry.bytes_up
        self._down += entry.bytes_down
        if entry.test_accuracy is not None:
            self._latest[entry.client] = entry.test_accuracy

    @property
    def moments(self) -> list[Moment]:
        return [*self._closed, *self._now()]

    def _now(self) -> list[Moment]:
        """After the round that was added last; nothing before the first."""
        if self._round < 0:
            return []
        mean, _ = mean_and_std(list(self._latest.values()))
        simulated, worked = round(self._before + self._slowest, 4), round(self._worked, 4)
        return [Moment(self._round + 1, simulated, mean or 0.0, len(self._latest), worked, self._up, self._down)]
