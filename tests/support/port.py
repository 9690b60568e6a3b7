"""A real SuperLink in this process, and connections to it: a site's own, and requests that no site would make."""

from __future__ import annotations

import gc
import os
import resource
import ssl
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from fedloom.federation.certificates import make_certificates
from fedloom.federation.server.superlink import Reply, SuperLink
from fedloom.federation.site.connection import Connection
from fedloom.federation.wire.flower import need_flower
from fedloom.federation.wire.signatures import private_key, public_bytes, public_key
from support.federation import PROCESSES, SITES

MOST = 3 << 20


@dataclass
class Port:
    link: SuperLink
    certs: Path
    said: list[str]

    @property
    def address(self) -> str:
        return self.link.address

    def key(self, name: str) -> Any:
        return private_key(self.certs / name / "key.pem")

    def connect(self, name: str = "north", key: Any = None, authority: Path | None = None) -> Connection:
        return Connection(self.link.address, authority or self.certs / name / "ca.pem", key or self.key(name), MOST)

    def post(self, path: str, content: Any = b"", name: str = "north", **headers: str) -> int:
        """A request as a site would sign it, and what is answered."""
        key, now = self.key(name), datetime.now(UTC).isoformat()
        from flwr.supercore.primitives.asymmetric import sign_message

        signed = {
            "flwr-public-key": b64encode(public_bytes(key.public_key())).decode(),
            "flwr-timestamp": now,
            "flwr-signature": b64encode(sign_message(key, now.encode())).decode(),
            "content-type": "application/protobuf",
        }
        with httpx.Client(verify=ssl.create_default_context(cafile=self.certs / name / "ca.pem"), trust_env=False) as client:
            return client.post(f"https://{self.link.address}{path}", content=content, headers={**signed, **headers}).status_code

    def answered(self, *messages: str, seconds: float = 10) -> list[Reply]:
        until, found = time.monotonic() + seconds, []
        while len(found) < len(messages) and time.monotonic() < until:
            found += self.link.replies([message for message in messages if message not in {reply.message for reply in found}])
            time.sleep(0.01)
        return found


@contextmanager
def listening(folder: Path, most: int = MOST) -> Iterator[Port]:
    """folder: for keys and certificates. Registered are the three sites and "absent"; "stranger" is not."""
    said: list[str] = []
    make_certificates(folder, [*SITES, "absent", "stranger"], ["127.0.0.1"])
    keys = {name: public_bytes(public_key(folder / "server/sites" / f"{name}.pub")) for name in (*SITES, "absent")}
    link = SuperLink("127.0.0.1:0", folder / "server/server.pem", folder / "server/server-key.pem", keys, most, said.append)
    try:
        yield Port(link, folder, said)
    finally:
        link.close()


def received(connection: Connection, seconds: float = 10) -> bytes:
    until = time.monotonic() + seconds
    while (found := connection.receive()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


# -- a port in a process of its own, to see what it takes ------------------------------------------------


def serve_alone(pipe: Any, folder: Path, most: int, room: int) -> None:
    """Do what is said through the pipe, with at most ``room`` more bytes of address space than at the beginning."""
    need_flower()
    import flwr.superlink.routers.fleet.router  # noqa: F401 - whatever it brings along counts before

    gc.collect()
    gc.freeze()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + room, size + room))
    with listening(folder, most) as port:
        pipe.send(port.link.address)
        for what, *arguments in iter(pipe.recv, ("end",)):
            done = {
                "send": port.link.send,
                "answered": port.answered,
                "online": lambda: sorted(port.link.online()),
                "said": lambda: list(port.said),
                "forget": lambda: port.said.clear(),
                "start": start_peak,
                "peak": peak,
                "files": lambda: len(os.listdir("/proc/self/fd")),
            }[what](*arguments)  # type: ignore[operator]
            pipe.send(done)


def start_peak() -> float:
    """Forget the largest size so far; megabytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> float:
    """Megabytes of memory that this process had at most."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


@dataclass
class Alone:
    """The other end of the pipe."""

    pipe: Any
    certs: Path
    address: str

    def __call__(self, what: str, *arguments: Any) -> Any:
        self.pipe.send((what, *arguments))
        assert self.pipe.poll(60), f"no answer to {what}"
        return self.pipe.recv()

    def connect(self, name: str) -> Connection:
        return Connection(self.address, self.certs / name / "ca.pem", private_key(self.certs / name / "key.pem"), MOST)


@contextmanager
def alone(folder: Path, most: int, room: int = 4 << 30) -> Iterator[Alone]:
    here, there = PROCESSES.Pipe()
    process = PROCESSES.Process(target=serve_alone, args=(there, folder, most, room))
    process.start()
    try:
        assert here.poll(60)
        yield Alone(here, folder, here.recv())
        here.send(("end",))
        process.join(20)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join(10)
