"""Federations of real processes that strangers besiege, or whose members stand still. What happened is printed (pytest -s)."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fedloom.engine.run import Watcher
from support.federation import SITES, Federation, check_same, federation, rehearsed

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("flower")]
IDLE = 1500
SECONDS = 60.0
STOPPED = 90.0
MESSAGE_MB = 8
USUAL = 40.0  # megabytes that a server takes for a federation that nobody disturbs: see test_under_attack.py


class Siege(threading.Thread):
    """Holds so many connections that say nothing; for one that is closed another is opened."""

    def __init__(self, port: int, source: str) -> None:
        super().__init__(daemon=True)
        self.source = (source, 0)
        self.port, self.opened, self.over = port, 0, threading.Event()

    def run(self) -> None:
        held: list[socket.socket] = []
        while not self.over.is_set():
            left = [connection for connection in held if closed(connection)]
            for connection in left:
                connection.close()
            held = [connection for connection in held if connection.fileno() >= 0]
            with suppress(OSError):
                for _ in range(min(100, IDLE - len(held)) if self.opened >= IDLE else 100):
                    held.append(socket.create_connection(("127.0.0.1", self.port), 5, self.source))
                    self.opened += 1
            self.over.wait(0.2)
        for connection in held:
            connection.close()


def closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def memory_mb(pid: int) -> float:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def patient_sites(made: Federation) -> None:
    for name in SITES:
        file = made.folder / f"{name}.toml"
        file.write_text(file.read_text().replace("wait = 60", "wait = 0"))


@pytest.mark.parametrize("source", ["127.0.0.2", "127.0.0.1"], ids=["from elsewhere", "from the sites' own address"])
def test_idle_connections_do_not_end_a_server(source: str, tmp_path: Path, nobody: Watcher) -> None:
    """1,500 of them and a server that may have 1,024 files open: the sites' connections and the run's files find room. From a site's own
    address they may push out a connection of its own before it has signed anything; the site then connects again."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with federation(tmp_path, round=f"message_mb = {MESSAGE_MB}") as made:
        patient_sites(made)
        server = made.serve(files=1024)
        server.wait_for("Listening")
        (limits,) = (line for line in Path(f"/proc/{server.process.pid}/limits").read_text().splitlines() if "open files" in line)
        assert limits.split()[3:5] == ["1024", "1024"]  # it began with half of what it may have
        before = memory_mb(server.process.pid)
        siege = Siege(made.port, source)
        siege.start()
        sites = [made.site(name) for name in SITES[:2]]
        largest, files = 0.0, 0
        for _ in range(int(SECONDS)):
            time.sleep(1)
            assert server.process.exitcode is None, server.said()
            largest = max(largest, memory_mb(server.process.pid) - before)
            files = max(files, len(os.listdir(f"/proc/{server.process.pid}/fd")))
        sites.append(made.site(SITES[2]))
        for running in [*sites, server]:
            assert running.finish(180) == 0, running.said()
        siege.over.set()
        print(f"\n{siege.opened} connections in {SECONDS:g} s: at most {files} files open, {largest:.0f} MB more than before")
        assert siege.opened >= IDLE and files < 300
        assert largest < USUAL + 1.5 * MESSAGE_MB * len(SITES)
        assert source == "127.0.0.1" or "the connection is lost" not in server.said()
        check_same(made, rehearsed(made, nobody))


@pytest.mark.parametrize("who", ["server", "west"])
def test_a_process_that_was_stopped_goes_on(who: str, tmp_path: Path, nobody: Watcher) -> None:
    with federation(tmp_path) as made:
        patient_sites(made)
        running = {"server": made.serve(), **{name: made.site(name) for name in SITES}}
        running["west"].wait_for("west: round 2")
        os.kill(running[who].process.pid, signal.SIGSTOP)
        time.sleep(STOPPED)
        os.kill(running[who].process.pid, signal.SIGCONT)
        began = time.monotonic()
        for name in (*SITES, "server"):
            assert running[name].finish(180) == 0, "\n".join(one.said() for one in running.values())
        print(f"\n{who} did not run for {STOPPED:g} s; the federation was over {time.monotonic() - began:.0f} s later")
        check_same(made, rehearsed(made, nobody))
