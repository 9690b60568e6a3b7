"""All clients in this process, one after the other. A simulator: it also reads what clients keep to themselves, for its tables."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.core.boundary import release
from fedloom.core.client_site import ClientData, ClientSite
from fedloom.core.errors import ClientFailed, FedloomError
from fedloom.core.hardware import Hardware
from fedloom.core.messages import FINISH, Instruction, Report, payload_bytes
from fedloom.core.method import Answer, Method
from fedloom.core.result import LedgerEntry
from fedloom.core.settings import setting
from fedloom.engine.store import Store

NONE: Mapping[str, Hardware] = {}


@dataclass(frozen=True)
class InlineSettings:
    device: str = setting("auto", "where clients train: cpu, cuda, or auto for a GPU if there is one", choices=("auto", "cpu", "cuda"))
    threads: int = setting(0, "CPU threads; results are equal bit for bit only for equal thread counts; 0 leaves it to torch", low=0)


class InlineLink:
    """A client exists in memory only while it answers; between rounds its memory lies on disk."""

    def __init__(
        self,
        method: Method[Any],
        clients: Sequence[str],
        data_of: Callable[[str], ClientData],
        store: Store,
        description: dict[str, Any],
        record: Callable[[LedgerEntry], None],
        hardware: Mapping[str, Hardware] = NONE,
        deadline: float = 0.0,
    ) -> None:
        self._method, self._clients, self._data_of, self._store = method, clients, data_of, store
        self._description, self._record = description, record
        self._hardware, self._deadline = hardware, deadline

    def clients(self) -> Sequence[str]:
        return self._clients

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        reports = [self._visit(instruction) for instruction in instructions]
        return [report for report in reports if report is not None]

    def _visit(self, instruction: Instruction) -> Report | None:
        """A client's report; nothing if it comes too late."""
        name, store = instruction.client, self._store
        hardware = self._hardware.get(name, Hardware())
        site = ClientSite(name, self._data_of(name), store.load_memory(name, instruction.round), hardware=hardware)
        answer = self._answer(instruction, site)
        released = release(answer.report, instruction, self._method.uploads)
        if answer.model is not None:
            store.save_model(name, answer.model, self._description)
        store.save_memory(name, instruction.round, answer.memory)
        diary, final, down = answer.diary, instruction.action == FINISH, payload_bytes(instruction)
        seconds = hardware.seconds(diary.trained_macs, down + released.bytes)
        late = not final and 0 < self._deadline < seconds
        self._record(
            LedgerEntry(
                client=name,
                round=instruction.round,
                final=final,
                bytes_down=down,
                bytes_up=released.bytes,
                uploads=tuple(sorted({*released.report.arrays, *released.report.facts})),
                seconds={stage: round(seconds, 4) for stage, seconds in site.clock.seconds.items()},
                architecture=diary.architecture,
                validation_accuracy=diary.validation_accuracy,
                test_accuracy=diary.test_accuracy,
                trained_macs=diary.trained_macs,
                evaluated_architectures=diary.evaluated_architectures,
                peak_memory_mb=diary.peak_memory_mb,
                process_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
                notes=diary.notes,
                tier=hardware.tier,
                simulated_seconds=round(min(seconds, self._deadline) if late else seconds, 4),
                late=late,
            )
        )
        return None if late else released.report

    def _answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        who = f"{instruction.client}, round {instruction.round}"
        try:
            answer = self._method.answer(instruction, site)
        except FedloomError:
            raise
        except Exception as error:
            raise ClientFailed(f"{who}: {type(error).__name__}: {error}. --trace shows where", client=instruction.client) from error
        if instruction.action == FINISH and (answer.model is None or answer.report.arrays or answer.report.facts):
            raise ClientFailed(f"{who}: the final participation must give a personal model and send nothing", client=instruction.client)
        return answer
