"""A federation of three sites on this machine: their images, files, keys and processes, and what they said."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedloom.__main__ import main
from fedloom.data.readers import DataSettings, read
from fedloom.federation.agreement import read_agreement
from fedloom.federation.certificates import fingerprints_line, make_certificates
from fedloom.federation.server.rounds import rehearsal
from fedloom.files import read_arrays
from fedloom.testing import tiny_file

SITES = ("north", "east", "west")
CLOSE = 0.0  # bit for bit
CLASSES = tuple(str(number) for number in range(10))
FEDERATION = """
base = "tiny.toml"
method = "{method}"
rounds = 3
participants = 3
seed = 5
[federation]
name = "digits"
sites = ["north", "east", "west"]
classes = ["9", "8", "7", "6", "5", "4", "3", "2", "1", "0"]
[data]
image_size = 8
{server_images}
[when.hapfnas.split]
server = 0
[server]
address = "127.0.0.1:{port}"
certificate = "certs/server/server.pem"
key = "certs/server/server-key.pem"
sites = "certs/server/sites"
folder = "server-run"
[server.round]
"""
NAMED = 'sites = ["north", "east", "west"]'
SITE = """
name = "{name}"
federation = "federation.toml"
server = "127.0.0.1:{port}"
authority = "certs/{name}/ca.pem"
key = "certs/{name}/key.pem"
images = "images/{name}"
folder = "at-{name}"
device = "cpu"
threads = 1
poll = 0.1
wait = 60
secret = false # to be compared with a rehearsal
onnx = {onnx}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def write_digits(place: Path, sites: Sequence[str] = SITES, train: int = 24, test: int = 10) -> None:
    """place/SITE/train|test/CLASS/NUMBER.png: different digits for each site, and some classes that a site does not have."""
    pool = read(DataSettings()).train
    each = min(300, len(pool.labels) // len(sites))
    for number, site in enumerate(sites):
        own = [index for index in range(each * number, each * (number + 1)) if pool.labels[index] % 5 != number][: train + test]
        for position, index in enumerate(own):
            folder = place / site / ("train" if position < train else "test") / str(pool.labels[index])
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pool.images[index][0]).save(folder / f"{index}.png")


def write_server_images(place: Path, count: int = 8) -> None:
    place.mkdir()
    for index, image in enumerate(read(DataSettings()).test.images[:count]):
        Image.fromarray(image[0]).save(place / f"{index}.png")


# Processes that begin with everything imported, because importing takes most of the time of a small federation.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["fedloom.commands.app", "flwr.supernode.fleet_http_client", "flwr.superlink.routers.fleet.router"])


def _fedloom(folder: Path, log: Path, arguments: Sequence[str], files: int) -> None:
    """The command, in a process of its own. files: how many it may have open; 0 leaves that as it is."""
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files // 2, files))
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    sys.argv = ["fedloom", *arguments]
    main()


@dataclass
class Running:
    """A process of ours and what it has said so far."""

    name: str
    process: Any  # of multiprocessing
    log: Path
    began: int  # where in the log: an earlier process of this name may have written there

    def said(self) -> str:
        return self.log.read_bytes()[self.began :].decode()

    def wait_for(self, text: str, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while text not in self.said():
            assert self.process.exitcode is None or text in self.said(), f"{self.name} ended ({self.process.exitcode}):\n{self.said()}"
            assert time.monotonic() < until, f"{self.name} did not say {text!r}:\n{self.said()}"
            time.sleep(0.02)

    def kill(self) -> None:
        """At once, in the middle of whatever it does."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)
        assert self.process.exitcode == -signal.SIGKILL

    def finish(self, seconds: float = 90) -> int:
        """How it ended."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"{self.name} does not end:\n{self.said()}"
        return int(self.process.exitcode)


@dataclass
class Federation:
    folder: Path
    port: int
    running: list[Running] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / "federation.toml"

    def serve(self, files: int = 0) -> Running:
        return self._start("server", "serve", "federation.toml", files=files)

    def site(self, name: str) -> Running:
        return self._start(name, "site", f"{name}.toml")

    def _start(self, name: str, *arguments: str, files: int = 0) -> Running:
        log = self.folder / f"{name}.log"
        log.touch()
        began, process = log.stat().st_size, PROCESSES.Process(target=_fedloom, args=(self.folder, log, arguments, files))
        process.start()
        self.running.append(Running(name, process, log, began))
        return self.running[-1]

    def stop(self) -> None:
        for running in self.running:
            if running.process.exitcode is None:
                running.process.kill()
            running.process.join(10)

    def site_folder(self, name: str) -> Path:
        return self.folder / f"at-{name}" / "digits" / name


@contextmanager
def federation(
    folder: Path, method: str = "perfedsde", round: str = "", extra: str = "", onnx: Sequence[str] = (), sites: Sequence[str] = SITES
) -> Iterator[Federation]:
    """Three sites, ready to start; whatever runs at the end is ended. round: lines of [server.round]; extra: further tables;
    onnx: the sites that export their model, which takes longer than everything else."""
    made = Federation(folder, free_port())
    write_digits(folder / "images", sites)
    server_images = ""
    if method == "hapfnas":
        write_server_images(folder / "server-images")
        server_images = 'server = "server-images"'
    make_certificates(folder / "certs", sites, ["127.0.0.1"])
    text = FEDERATION.format(method=method, port=made.port, server_images=server_images)
    text = text.replace("participants = 3", f"participants = {len(sites)}")
    text = text.replace(NAMED, f"sites = {json.dumps(sites)}\n{fingerprints_line(folder / 'certs', sites)}")
    tiny_file(folder)
    made.file.write_text(text + round + "\n" + extra)
    for name in sites:
        (folder / f"{name}.toml").write_text(SITE.format(name=name, port=made.port, onnx=str(name in onnx).lower()))
    try:
        yield made
    finally:
        made.stop()


def finished_rounds(made: Federation) -> int:
    return int(read_arrays(made.folder / "server-run/state/server.safetensors")[1]["round"])


def wait_until(happened: Callable[[], bool], what: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def end(processes: Sequence[Running]) -> None:
    for process in processes:
        assert process.finish() == 0, process.said()


def rehearsed(made: Federation, nobody: Any) -> Path:
    """The folder of the same federation in this process."""
    rehearsal(read_agreement(made.file), made.folder / "images", nobody)
    return made.folder / "server-run-rehearsal"


def check_same(made: Federation, rehearsal: Path, sites: Sequence[str] = SITES) -> None:
    """The same state at the server and the same models and memories at these sites."""
    assert farthest(made.folder / "server-run/state/server.safetensors", rehearsal / "state/server.safetensors") <= CLOSE
    for name in sites:
        there, here = made.site_folder(name) / "clients" / name, rehearsal / "clients" / name
        assert sorted(file.name for file in there.iterdir()) == sorted(file.name for file in here.iterdir())
        for file in there.iterdir():
            assert farthest(file, here / file.name) <= CLOSE, file  # which compares the architectures, too


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def farthest(one: Path, other: Path) -> float:
    """The largest difference between two files of arrays with the same names and facts."""
    (first, facts), (second, others) = read_arrays(one), read_arrays(other)
    for either in (facts, others):
        either.pop("fedloom", None)
    assert facts == others and set(first) == set(second)
    return max((gap(first[name], second[name]) for name in first), default=0.0)


def gap(one: Any, other: Any) -> float:
    assert one.shape == other.shape and one.dtype == other.dtype
    return float(np.abs(one.astype(np.float64) - other.astype(np.float64)).max(initial=0.0))


GOOD = FEDERATION.format(method="fedavg", port=9092, server_images="")  # an agreement of tiny networks

CLASS_LIST = 'classes = ["9", "8", "7", "6", "5", "4", "3", "2", "1", "0"]'


def write_images(place: Path, classes: dict[str, int]) -> Path:
    for name, count in classes.items():
        (place / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (10, 12), (40 * number, 7, 100)).save(place / name / f"{number}.png")
    return place
