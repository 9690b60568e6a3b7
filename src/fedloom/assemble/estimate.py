"""What a run will take on this machine, before it begins: a few participations are tried, on some of a client's images, and counted up."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from fedloom.assemble.builder import build
from fedloom.assemble.simulation import device_of
from fedloom.config import Settings
from fedloom.core.boundary import release
from fedloom.core.client_site import ClientData, ClientMemory, Examples
from fedloom.core.hardware import Hardware
from fedloom.core.messages import Instruction, payload_bytes
from fedloom.data.readers import read
from fedloom.data.splits import Federation, make_split
from fedloom.engine.visit import visit

TRIED = 96  # training images of a trial; time grows with images, so that of more is counted up
WARM = 4  # images of the participation before, which pays for what is paid once


@dataclass(frozen=True)
class Estimate:
    """seconds: least and most, as rounds of a search differ; memory_mb: measured at the trial, of this process."""

    seconds: tuple[float, float]
    memory_mb: float
    bytes_up: int
    bytes_down: int
    participations: int  # final ones included


@dataclass(frozen=True)
class _Trial:
    seconds: float  # of one participation with all images of a mean client
    bytes_up: int
    bytes_down: int
    memory_mb: float


def estimate_run(settings: Settings) -> Estimate:
    """The first round, the last round and the final participation are tried; nothing is written."""
    dataset, device = read(settings.data), device_of(settings)
    built = build(settings, dataset, device)
    split = make_split(settings.split, dataset.train.labels, dataset.test.labels, settings.clients, settings.seed, dataset.members)
    federation = Federation(dataset, split, device)
    sizes = {name: train for name, (train, _) in federation.images.items()}
    mean = float(np.mean(list(sizes.values())))
    method, start = built.method, built.method.start(settings.seed)

    def tried(instruction: Instruction, images: int = TRIED) -> _Trial:
        data = federation.data_of(instruction.client)
        share = min(1.0, images / len(data.train))
        began = time.perf_counter()
        visited = visit(method, instruction, _some(data, share), ClientMemory(), Hardware())
        seconds = (time.perf_counter() - began) / share * mean / len(data.train)
        sent = release(visited.answer.report, instruction, method.uploads).bytes
        return _Trial(seconds, sent, payload_bytes(instruction), visited.process_memory_mb)

    farewell = method.farewell(replace(start, round=settings.rounds), federation.names[0])
    plans = [method.plan(replace(start, round=number), federation.names) for number in {0, settings.rounds - 1}]
    asked = [plan[0] for plan in plans if plan]  # a method may have no rounds
    tried((asked or [farewell])[0], WARM)
    rounds, final = [tried(instruction) for instruction in asked], tried(farewell)
    at_once = min(settings.components["processes"].workers, settings.participants) if settings.engine == "processes" else 1
    visits = settings.rounds * max(map(len, plans))
    least, most = (visits * choose(trial.seconds for trial in rounds or [final]) for choose in (min, max))
    least, most = (of_rounds + settings.clients * final.seconds for of_rounds in (least, most))
    up, down = (max((getattr(trial, part) for trial in rounds), default=0) for part in ("bytes_up", "bytes_down"))
    return Estimate(
        seconds=(least / at_once, most / at_once),
        memory_mb=max(trial.memory_mb for trial in (*rounds, final)),
        bytes_up=visits * up,
        bytes_down=visits * down + settings.clients * final.bytes_down,
        participations=visits + settings.clients,
    )


def _some(data: ClientData, share: float) -> ClientData:
    """The same share of each part, by even steps: images may lie in the order of their classes."""

    def cut(examples: Examples) -> Examples:
        count = max(2, round(share * len(examples)))
        places = np.unique(np.linspace(0, len(examples) - 1, min(count, len(examples))).astype(int)).tolist()
        return Examples(examples.images[places], examples.labels[places])

    return ClientData(cut(data.train), cut(data.validation), cut(data.test))
