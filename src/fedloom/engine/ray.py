"""Clients of a simulation spread over processes, GPUs and machines by Ray.

Workers are actors: each reads the data once, on its own machine, and then visits one client after the other. Arrays that instructions of a
round share (the supernet) travel through the object store once. The run folder stays with the process that began the run:
clients' memories travel to the worker and back, as they would lie on its disk. Reports are taken in the order of the instructions,
so that a run is the same as with ``engine = inline`` and as many threads.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from fedloom.core.client_site import ClientMemory
from fedloom.core.errors import ClientFailed, FedloomError, InvalidConfig, one_line
from fedloom.core.hardware import Hardware
from fedloom.core.messages import Instruction, Report
from fedloom.core.settings import setting
from fedloom.engine.base import ENGINES
from fedloom.engine.processes import WorkersLink
from fedloom.engine.visit import Simulation, Visited, visit

ENVIRONMENT = {  # before Ray is imported
    "RAY_USAGE_STATS_ENABLED": "0",  # no usage statistics
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a worker without a GPU leaves the environment as it is
    "RAY_worker_niceness": "0",  # otherwise workers wait for everything else on the machine
}


@dataclass(frozen=True)
class RaySettings:
    address: str = setting("", "a running cluster to use: auto or host:port; empty: start one on this machine for the run")
    workers: int = setting(0, "processes that train clients; 0: one per GPU, or per CPU core if there is no GPU", low=0)
    per_gpu: int = setting(1, "workers that share a GPU", low=1)
    device: str = setting("auto", "where clients train: cpu, cuda, or auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))
    threads: int = setting(1, "CPU threads of a worker; results are equal bit for bit only with equal thread counts", low=1, high=1024)


class Worker:
    """An actor's inside."""

    def __init__(self, begin: Callable[[], Simulation]) -> None:
        self._method, self._data_of = begin()

    def ready(self) -> None:
        """Answers once the data are read."""

    def visit(self, instruction: Instruction, stored: Mapping[str, Any], memory: ClientMemory, hardware: Hardware) -> Visited:
        """stored: what stands in the object store for each of the instruction's groups of arrays."""
        import ray

        whole = replace(instruction, arrays={name: ray.get(reference) for name, reference in stored.items()})
        return visit(self._method, whole, self._data_of(instruction.client), memory, hardware)


@ENGINES.add("ray", RaySettings, "clients spread over processes, GPUs and machines by Ray; the same numbers (extra ray)")
class RayLink(WorkersLink):
    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        import ray
        from ray.util import ActorPool

        references: dict[int, Any] = {}  # of groups of arrays that are in the store; the instructions keep them alive meanwhile
        for instruction in instructions:
            for group in instruction.arrays.values():
                if id(group) not in references:
                    references[id(group)] = ray.put(dict(group))

        def send(worker: Any, instruction: Instruction) -> Any:
            stored = {name: references[id(group)] for name, group in instruction.arrays.items()}
            if self._stage:  # which one, only the worker knows
                self._stage(instruction.client, "at a worker")
            return worker.visit.remote(replace(instruction, arrays={}), stored, *self._records.before(instruction))

        answers = ActorPool(list(self._workers)).map(send, instructions)  # in the order of the instructions
        reports = []
        for instruction in instructions:
            with understood(instruction.client):
                visited = next(answers)
            reports.append(self._records.keep(instruction, visited))
        return [report for report in reports if report is not None]


@contextmanager
def understood(client: str = "") -> Iterator[None]:
    """What happened in a worker, as if it had happened here."""
    from ray.exceptions import RayActorError, RayTaskError

    where = f"{client}: " if client else ""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, FedloomError):
            raise error.cause from None
        raise ClientFailed(f"{where}a worker of Ray failed: {one_line(error.cause)}. --trace shows where", client=client) from error
    except RayActorError as error:
        cure = "Often its machine ran out of memory: set fewer ray.workers and continue with `fedloom resume`"
        raise ClientFailed(f"{where}a worker of Ray died ({one_line(error)}). {cure}", client=client) from error


@contextmanager
def cluster(settings: RaySettings, gpus: bool) -> Iterator[None]:
    """A connection to a cluster that has room; one that was started here ends with the block."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise InvalidConfig("engine=ray needs Ray, which is not installed. Run pip install 'fedloom[ray]'", key="engine") from error
    joined = ray.is_initialized()
    if not joined:
        _connect(settings)
    try:
        _check_room(_count(settings, gpus), _share(settings, gpus), _resources())
        yield
    finally:
        if not joined:
            ray.shutdown()


@contextmanager
def workers(settings: RaySettings, gpus: bool, begin: Callable[[], Simulation]) -> Iterator[list[Any]]:
    """Actors of the connected cluster that are ready; they end with the block."""
    import ray

    actor = ray.remote(**_share(settings, gpus))(Worker)
    made = [actor.remote(begin) for _ in range(_count(settings, gpus))]
    try:
        with understood():
            ray.get([worker.ready.remote() for worker in made])
        yield made
    finally:
        for worker in made:
            ray.kill(worker)


def _connect(settings: RaySettings) -> None:
    import ray

    _refuse_silence(settings.address)
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not settings.address:  # on this machine, where nobody else can reach it
        slots = max(settings.workers * settings.threads, os.cpu_count() or 1)
        how |= {"include_dashboard": False, "num_cpus": slots, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init(settings.address or "local", **how)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = f"Nothing of Ray answers at ray.address={settings.address}" if settings.address else "Ray does not start on this machine"
        raise InvalidConfig(f"{where}: {one_line(error)}", key="ray.address") from error


def _refuse_silence(address: str) -> None:
    """Ray itself would try an address where nothing listens for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address:  # auto, ray://…
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError) as error:
        cure = "Start Ray there (ray start --head), or leave ray.address out"
        raise InvalidConfig(f"There is no answer at ray.address={address} ({one_line(error)}). {cure}", key="ray.address") from error


def _resources() -> dict[str, float]:
    import ray

    return dict(ray.cluster_resources())


def _share(settings: RaySettings, gpus: bool) -> dict[str, float]:
    """What one worker takes."""
    return {"num_cpus": settings.threads, "num_gpus": 1 / settings.per_gpu if gpus else 0}


def _count(settings: RaySettings, gpus: bool) -> int:
    """How many workers; as many as the cluster has room for unless the settings say."""
    found = _resources()
    return settings.workers or max(1, int(found.get("GPU", 0) * settings.per_gpu if gpus else found.get("CPU", 1) // settings.threads))


def _check_room(count: int, share: Mapping[str, float], found: Mapping[str, float]) -> None:
    """Ray would wait for ever for what a cluster does not have."""
    for kind, key in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
        if count * share[key] > found.get(kind, 0) + 1e-6:
            raise InvalidConfig(
                f"{count} workers need {count * share[key]:g} {kind}s, but the cluster has {found.get(kind, 0):g}. Lower ray.workers",
                key="ray.workers",
            )
