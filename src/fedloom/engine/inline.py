"""All clients in this process.

Those of a round answer in turn, each until it asks for training or scores; what they ask for is done together, which a GPU does in about
the time that it needs for one of them (``training/together.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedloom.core.client_site import ClientData
from fedloom.core.machine import DEVICES
from fedloom.core.messages import Instruction, Report
from fedloom.core.method import Method
from fedloom.core.settings import setting
from fedloom.engine.base import ENGINES
from fedloom.engine.visit import ClientRecords, Visited, visit
from fedloom.training.together import answers

ON_A_GPU = 20  # clients at once


@dataclass(frozen=True)
class InlineSettings:
    device: str = setting("auto", "where clients train: cpu, cuda, mps (on a Mac), or auto: a CUDA GPU if there is one", choices=DEVICES)
    threads: int = setting(
        0, "CPU threads; 0: torch decides. Results are equal bit for bit only with equal thread counts", low=0, high=1024
    )
    together: int = setting(0, f"clients that are in memory and served at once; 0: {ON_A_GPU} on a GPU, 1 on a CPU", low=0, high=10_000)
    reference: bool = setting(
        False, "for comparisons: one client and one network at a time, sliced, full precision, nothing captured or reused"
    )

    def at_once(self, gpu: bool) -> int:
        return 1 if self.reference else self.together or (ON_A_GPU if gpu else 1)


@ENGINES.add("inline", InlineSettings, "all clients in this process; on a GPU those of a round train and score together")
class InlineLink:
    """A client exists in memory only while it answers."""

    def __init__(
        self,
        method: Method[Any],
        clients: Sequence[str],
        data_of: Callable[[str], ClientData],
        records: ClientRecords,
        stage: Callable[[str, str], None] | None = None,
        at_once: int = 1,
    ) -> None:
        """stage: told of every stage (client, stage) that begins; at_once: how many clients answer together."""
        self._method, self._clients, self._data_of, self._records, self._stage = method, clients, data_of, records, stage
        self.at_once = at_once

    def clients(self) -> Sequence[str]:
        return self._clients

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        reports: list[Report | None] = []
        for start in range(0, len(instructions), self.at_once):
            some = instructions[start : start + self.at_once]
            visits = answers([partial(self._visit, instruction) for instruction in some])
            reports += [self._records.keep(instruction, visited) for instruction, visited in zip(some, visits, strict=True)]
        return [report for report in reports if report is not None]

    def _visit(self, instruction: Instruction) -> Visited:
        entered = partial(self._stage, instruction.client) if self._stage else None
        return visit(self._method, instruction, self._data_of(instruction.client), *self._records.before(instruction), entered)
