"""What does the network cost per round? Fedloom's link against a plain Flower app, three sites on loopback with TLS and registered keys.

    python benchmarks/network.py [--rounds 10] [--floor-rounds 6] [--megabytes 0.1,25]

Nothing is computed: the server sends a model to three sites, each answers at once with another of its size. Three ways:

flower   `flower-superlink --enable-supernode-auth`, three `flower-supernode` and `flwr run` of benchmarks/flower_echo: Flower's own floor
carried  our SuperLink and Connection, bytes only: what carrying costs
fedloom  the same with all that `fedloom serve` and `fedloom site` do to a message: packed, checked, signed, logged, checked again

Expected before the first run: a small model takes Flower 6 s (nodes and server look every 3 s, a process starts for every message) and us
0.4 s (a site looks every 0.5 s, and the last of three decides); 25 MB take Flower 10 s and us 3 s, nearly all of it carrying.
The first round of each is not counted. Bytes on loopback are all that this machine sends to itself, so other programs disturb them; for
Flower they include its own hops between the processes of one machine, which are not between hosts.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path = [path for path in sys.path if Path(path or ".").resolve() != FOLDER]  # Flower may look for ray, which is not ray.py here

import numpy as np  # noqa: E402
import torch  # noqa: E402

from fedloom.assemble.environment import environment  # noqa: E402
from fedloom.core.boundary import Upload, release  # noqa: E402
from fedloom.core.messages import FINISH, TRAIN, Arrays, Instruction, Report, payload_bytes  # noqa: E402
from fedloom.federation.agreement import RoundSettings, SiteSettings  # noqa: E402
from fedloom.federation.certificates import make_certificates  # noqa: E402
from fedloom.federation.server.link import GLANCE, FlowerLink  # noqa: E402
from fedloom.federation.server.superlink import SuperLink  # noqa: E402
from fedloom.federation.site.connection import Connection  # noqa: E402
from fedloom.federation.site.rounds import _answer  # noqa: E402
from fedloom.federation.site.statement import Departure  # noqa: E402
from fedloom.federation.wire.flower import QUIET  # noqa: E402
from fedloom.federation.wire.messages import finite, from_bytes, to_bytes  # noqa: E402
from fedloom.federation.wire.signatures import private_key, public_bytes, public_key, signed  # noqa: E402
from fedloom.files import append_lines  # noqa: E402

RESULT = FOLDER / "results" / "network.json"
SITES = ("east", "north", "west")
UPLOADS = {"update": Upload("numbers like the model's", like="weights")}
DIGEST = hashlib.sha256(b"benchmark").hexdigest()
MOST = RoundSettings().most
ARRAYS = 100  # a supernet has about as many
END = b"end"
PATIENCE = 120.0  # seconds for whatever should happen at once
BLOCKS = 2  # of the same, in turn, so that a busy minute of the machine hits both
Found = dict[str, list[float]]


# -- ours ------------------------------------------------------------------------------
@dataclass
class Echo:
    """A participant without a method: it checks an instruction, answers with numbers of the same size, and writes down what leaves."""

    name: str
    key: Any
    log: Path
    done: bool = False
    final: bool = False

    def answer(self, data: bytes) -> bytes:
        instruction = from_bytes(Instruction, data, MOST, DIGEST)
        finite(instruction)
        self.final = instruction.action == FINISH
        factor = np.float32(-1 - SITES.index(self.name))  # Flower carries nothing that the other side has already
        update = {} if self.final else {"update": {name: factor * array for name, array in instruction.arrays["weights"].items()}}
        report = release(Report(self.name, instruction.round, update), instruction, UPLOADS).report
        plain = to_bytes(report, DIGEST)
        append_lines(self.log, [Departure.of(report, instruction, hashlib.sha256(plain).hexdigest()).to_json()])
        return signed(plain, data, self.key)

    def sent(self) -> None:
        self.done = self.final


class Mirror:
    """Bytes back, one more than came, so that they are not the same."""

    done = final = False

    def answer(self, data: bytes) -> bytes:
        self.final = data == END
        return b"." + data

    def sent(self) -> None:
        self.done = self.final


def attend(name: str, address: str, certificates: Path, bare: bool) -> None:
    """A site's process."""
    own = certificates / name
    key = private_key(own / "key.pem")
    participant = Mirror() if bare else Echo(name, key, own / "left.jsonl")
    with Connection(address, own / "ca.pem", key, MOST) as connection:
        _answer(connection, participant, SiteSettings().poll, print)  # type: ignore[arg-type]


def ours(folder: Path, size: int, rounds: int, bare: bool) -> Found:
    certificates = folder / "certificates"
    keys = {name: public_key(certificates / "server" / "sites" / f"{name}.pub") for name in SITES}
    public = {name: public_bytes(key) for name, key in keys.items()}
    pair = (certificates / "server" / "server.pem", certificates / "server" / "server-key.pem")
    with closing(SuperLink("127.0.0.1:0", *pair, public, MOST, print)) as superlink, processes() as start:
        sites = [start(sys.executable, __file__, "--site", name, superlink.address, str(certificates), str(bare)) for name in SITES]
        until(lambda: set(superlink.online()) == set(SITES), "the sites to connect")
        link = FlowerLink(superlink, keys, DIGEST, UPLOADS, RoundSettings(), lambda entry: None, print)
        found: Found = {"seconds": [], "loopback_bytes": []}
        for number in range(rounds + 1):
            weights = model(size, number)
            asked = [Instruction(name, number, TRAIN, 0, {"weights": weights}) for name in SITES]
            data = {name: np.random.default_rng((number, place)).bytes(size) for place, name in enumerate(SITES)} if bare else {}
            before, began = loopback(), time.perf_counter()
            sizes = carry(superlink, data) if bare else [payload_bytes(report) for report in link.exchange(asked)]
            found["seconds"].append(time.perf_counter() - began)
            found["loopback_bytes"].append(loopback() - before)
            assert len(sizes) == len(SITES) and min(sizes) >= size
        if bare:
            carry(superlink, dict.fromkeys(SITES, END))
        else:
            link.exchange([Instruction(name, rounds + 1, FINISH, 0) for name in SITES])
        for site in sites:
            site.wait(PATIENCE)  # it has nothing left to do
    return {name: values[1:] for name, values in found.items()}


def carry(superlink: SuperLink, data: Mapping[str, bytes]) -> list[int]:
    """One round of bytes; how many came back from each."""
    waiting, sizes = {superlink.send(name, own) for name, own in data.items()}, []
    while waiting:
        for reply in superlink.replies(list(waiting)):
            waiting.remove(reply.message)
            sizes.append(len(reply.data))
        time.sleep(GLANCE)
    return sizes


def model(size: int, number: int) -> Arrays:
    draw = np.random.default_rng(number)
    values = draw.standard_normal(size // 4, dtype=np.float32)
    return {f"layer-{place:03}": part for place, part in enumerate(np.array_split(values, ARRAYS))}


# -- Flower's floor ------------------------------------------------------------------------
def floor(folder: Path, size: int, rounds: int) -> Found:
    """Stock commands, a home of their own, nothing of ours."""
    certificates, home, record = folder / "certificates", folder / "home", folder / f"floor-{size}.json"
    authority, server = certificates / "authority" / "ca.pem", certificates / "server"
    port, *others = free_ports(1 + len(SITES))
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{authority}"\n'
    )
    variables = {**QUIET, "FLWR_HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    own = ["--ssl-ca-certfile", authority, "--ssl-certfile", server / "server.pem", "--ssl-keyfile", server / "server-key.pem"]
    with processes(variables, folder / "flower.log") as start:
        switches = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        superlink = start("flower-superlink", "--host", "127.0.0.1", "--port", str(port), *map(str, own), *switches)
        until(lambda: listens(port) or superlink.poll() is not None, "the SuperLink to start")
        for name, other in zip(SITES, others, strict=True):
            private, public = ssh_keys(certificates / name / "key.pem", folder / name)
            succeed(start("flwr", "supernode", "register", str(public), "here"), folder)
            node = ["--superlink", f"127.0.0.1:{port}", "--root-certificates", str(authority), "--auth-supernode-private-key", str(private)]
            start("flower-supernode", *node, "--host", "127.0.0.1", "--port", str(other))
        settings = f'bytes={size} rounds={rounds + 1} nodes={len(SITES)} record="{record}"'
        succeed(start("flwr", "run", str(FOLDER / "flower_echo"), "here", "--run-config", settings), folder)
        until(record.exists, "the Flower app to end", PATIENCE + 60 * rounds)
    return {name: values[1:] for name, values in json.loads(record.read_text()).items()}


def ssh_keys(pem: Path, target: Path) -> tuple[Path, Path]:
    """The same key in the format that `flower-supernode` reads."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = private_key(pem)
    private, public = target.with_suffix(".ssh"), target.with_suffix(".ssh.pub")
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return private, public


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# -- processes --------------------------------------------------------------------------------
@contextmanager
def processes(variables: Mapping[str, str] | None = None, log: Path | None = None) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start processes that are ended with the block, and all that they have started, by their ids."""
    said = log.open("ab") if log else None

    def start(*command: str) -> subprocess.Popen[bytes]:
        own = {**os.environ, **(variables or {})}
        return subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=said, stderr=said)

    try:
        yield start
    finally:
        for sign, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            for number in descendants():
                with suppress(ProcessLookupError):
                    os.kill(number, sign)
            end = time.monotonic() + seconds
            while descendants() and time.monotonic() < end:
                with suppress(ChildProcessError):
                    os.waitpid(-1, os.WNOHANG)
                time.sleep(0.05)
        if said:
            said.close()


def adopt() -> None:
    """Whatever our processes leave behind becomes our child: some of Flower's live on for seconds, in sessions of their own."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def descendants() -> list[int]:
    """All below this process, children before their own."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        children.setdefault(parent, []).append(int(status.parent.name))
    found, rest = [], [os.getpid()]
    while rest:
        own = children.get(rest.pop(), [])
        found += own
        rest += own
    return found


def succeed(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.wait(PATIENCE):
        raise SystemExit(f"{process.args} failed:\n{(folder / 'flower.log').read_text()[-3000:]}")


def until(true: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not true():
        if time.monotonic() > end:
            raise SystemExit(f"Waited {patience:.0f} s for {what}")
        time.sleep(0.05)


def loopback() -> int:
    """Bytes that this machine has sent to itself."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--floor-rounds", type=int, default=6)
    parser.add_argument("--megabytes", default="0.1,25")
    parser.add_argument("--site", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.site:
        name, address, certificates, bare = arguments.site
        return attend(name, address, Path(certificates), bare == "True")
    adopt()
    signal.signal(signal.SIGTERM, lambda *facts: sys.exit(143))  # not without ending the others
    load = os.getloadavg()[1]  # of the last five minutes
    sizes: dict[str, Any] = {}
    for megabytes in map(float, arguments.megabytes.split(",")):
        size = int(megabytes * 1e6) // 4 * 4
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_certificates(folder / "certificates", SITES, ["localhost", "127.0.0.1"])
            ways: dict[str, Found] = {"flower": floor(folder, size, arguments.floor_rounds), "carried": {}, "fedloom": {}}
            for way in ["carried", "fedloom"] * BLOCKS:
                for what, values in ours(folder, size, arguments.rounds, bare=way == "carried").items():
                    ways[way].setdefault(what, []).extend(values)
        sizes[f"{megabytes:g} MB"] = summary(ways, size)
        print(f"{megabytes:g} MB each way: {json.dumps(sizes[f'{megabytes:g} MB'], indent=2)}", flush=True)
    record = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(torch.device("cpu")),
        "cores": os.cpu_count(),
        "load_before": load,
        "sizes": sizes,
    }
    RESULT.write_text(json.dumps(record, indent=2) + "\n")
    if not all(found["within"] for found in sizes.values()):
        sys.exit("Fedloom adds more than 10 % and more than 0.5 s to Flower's floor")


def summary(ways: Mapping[str, Found], size: int) -> dict[str, Any]:
    """Medians, all rounds, and what loopback carried for each byte of models (there and back, three sites)."""
    median = {way: statistics.median(found["seconds"]) for way, found in ways.items()}
    added = median["fedloom"] - median["flower"]
    payload = 2 * len(SITES) * size
    return {
        "seconds_per_round": {way: round(value, 3) for way, value in median.items()},
        "added_to_flower": round(added, 3),
        "within": added <= max(0.1 * median["flower"], 0.5),
        "loopback_per_payload": {way: round(statistics.median(found["loopback_bytes"]) / payload, 3) for way, found in ways.items()},
        "rounds": {way: [round(value, 3) for value in found["seconds"]] for way, found in ways.items()},
    }


if __name__ == "__main__":
    main()
