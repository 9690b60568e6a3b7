"""Clients of a simulation in several processes of this machine.

For machines with many cores; processes that share a GPU gain where Python is slower than the GPU. Each worker reads the data once and
then visits clients: one after the other on a CPU, on a GPU its share of a round together, as ``engine = inline`` does with all of them. The
run folder stays with the process that began the run: clients' memories travel to the worker and back. Reports are taken in the order of
the instructions, so that a run on a CPU is the same as with ``engine = inline`` and as many threads.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from fedloom.core.client_site import ClientMemory
from fedloom.core.errors import ClientFailed, FedloomError, one_line
from fedloom.core.hardware import Hardware
from fedloom.core.machine import DEVICES
from fedloom.core.messages import Arrays, Instruction, Report, frozen
from fedloom.core.settings import setting
from fedloom.engine.base import ENGINES
from fedloom.engine.inline import ON_A_GPU
from fedloom.engine.visit import ClientRecords, Simulation, Visited, visit
from fedloom.training.together import answers

Place = tuple[Path, tuple[str, ...]]  # a file with arrays, and their names in order
Task = tuple[Instruction, Mapping[str, Place], ClientMemory, Hardware]  # a visit; the instruction's groups of arrays lie in files


@dataclass(frozen=True)
class ProcessesSettings:
    workers: int = setting(4, "processes that train clients; before the end no more than participants have work", low=1)
    device: str = setting("auto", "where clients train: cpu, cuda, mps (on a Mac), or auto: a CUDA GPU if there is one", choices=DEVICES)
    threads: int = setting(1, "CPU threads of a worker; results are equal bit for bit only with equal thread counts", low=1, high=1024)
    together: int = setting(
        0, f"clients that a worker serves at once; 0: its share of a round on a GPU, at most {ON_A_GPU}, and 1 on a CPU", low=0, high=10_000
    )

    def at_once(self, gpu: bool) -> int:
        return self.together or (ON_A_GPU if gpu else 1)


def work(begin: Callable[[], Simulation], connection: Connection) -> None:
    """A worker's life. It says nothing when it is ready, then of some visits the names of their stages (client, stage) and what came of
    them; last an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the one that began the run decides
    try:
        method, data_of = begin()
        connection.send(None)
        while True:
            tasks: list[Task] = connection.recv()
            groups = {place: unpacked(*place) for _, lying, *_ in tasks for place in lying.values()}  # most are everybody's

            def one(task: Task, groups: Mapping[Place, Arrays] = groups) -> Visited:
                instruction, lying, memory, hardware = task
                whole = replace(instruction, arrays={name: groups[place] for name, place in lying.items()})
                return visit(method, whole, data_of(whole.client), memory, hardware, partial(_say, connection, whole.client))

            connection.send(answers([partial(one, task) for task in tasks]))
    except (EOFError, BrokenPipeError):
        pass  # the run is over
    except Exception as error:
        said = error if isinstance(error, FedloomError) else ClientFailed(f"A worker failed: {type(error).__name__}: {one_line(error)}")
        said.add_note(traceback.format_exc())  # for --trace
        with suppress(BrokenPipeError):  # the run may be gone in the middle of a visit
            connection.send(said)


def _say(connection: Connection, client: str, stage: str) -> None:
    # As bytes: what ``send`` makes of it would lie in the traceback if the run is gone, and Python 3.13 complains as it clears that away.
    connection.send_bytes(bytes(ForkingPickler.dumps((client, stage))))


class WorkersLink:
    """Clients that workers visit. stage: told of every stage (client, stage) that begins; each: how many clients a worker may visit at
    once."""

    def __init__(
        self,
        clients: Sequence[str],
        records: ClientRecords,
        workers: Sequence[Any],
        stage: Callable[[str, str], None] | None = None,
        each: int = 1,
    ) -> None:
        self._clients, self._records, self._workers, self._stage = clients, records, workers, stage
        self._each, self.at_once = each, each * len(workers)

    def clients(self) -> Sequence[str]:
        return self._clients


@ENGINES.add("processes", ProcessesSettings, "several clients at once, in processes of this machine; the same numbers")
class ProcessesLink(WorkersLink):
    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        with shared({id(group): group for instruction in instructions for group in instruction.arrays.values()}) as places:
            return self._exchange(instructions, places)

    def _exchange(self, instructions: Sequence[Instruction], places: Mapping[int, Place]) -> list[Report]:
        """places: where each group of arrays lies that instructions of this round share."""
        share = min(self._each, ceil(len(instructions) / len(self._workers)))  # of one worker: all of them have work
        numbers = range(len(instructions))
        waiting, idle = deque(numbers[start : start + share] for start in numbers[::share]), list(self._workers)
        busy: dict[Connection, range] = {}  # with which instructions
        visits: dict[int, Visited] = {}  # that are over, until those before them are
        reports: list[Report | None] = []
        while len(reports) < len(instructions):
            while waiting and idle:
                worker, some = idle.pop(), waiting.popleft()
                busy[worker] = some
                with alive(instructions[some[0]].client):
                    worker.send([self._task(instructions[number], places) for number in some])
            spoken = set(wait(list(busy)))
            for worker in [worker for worker in busy if worker in spoken]:
                word = heard(worker, instructions[busy[worker][0]].client)
                if isinstance(word, list):
                    visits |= zip(busy.pop(worker), word, strict=True)
                    idle.append(worker)
                elif self._stage:
                    self._stage(*word)
            while len(reports) in visits:
                reports.append(self._records.keep(instructions[len(reports)], visits.pop(len(reports))))
        return [report for report in reports if report is not None]

    def _task(self, instruction: Instruction, places: Mapping[int, Place]) -> Task:
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
