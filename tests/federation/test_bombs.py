"""Small messages that grow large where they are read: refused before they do, at both ends."""

from __future__ import annotations

import gzip
import os
import ssl
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fedloom.core.errors import ConnectionRefused
from fedloom.federation.server import superlink as superlink_module
from fedloom.federation.site import connection as connection_module
from fedloom.federation.site.connection import Connection
from fedloom.federation.site.rounds import _answer
from fedloom.federation.wire.refusals import Refusals
from support.attacks import announce
from support.bombs import doubling, repeated
from support.port import MOST, Port, received
from support.site import Place

pytestmark = pytest.mark.xdist_group("flower")
CHUNK = 1 << 20


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Python's own memory may grow by so many bytes here, in whatever thread."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


def test_a_chunk_named_many_times_is_counted_as_often(port: Port, north: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """One megabyte arrives, and 64 would be joined."""
    message = port.link.send("north", b"x")
    received(north)
    with monkeypatch.context() as patch, at_most(5 * MOST):
        patch.setattr(connection_module, "as_record", lambda data: repeated(CHUNK, 64))
        north.reply(b"")
        (reply,) = port.answered(message)
    assert reply.error == f"its reply is not readable (more than the {MOST:,} bytes that are accepted)" and reply.data == b""
    assert len(port.link._state.object_store) == 0


def test_repetitions_within_the_bound_are_a_message_as_any(port: Port, north: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an array of zeros: Flower sends equal chunks once."""
    message = port.link.send("north", b"x")
    received(north)
    with monkeypatch.context() as patch:
        patch.setattr(connection_module, "as_record", lambda data: repeated(CHUNK, 3))
        north.reply(b"")
    (reply,) = port.answered(message)
    assert len(reply.data) == MOST and reply.data == reply.data[:CHUNK] * 3


def test_a_site_counts_as_well(port: Port, north: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(superlink_module, "as_record", lambda data: repeated(CHUNK, 64))
        port.link.send("north", b"")
    with at_most(5 * MOST), pytest.raises(ValueError, match=f"more than the {MOST:,} bytes that are accepted"):
        received(north)


def test_which_is_one_line_of_its_log(fresh: Place, port: Port, north: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(superlink_module, "as_record", lambda data: repeated(CHUNK, 64))
        bomb = port.link.send("north", b"")
    reply = north.reply

    def reply_and_leave(data: bytes | None, error: str = "") -> None:
        reply(data, error)
        raise ConnectionRefused("enough")

    monkeypatch.setattr(north, "reply", reply_and_leave)
    with at_most(5 * MOST), pytest.raises(ConnectionRefused, match="enough"):
        _answer(north, fresh.participant, 0.01, Refusals(fresh.said.append))
    (line,) = fresh.said
    assert line == f"Refused an instruction: it is not readable (more than the {MOST:,} bytes that are accepted)"
    assert fresh.participant.answers.refused() == {"It was not readable": 1}
    assert port.answered(bomb)[0].error == "the instruction was not readable"


@pytest.mark.parametrize("levels", [2, 12, 30])
def test_a_tree_that_names_a_part_twice_is_not_walked(port: Port, north: Connection, levels: int) -> None:
    """30 levels are 4 kB, and 2 ** 30 nodes for who follows the names, under the lock that every heartbeat needs."""
    message = port.link.send("north", b"x")
    received(north)
    assert announce(port, north, lambda name: doubling(name, levels)) == 400
    assert port.said == ["Refused a request (push-messages) from 127.0.0.1: it names a part twice"]
    assert all(len(entry.child_object_ids) < 2 for entry in port.link._state.object_store.store.values())
    began = time.monotonic()
    assert list(port.link.online()) == ["north"] and port.link.replies([message]) == [] and time.monotonic() - began < 1
    north.reply(b"z")  # and the honest go on
    assert port.answered(message)[0].data == b"z"


def test_nor_one_that_is_wider_or_deeper_than_a_report(port: Port, north: Connection) -> None:
    from flwr.proto.message_pb2 import ObjectTree

    def chain(length: int, width: int = 1) -> Any:
        trees = [ObjectTree(object_id=os.urandom(32).hex()) for _ in range(width)]
        for _ in range(length - 1):
            trees = [ObjectTree(object_id=os.urandom(32).hex(), children=trees)]
        return trees[0]

    port.link.send("north", b"x")
    received(north)
    assert announce(port, north, lambda name: chain(5, width=2)) == 400
    assert port.said[-1].endswith("it has more parts than the 5 of the largest report")
    port.link.send("north", b"x")
    time.sleep(1.1)  # lines of a kind are a second apart
    assert announce(port, north, lambda name: chain(90)) == 400
    assert port.said[-1].endswith("its parts are nested deeper than those of a report")


def test_a_question_is_worth_a_few_announcements(port: Port, north: Connection) -> None:
    """Each would leave some objects in the store, for nothing."""
    from flwr.proto.message_pb2 import ObjectTree

    port.link.send("north", b"x")
    received(north)
    single = lambda name: ObjectTree(object_id=os.urandom(32).hex())  # noqa: E731
    assert [announce(port, north, single) for _ in range(5)] == [200, 200, 200, 429, 429]
    port.link.send("north", b"y")
    assert announce(port, north, single) == 200


@pytest.mark.parametrize("how", ["endless", "compressed"])
def test_a_site_reads_no_answer_of_any_size(port: Port, how: str) -> None:
    """A hostile server: its answers have no end, or are small and grow."""
    sent, bomb = 0, gzip.compress(bytes(64 << 20))

    class Hostile(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal sent
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "application/protobuf")
            if how == "compressed":
                self.send_header("content-encoding", "gzip")
                self.send_header("content-length", str(len(bomb)))
                self.end_headers()
                self.wfile.write(bomb)
                return
            self.send_header("content-length", str(64 << 20))
            self.end_headers()
            for _ in range(1024):
                self.wfile.write(bytes(64 << 10))
                sent += 64 << 10

        def log_message(self, *arguments: object) -> None: ...

    with https(port, Hostile) as address, at_most(8 << 20), pytest.raises(ConnectionRefused, match="The server's answer is not readable"):
        Connection(address, port.certs / "north/ca.pem", port.key("north"), MOST)
    assert sent < 16 << 20


@contextmanager
def https(port: Port, handler: Any) -> Iterator[str]:
    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None: ...  # the site hangs up

    server = Server(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(port.certs / "server/server.pem", port.certs / "server/server-key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
