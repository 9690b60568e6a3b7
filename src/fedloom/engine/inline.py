"""All clients in this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedloom.core.client_site import ClientData
from fedloom.core.messages import Instruction, Report
from fedloom.core.method import Method
from fedloom.core.settings import setting
from fedloom.engine.base import ENGINES
from fedloom.engine.visit import ClientRecords, visit


@dataclass(frozen=True)
class InlineSettings:
    device: str = setting("auto", "where clients train: cpu, cuda, or auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))
    threads: int = setting(
        0, "CPU threads; 0: torch decides. Results are equal bit for bit only with equal thread counts", low=0, high=1024
    )


@ENGINES.add("inline", InlineSettings, "all clients in this process, one after the other")
class InlineLink:
    """A client exists in memory only while it answers."""

    at_once = 1

    def __init__(
        self,
        method: Method[Any],
        clients: Sequence[str],
        data_of: Callable[[str], ClientData],
        records: ClientRecords,
        stage: Callable[[str, str], None] | None = None,
    ) -> None:
        """stage: told of every stage (client, stage) that begins."""
        self._method, self._clients, self._data_of, self._records, self._stage = method, clients, data_of, records, stage

    def clients(self) -> Sequence[str]:
        return self._clients

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        reports = [self._visit(instruction) for instruction in instructions]
        return [report for report in reports if report is not None]

    def _visit(self, instruction: Instruction) -> Report | None:
        entered = partial(self._stage, instruction.client) if self._stage else None
        visited = visit(self._method, instruction, self._data_of(instruction.client), *self._records.before(instruction), entered)
        return self._records.keep(instruction, visited)
