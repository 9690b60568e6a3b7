"""Requests that no site would make."""

from __future__ import annotations

import os
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from fedloom.federation.site.connection import Connection
from fedloom.federation.wire.flower import as_record
from fedloom.federation.wire.signatures import private_key, public_bytes


class Target(Protocol):
    @property
    def address(self) -> str: ...
    @property
    def certs(self) -> Path: ...


def knock(target: Target, source: str = "127.0.0.1") -> socket.socket:
    """A connection, and nothing else."""
    host, _, number = target.address.rpartition(":")
    return socket.create_connection((host, int(number)), source_address=(source, 0))


def secure(target: Target) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=target.certs / "north/ca.pem")
    return context.wrap_socket(knock(target), server_hostname="127.0.0.1")


def head(target: Target, signer: str, length: int, what: str = "push-object") -> bytes:
    """Headers of a request in north's name, signed by whomever."""
    from flwr.supercore.primitives.asymmetric import sign_message

    now = datetime.now(UTC).isoformat()
    key, own = (private_key(target.certs / name / "key.pem") for name in ("north", signer))
    fields = {
        "host": "x",
        "content-type": "application/protobuf",
        "content-length": str(length),
        "flwr-public-key": b64encode(public_bytes(key.public_key())).decode(),
        "flwr-timestamp": now,
        "flwr-signature": b64encode(sign_message(own, now.encode())).decode(),
    }
    return (f"POST /v1/fleet/{what} HTTP/1.1\r\n" + "".join(f"{key}: {value}\r\n" for key, value in fields.items()) + "\r\n").encode()


def ask(target: Target, signer: str, what: str, content: bytes) -> int:
    """The status of the answer."""
    with secure(target) as connection:
        connection.settimeout(30)
        connection.sendall(head(target, signer, len(content), what) + content)
        return int(connection.recv(100).split()[1])


def flood(target: Target, signer: str, size: int, times: int) -> None:
    """Send requests of so many bytes, one after the other, on new connections when one is closed."""
    for _ in range(times):
        with suppress(OSError), secure(target) as connection:
            connection.settimeout(10)
            connection.sendall(head(target, signer, size))
            for _ in range(size >> 16):
                connection.sendall(os.urandom(1 << 16))
            connection.recv(100)


def announce(target: Target, connection: Connection, tree: Callable[[str], Any]) -> int:
    """Announce a reply to the message that was received last, with a tree of parts made from its name; the status of the answer."""
    from flwr.app import Message
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.proto.fleet_pb2 import PushMessagesRequest

    message = Message(as_record(b"y"), reply_to=connection._message)
    message.metadata.__dict__["_message_id"] = message.object_id
    request = PushMessagesRequest(
        node=connection._node,
        messages_list=[message_to_proto(remove_content_from_message(message))],
        message_object_trees=[tree(message.object_id)],
    )
    return ask(target, "north", "push-messages", request.SerializeToString())
