"""Clients that are drawn for a round and are not there: switched off, in use, without a network (``hardware.dropout``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedloom.core.hardware import Hardware, there
from fedloom.core.messages import FINISH, Instruction, Report
from fedloom.engine.base import Link


class AbsentLink:
    """A link to simulated clients of whom some do not answer. They receive nothing, train nothing and have no line in the ledger. The
    final participation waits for everybody."""

    def __init__(self, link: Link, hardware: Mapping[str, Hardware], seed: int) -> None:
        self._link, self._hardware, self._seed, self.at_once = link, hardware, seed, link.at_once

    def clients(self) -> Sequence[str]:
        return self._link.clients()

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        return self._link.exchange([instruction for instruction in instructions if self._there(instruction)])

    def _there(self, asked: Instruction) -> bool:
        return asked.action == FINISH or there(self._hardware[asked.client], self._seed, asked.round, asked.client)


def with_absences(link: Link, hardware: Mapping[str, Hardware], seed: int) -> Link:
    """The link itself where everybody is always there."""
    return AbsentLink(link, hardware, seed) if any(own.dropout for own in hardware.values()) else link
