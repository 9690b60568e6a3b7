"""Whoever keeps the port busy without a key: connections are few and short, unsigned requests are not read, and the run goes on."""

from __future__ import annotations

import builtins
import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from fedloom import files
from fedloom.core.errors import ConnectionRefused, UnusableFolder
from fedloom.federation.site.connection import Connection
from support.attacks import head, knock, secure
from support.port import Port, received

pytestmark = pytest.mark.xdist_group("flower")
STRANGERS, EACH = 64, 6


def ended(connection: socket.socket, seconds: float) -> bool:
    """Whether the server closes it, after whatever it says."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def comes_in(port: Port, name: str) -> Connection:
    """Whoever finds the port full tries again, as sites do: a slow machine closes what has to go one after the other."""
    until = time.monotonic() + 20
    while True:
        try:
            return port.connect(name)
        except ConnectionRefused:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def test_idle_connections_make_room_and_sites_come_in(port: Port, north: Connection) -> None:
    began, idle = time.monotonic(), [knock(port, "127.0.0.2") for _ in range(300)]
    try:
        with comes_in(port, "east"):
            message = port.link.send("north", b"x")
            received(north)
            north.reply(b"y")
            assert port.answered(message)[0].data == b"y"
        time.sleep(0.5)
        assert sum(ended(connection, 0.001) for connection in idle) >= 300 - STRANGERS
        assert set(port.link.online()) == {"north"}
    finally:
        for connection in idle:
            connection.close()
    first, *_ = port.said
    assert first == f"More than {STRANGERS} connections without a signed request: closed the oldest from 127.0.0.2"
    assert len(port.said) <= time.monotonic() - began + 2


def test_the_busiest_address_makes_room(port: Port) -> None:
    one = knock(port, "127.0.0.3")  # the oldest of all
    idle = [knock(port, "127.0.0.2") for _ in range(100)]
    try:
        time.sleep(0.5)
        assert not ended(one, 0.1) and ended(idle[0], 0.1) and not ended(idle[-1], 0.1)
    finally:
        for connection in [one, *idle]:
            connection.close()


@pytest.mark.parametrize("how", ["silent", "half a request"])
def test_a_request_must_come_in_time(port: Port, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.federation.server.port.GRACE", 0.5, raising=False)
    with knock(port) if how == "silent" else secure(port) as connection:
        if how == "half a request":
            connection.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\nx: ")
        assert ended(connection, 3)


def test_headers_without_end_are_not_kept(port: Port) -> None:
    with secure(port) as connection:
        connection.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\n")
        with pytest.raises(OSError):
            for _ in range(4000):
                connection.sendall(b"x: " + b"y" * (16 << 10) + b"\r\n")


def test_the_signature_is_checked_before_the_body_is_read(port: Port) -> None:
    """Public keys may be public; whoever names one could fill the server's memory."""
    with secure(port) as connection:
        connection.sendall(head(port, "stranger", 3_000_000))  # and nothing of the body
        connection.settimeout(5)
        assert connection.recv(100).startswith(b"HTTP/1.1 401")
        assert ended(connection, 5)
    assert port.said == ["Refused a request (push-object) from 127.0.0.1: it is not signed with the key it names, or the clocks differ"]


def test_a_signed_request_that_stalls_is_given_up(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.federation.server.port.STALLED", 0.3, raising=False)
    with secure(port) as connection:
        connection.sendall(head(port, "north", 3_000_000) + b"a little")
        assert ended(connection, 5)
    assert port.said == ["Refused a request (push-object) from 127.0.0.1: nothing of it came for 0.3 seconds"]


def test_a_site_has_a_few_connections(port: Port) -> None:
    open_ones = [secure(port) for _ in range(2 * EACH)]
    try:
        for connection in open_ones:
            connection.sendall(head(port, "north", 1000))
            time.sleep(0.02)
        time.sleep(0.3)
        assert [ended(connection, 0.05) for connection in open_ones] == [True] * EACH + [False] * EACH
    finally:
        for connection in open_ones:
            connection.close()


# -- too many open files ---------------------------------------------------------------------------


def crowd(monkeypatch: pytest.MonkeyPatch, times: int, number: int) -> None:
    """As if so many files of this test could not be opened."""
    left = times

    def crowded(path: Any, *more: Any, **named: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise OSError(number, os.strerror(number))
        return builtins.open(path, *more, **named)

    monkeypatch.setattr(files, "open", crowded, raising=False)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_is_a_reason_to_wait(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    crowd(monkeypatch, 3, number)
    files.append_lines(tmp_path / "ledger.jsonl", ["one", "two"])
    assert (tmp_path / "ledger.jsonl").read_text() == "one\ntwo\n"
    (line,) = caplog.messages
    assert line == f"{tmp_path / 'ledger.jsonl'} waits: {os.strerror(number)}. Trying for 60 seconds"
    crowd(monkeypatch, 3, number)
    files.write_file(tmp_path / "state", b"whole")
    assert (tmp_path / "state").read_bytes() == b"whole" and len(caplog.messages) == 2


def test_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.files.CROWDED_SECONDS", 0.3)
    crowd(monkeypatch, 10**6, errno.EMFILE)
    began = time.monotonic()
    with pytest.raises(UnusableFolder, match="Too many open files"):
        files.append_lines(tmp_path / "ledger.jsonl", ["one"])
    assert 0.3 <= time.monotonic() - began < 5


def test_other_errors_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a full disk, where a person waits for the command. Members of a federation do wait: see test_full_disk.py."""
    crowd(monkeypatch, 1, errno.ENOSPC)
    with pytest.raises(UnusableFolder, match="No space left"):
        files.append_lines(tmp_path / "ledger.jsonl", ["one"])
