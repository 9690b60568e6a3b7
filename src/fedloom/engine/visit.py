"""One participation of one simulated client: the visit, wherever it takes place, and the records that are kept of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedloom.core.boundary import release
from fedloom.core.client_site import ClientData, ClientMemory, ClientSite, PersonalModel, Stopwatch
from fedloom.core.errors import ClientFailed, FedloomError
from fedloom.core.hardware import Hardware
from fedloom.core.judgement import Judgement
from fedloom.core.machine import process_memory_mb
from fedloom.core.messages import FINISH, Instruction, Report, field_bytes, field_shapes, payload_bytes
from fedloom.core.method import Answer, Method
from fedloom.core.result import LedgerEntry
from fedloom.engine.protection import Protection
from fedloom.engine.store import Store
from fedloom.engine.sums import Sums
from fedloom.training.together import own_seconds

NONE: Mapping[str, Hardware] = {}
Simulation = tuple[Method[Any], Callable[[str], ClientData]]  # the client half of a run: the method, and a client's data by name


@dataclass(frozen=True)
class Visited:
    answer: Answer
    seconds: Mapping[str, float]  # by stage
    process_memory_mb: float  # the highest so far, where the visit took place


def visit(
    method: Method[Any],
    instruction: Instruction,
    data: ClientData,
    memory: ClientMemory,
    hardware: Hardware,
    entered: Callable[[str], None] | None = None,
) -> Visited:
    """entered: told of every stage that begins, and by an empty name that it is over."""
    site = ClientSite(instruction.client, data, memory, Stopwatch(entered, own_seconds), hardware)
    who = f"{instruction.client}, round {instruction.round}"
    try:
        answer = method.at(instruction.client).answer(instruction, site)
        answer = replace(answer, diary=replace(answer.diary, scored_macs=site.work.scored_macs))
    except FedloomError:
        raise
    except Exception as error:
        raise ClientFailed(f"{who}: {type(error).__name__}: {error}. --trace shows where", client=instruction.client) from error
    if instruction.action == FINISH and (answer.model is None or answer.report.arrays or answer.report.facts):
        raise ClientFailed(f"{who}: the final participation must give a personal model and send nothing", client=instruction.client)
    return Visited(answer, site.clock.seconds, process_memory_mb())


class ClientRecords:
    """Between rounds a client's memory and model lie on disk; a simulator also writes down what clients keep to themselves."""

    def __init__(
        self,
        method: Method[Any],
        store: Store,
        description: dict[str, Any],
        record: Callable[[LedgerEntry], None],
        hardware: Mapping[str, Hardware] = NONE,
        deadline: float = 0.0,
        protection: Protection | None = None,
        sums: Sums | None = None,
        judge: Callable[[str, PersonalModel], Judgement] | None = None,
    ) -> None:
        """sums: what leaves in place of reports, if single ones do not; judge: what a client's personal model is worth there."""
        self._method, self._store, self._description, self._record = method, store, description, record
        self._hardware, self._deadline, self._protection, self._sums, self._judge = hardware, deadline, protection, sums, judge

    def before(self, instruction: Instruction) -> tuple[ClientMemory, Hardware]:
        """What a client finds again, and what it computes with."""
        name = instruction.client
        return self._store.load_memory(name, instruction.round), self._hardware.get(name, Hardware())

    def keep(self, instruction: Instruction, visited: Visited) -> Report | None:
        """A client's report as it passed the door; nothing if it comes too late."""
        report, entry = self.released(instruction, visited)
        self._store.save_memory(instruction.client, instruction.round, visited.answer.memory)
        self._record(entry)
        return None if entry.late else report

    def released(self, instruction: Instruction, visited: Visited) -> tuple[Report, LedgerEntry]:
        """A client's report as it passed the door, and its line in the ledger; the personal model, if there is one, is saved."""
        answer, name = visited.answer, instruction.client
        report = self._protection.of(answer.report) if self._protection else answer.report
        released = release(report, instruction, self._method.uploads)
        judged = self._judge(name, answer.model) if self._judge and answer.model is not None else None
        if answer.model is not None:
            own = {"temperature": judged.temperature, "threshold": judged.threshold} if judged else {}
            self._store.save_model(name, answer.model, {**self._description, **own})
        diary, final, down = answer.diary, instruction.action == FINISH, payload_bytes(instruction)
        hardware = self._hardware.get(name, Hardware())
        fields, shapes = field_bytes(released.report), field_shapes(released.report)
        if self._sums:
            both = instruction, released.report
            fields, shapes = self._sums.bytes_of(*both), self._sums.shapes_of(*both)
            released = replace(released, bytes=sum(fields.values()))
        seconds = hardware.seconds(diary.trained_macs, down + released.bytes, diary.scored_macs)
        late = not final and 0 < self._deadline < seconds
        entry = LedgerEntry(
            client=name,
            round=instruction.round,
            final=final,
            bytes_down=down,
            bytes_up=released.bytes,
            uploads=tuple(sorted(fields)),
            seconds={stage: round(spent, 4) for stage, spent in visited.seconds.items()},
            architecture=diary.architecture,
            validation_accuracy=diary.validation_accuracy,
            test_accuracy=diary.test_accuracy,
            trained_macs=diary.trained_macs,
            evaluated_architectures=diary.evaluated_architectures,
            peak_memory_mb=diary.peak_memory_mb,
            process_memory_mb=visited.process_memory_mb,
            notes=diary.notes,
            tier=hardware.tier,
            simulated_seconds=round(min(seconds, self._deadline) if late else seconds, 4),
            late=late,
            upload_bytes=fields,
            scored_macs=diary.scored_macs,
            upload_shapes=shapes,
            judged=judged,
        )
        return released.report, entry
