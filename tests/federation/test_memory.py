"""What attacks at their full size cost a server: a process of its own with a limit of memory. What it took is printed (pytest -s)."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedloom.federation.site import connection as connection_module
from support.attacks import announce, flood, head, knock, secure
from support.bombs import doubling, repeated
from support.federation import SITES
from support.port import Alone, alone, received

pytestmark = [pytest.mark.network, pytest.mark.xdist_group("flower")]
MESSAGE_MB = 8
BOUND = 1.5 * MESSAGE_MB * len(SITES)  # megabytes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Alone]:
    with alone(tmp_path / "certs", MESSAGE_MB << 20) as server:
        with server.connect("north") as north:
            message = server("send", "north", b"x")
            received(north)
            north.reply(b"y")
            assert server("answered", message)[0].data == b"y"
            north._answered = False  # so that it leaves at once
        yield server


def check_cost(server: Alone, what: str, attack: Callable[[], None], seconds: float = 0) -> list[str]:
    """Run it; the server's memory stays within the bound, and it goes on. What the server said."""
    server("forget")
    before, began = server("start"), time.monotonic()
    attack()
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    took, said = server("peak") - before, server("said")
    print(f"\n{what}: {took:.1f} MB of {BOUND:g}, {time.monotonic() - began:.1f} s, {len(said)} lines: {said[:1]}")
    assert took < BOUND
    with server.connect("west") as west:  # others are not held up
        message = server("send", "west", b"x")
        received(west)
        west.reply(b"y")
        assert server("answered", message)[0].data == b"y"
        west._answered = False
    return said


def test_a_megabyte_that_would_be_a_gigabyte(server: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []

    def attack() -> None:
        with server.connect("north") as north:
            message = server("send", "north", b"x")
            received(north)
            with monkeypatch.context() as patch:
                patch.setattr(connection_module, "as_record", lambda data: repeated(1 << 20, 1000))
                north.reply(b"")
            answers.extend(server("answered", message))

    assert check_cost(server, "chunk bomb", attack) == []
    assert [answer.error for answer in answers] == ["its reply is not readable (more than the 8,388,608 bytes that are accepted)"]


def test_four_kilobytes_that_would_be_a_billion_nodes(server: Alone) -> None:
    def attack() -> None:
        with server.connect("north") as north:
            server("send", "north", b"x")
            received(north)
            assert announce(server, north, lambda name: doubling(name, 30)) == 400
            north._answered = False

    assert check_cost(server, "tree bomb", attack) == ["Refused a request (push-messages) from 127.0.0.1: it names a part twice"]


@pytest.mark.parametrize("signer", ["stranger", "north"])
def test_bodies_without_end(server: Alone, signer: str) -> None:
    """Of a stranger who names a registered key nothing is read; a member has its share."""

    def attack() -> None:
        threads = [threading.Thread(target=flood, args=(server, signer, 5 << 20, 50)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    said = check_cost(server, f"8 times 250 MB by {signer}", attack)
    assert said and all(line.startswith("Refused a request (push-object) from 127.0.0.1: ") for line in said)


def test_idle_connections(server: Alone) -> None:
    idle: list[socket.socket] = []
    check_cost(server, "1,500 idle connections", lambda: idle.extend(knock(server) for _ in range(1500)), 5)
    assert server("files") < 200
    for connection in idle:
        connection.close()


def test_a_member_that_asks_and_does_not_read(server: Alone) -> None:
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.proto.message_pb2 import PullObjectRequest

    with server.connect("north") as north:
        server("send", "north", os.urandom(MESSAGE_MB << 20))
        found = north._client.PullMessages(PullMessagesRequest(node=north._node))
        part = found.message_object_trees[0]
        while part.children:
            part = part.children[0]
        request = PullObjectRequest(node=north._node, run_id=found.messages_list[0].metadata.run_id, object_id=part.object_id)
        content, silent = request.SerializeToString(), []

        def attack() -> None:
            for _ in range(30):
                silent.append(secure(server))
                silent[-1].sendall(head(server, "north", len(content), "pull-object") + content)

        check_cost(server, "30 times a chunk that nobody reads", attack, 5)
        for connection in silent:
            connection.close()
