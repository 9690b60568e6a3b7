"""Clients of a simulation in several processes of this machine.

For machines with many cores; processes that share a GPU gain where Python is slower than the GPU. Each worker reads the data once and
then visits one client after the other. The run folder stays with the process that began the run: clients' memories travel to the worker
and back. Reports are taken in the order of the instructions, so that a run is the same as with ``engine = inline`` and as many threads.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from fedloom.core.errors import ClientFailed, FedloomError, one_line
from fedloom.core.messages import Arrays, Instruction, Report, frozen
from fedloom.core.settings import setting
from fedloom.engine.base import ENGINES
from fedloom.engine.visit import ClientRecords, Simulation, Visited, visit

Place = tuple[Path, tuple[str, ...]]  # a file with arrays, and their names in order


@dataclass(frozen=True)
class ProcessesSettings:
    workers: int = setting(4, "processes that train clients; before the end no more than participants have work", low=1)
    device: str = setting("auto", "where clients train: cpu, cuda, or auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))
    threads: int = setting(1, "CPU threads of a worker; results are equal bit for bit only with equal thread counts", low=1, high=1024)


def work(begin: Callable[[], Simulation], connection: Connection) -> None:
    """A worker's life. It says nothing when it is ready, then of every visit the names of its stages and what came of it; last an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the one that began the run decides
    try:
        method, data_of = begin()
        connection.send(None)
        while True:
            instruction, lying, memory, hardware = connection.recv()
            instruction = replace(instruction, arrays={name: unpacked(*place) for name, place in lying.items()})
            connection.send(visit(method, instruction, data_of(instruction.client), memory, hardware, connection.send))
    except (EOFError, BrokenPipeError):
        pass  # the run is over
    except Exception as error:
        said = error if isinstance(error, FedloomError) else ClientFailed(f"A worker failed: {type(error).__name__}: {one_line(error)}")
        said.add_note(traceback.format_exc())  # for --trace
        with suppress(BrokenPipeError):  # the run may be gone in the middle of a visit
            connection.send(said)


class WorkersLink:
    """Clients that workers visit. stage: told of every stage (client, stage) that begins."""

    def __init__(
        self, clients: Sequence[str], records: ClientRecords, workers: Sequence[Any], stage: Callable[[str, str], None] | None = None
    ) -> None:
        self._clients, self._records, self._workers, self._stage = clients, records, workers, stage
        self.at_once = len(workers)

    def clients(self) -> Sequence[str]:
        return self._clients


@ENGINES.add("processes", ProcessesSettings, "several clients at once, in processes of this machine; the same numbers")
class ProcessesLink(WorkersLink):
    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        with shared({id(group): group for instruction in instructions for group in instruction.arrays.values()}) as places:
            return self._exchange(instructions, places)

    def _exchange(self, instructions: Sequence[Instruction], places: Mapping[int, Place]) -> list[Report]:
        """places: where each group of arrays lies that instructions of this round share."""
        waiting, idle = deque(range(len(instructions))), list(self._workers)
        busy: dict[Connection, int] = {}  # with which instruction
        visits: dict[int, Visited] = {}  # that are over, until those before them are
        reports: list[Report | None] = []
        while len(reports) < len(instructions):
            while waiting and idle:
                worker, place = idle.pop(), waiting.popleft()
                busy[worker] = place
                with alive(instructions[place].client):
                    worker.send(self._task(instructions[place], places))
            spoken = set(wait(list(busy)))
            for worker in [worker for worker in busy if worker in spoken]:
                client = instructions[busy[worker]].client
                word = heard(worker, client)
                if isinstance(word, Visited):
                    visits[busy.pop(worker)] = word
                    idle.append(worker)
                elif self._stage:
                    self._stage(client, word)
            while len(reports) in visits:
                reports.append(self._records.keep(instructions[len(reports)], visits.pop(len(reports))))
        return [report for report in reports if report is not None]

    def _task(self, instruction: Instruction, places: Mapping[int, Place]) -> tuple[Any, ...]:
        lying = {name: places[id(group)] for name, group in instruction.arrays.items()}
        return replace(instruction, arrays={}), lying, *self._records.before(instruction)


@contextmanager
def shared(groups: Mapping[int, Arrays]) -> Iterator[dict[int, Place]]:
    """Groups of arrays in files, for as long as the block: a supernet goes to many clients, and is packed once."""
    with TemporaryDirectory(prefix="fedloom-") as folder:
        places = {key: (Path(folder) / str(number), tuple(group)) for number, (key, group) in enumerate(groups.items())}
        for key, (file, _) in places.items():
            save_file({name: np.asarray(array, order="C") for name, array in groups[key].items()}, file)
        yield places


def unpacked(file: Path, names: Sequence[str]) -> Arrays:
    """In the order of names: a file has one of its own, and sums depend on it."""
    found = load_file(file)
    return frozen({name: found[name] for name in names})


def heard(worker: Connection, client: str = "") -> Any:
    """The next word of a worker; an error is raised as if it had happened here."""
    with alive(client):
        word = worker.recv()
    if isinstance(word, FedloomError):
        raise word
    return word


@contextmanager
def alive(client: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError) as error:
        where, cure = f"{client}: " if client else "", "Often memory ran out: set fewer processes.workers"
        raise ClientFailed(f"{where}a worker died. {cure} and continue with `fedloom resume`", client=client) from error


@contextmanager
def worker_processes(count: int, begin: Callable[[], Simulation]) -> Iterator[list[Connection]]:
    """Ways to speak with workers that are ready; they end with the block. Each is a fresh interpreter: a GPU cannot be shared by a fork."""
    fresh = multiprocessing.get_context("spawn")
    made, ours = [], []
    try:
        for number in range(count):
            here, there = fresh.Pipe()
            process = fresh.Process(target=work, args=(begin, there), name=f"fedloom-worker-{number}", daemon=True)
            process.start()
            there.close()  # theirs alone, so that their end is heard here
            made.append(process)
            ours.append(here)
        for connection in ours:
            heard(connection)
        yield ours
    finally:
        for process in made:
            process.terminate()
        for process, connection in zip(made, ours, strict=True):
            process.join()
            connection.close()
