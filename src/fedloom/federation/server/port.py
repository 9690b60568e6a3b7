"""The server's port, before anything reaches Flower: who may connect, for how long, and what of a request is read.

A stranger has a connection for some seconds, one of few, and not a byte of its request's body is read: headers are signed, and checked
first. A registered site has a few connections, and for each question it was asked as many bytes as an answer may have.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import base64
import binascii
import gc
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedloom.core.errors import InvalidConfig, one_line
from fedloom.federation.wire.flower import CHUNK, OUTER, check_tree, more_than
from fedloom.federation.wire.refusals import Refusals

SLACK = 1 << 20  # bytes of a reply beside its payload
TRIES = 3  # times that a site may announce a reply to one message
STRANGERS = 64  # connections without a signed request so far
GRACE = 10.0  # seconds until the first signed request
EACH = 6  # connections of one site; it needs three
STALLED = 60.0  # seconds without another byte of a request or an answer
KEEP_ALIVE = 15  # seconds between two requests; longer than a site keeps its end, so that it never sends into a closing one
SMALL = 64 << 10  # bytes of all headers, or of a request that carries nothing
REQUESTS = {  # what a site may ask for -> bytes it may have for that; push-object has those of a chunk
    "activate-node": SMALL,
    "deactivate-node": SMALL,
    "send-node-heartbeat": SMALL,
    "pull-messages": SMALL,
    "pull-object": SMALL,
    "confirm-message-received": SMALL,
    "push-messages": OUTER,
    "push-object": CHUNK + SLACK,
}
REPLIES = ("push-messages", "push-object")  # requests whose bytes stay in memory until somebody asks for them
REFUSALS = {  # by what Flower says
    401: "it is not signed with the key it names, or the clocks differ",
    412: "its site is connected already, or not any more",
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Refused(Exception):
    """A request that Flower does not get to see."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass
class Account:
    """What a site has sent since it was last asked."""

    taken: int = 0  # bytes
    announced: int = 0  # replies


@dataclass
class Visitor:
    connection: socket.socket
    host: str
    since: float
    key: bytes = b""  # none before the first signed request
    shown_out: bool = False

    def close(self) -> None:
        """The event loop finds it ended, and frees what it holds."""
        self.shown_out = True
        with suppress(OSError):  # it is gone already
            self.connection.shutdown(socket.SHUT_RDWR)


class Door(socket.socket):
    """A listening socket that keeps the number of connections small; asyncio accepts through it, in its own thread."""

    def __init__(self, listening: socket.socket, sites: int, refusals: Refusals) -> None:
        super().__init__(fileno=listening.detach())
        self._most = 2 * STRANGERS + EACH * sites  # with those that are being closed
        self._refusals = refusals
        self._visitors: dict[tuple[str, int], Visitor] = {}  # by address and port, in the order in which they came
        self._accepted = 0  # since what asyncio leaves was last collected

    def listen(self, backlog: int = 0, /) -> None:
        """Let many wait to be accepted, however few are accepted at once: who finds no room there tries again after a second."""
        super().listen(socket.SOMAXCONN)

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self._visitors = {place: visitor for place, visitor in self._visitors.items() if visitor.connection.fileno() >= 0}
        strangers = [visitor for visitor in self._visitors.values() if not visitor.key and not visitor.shown_out]
        if len(strangers) >= STRANGERS:  # a site that has just come must not suffer: the oldest of the busiest address leaves
            ((busiest, _),) = Counter(visitor.host for visitor in strangers).most_common(1)
            self._refusals.add("busy", f"More than {STRANGERS} connections without a signed request: closed the oldest from {busiest}")
            next(visitor for visitor in strangers if visitor.host == busiest).close()
        if len(self._visitors) >= self._most:
            connection.close()
            raise ConnectionAbortedError("the port is full")  # for asyncio: see to the others first
        self._visitors[address[:2]] = Visitor(connection, address[0], time.monotonic())
        self._accepted += 1
        if self._accepted >= STRANGERS:
            self._collect()
        return connection, address

    def recognise(self, address: tuple[str, int], key: bytes) -> None:
        """A request of this connection was signed."""
        if (visitor := self._visitors.get(address)) and visitor.key != key:
            visitor.key = key
            own = [other for other in self._visitors.values() if other.key == key and other.connection.fileno() >= 0]
            if len(own) > EACH:
                own[0].close()

    def _collect(self) -> None:
        """asyncio leaves what it had for a broken connection in cycles, with all that was to be sent."""
        self._accepted = 0
        gc.collect()

    def sweep(self) -> None:
        """Close what has shown no signed request in time."""
        now = time.monotonic()
        if self._accepted >= EACH:
            self._collect()
        for visitor in self._visitors.values():
            if not visitor.key and not visitor.shown_out and now - visitor.since > GRACE:
                visitor.close()


class Guard:
    """Refuses what strangers send before it is read and what sites send beyond their share, and reports what Flower refuses."""

    def __init__(self, app: Any, keys: Any, most: int, refusals: Refusals) -> None:
        from flwr.supercore.primitives.asymmetric import bytes_to_public_key

        self._app, self._most, self._refusals = app, most + SLACK, refusals
        self._public = {key: bytes_to_public_key(key) for key in keys}
        self._accounts = {key: Account() for key in keys}
        self._fetching = {key: asyncio.Lock() for key in keys}  # one part of a message at a time
        self._limits = {**REQUESTS, "push-object": min(REQUESTS["push-object"], self._most)}
        self.door: Door | None = None

    def asked(self, key: bytes) -> None:
        """The site with this key may send one answer."""
        self._accounts[key] = Account()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        what, client = scope["path"].rpartition("/")[2], scope.get("client") or ("somebody", 0)
        about = f"Refused a request ({what}) from {client[0]}"
        try:
            headers = dict(scope["headers"])
            if not scope["path"].startswith("/v1/fleet/") or what not in REQUESTS:
                raise Refused(404, "there is no such thing here")
            key = self._whose(headers)
            if self.door:
                self.door.recognise(client, key)
            body = await self._body(what, headers, receive, self._accounts[key])
        except Refused as why:
            self._refusals.add(why.status, f"{about}: {why}")
            ending = [(b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": why.status, "headers": ending})
            return await send({"type": "http.response.body", "body": b""})

        async def read() -> MutableMapping[str, Any]:
            nonlocal body
            if body is None:
                return await receive()  # whether somebody is still there
            message, body = {"type": "http.request", "body": body, "more_body": False}, None
            return message

        async def watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and (status := message["status"]) >= 400:
                self._refusals.add(status, f"{about}: {REFUSALS.get(status, f'Flower says {status}')}")
            for piece in pieces(message):  # each when the last was taken, so that an answer nobody reads is not in every buffer
                await asyncio.wait_for(send(piece), STALLED)

        if body is not None:
            async with self._fetching[key] if what == "pull-object" else nullcontext():
                await self._app(scope, read, watched)

    def _whose(self, headers: dict[bytes, bytes]) -> bytes:
        """The registered key that signed this request, in its headers."""
        from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
        from flwr.supercore.date import now
        from flwr.supercore.primitives.asymmetric import verify_signature

        key = decoded(headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER.encode(), b""))
        if key not in self._public:
            raise Refused(403, "its key is not registered")
        signature, moment = decoded(headers.get(FLEET_HTTP_SIGNATURE_HEADER.encode(), b"")), headers.get(TIMESTAMP_HEADER.encode(), b"")
        try:
            age = (now() - datetime.fromisoformat(moment.decode("ascii"))).total_seconds()
        except (ValueError, TypeError):  # no time, or one without its zone
            age = -float("inf")
        in_time = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        if not in_time or not verify_signature(self._public[key], moment, signature):
            raise Refused(401, REFUSALS[401])
        return key

    async def _body(self, what: str, headers: dict[bytes, bytes], receive: Receive, account: Account) -> bytes | None:
        """What a site sends, counted as it comes; nothing if the site is gone."""
        limit, length = self._limits[what], headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 12 or int(length) > limit:
            raise Refused(413, f"it has {length.decode('latin-1')[:20]} bytes, {more_than(limit)}")
        if what == "push-messages":
            account.announced += 1
            if account.announced > TRIES:
                raise Refused(429, f"its site has announced more than {TRIES} replies since it was asked")
        read, parts = 0, []
        while True:
            try:
                message = await asyncio.wait_for(receive(), STALLED)
            except TimeoutError:
                raise Refused(408, f"nothing of it came for {STALLED:g} seconds") from None
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            read += len(piece)
            if read > limit:
                raise Refused(413, more_than(limit))
            if what in REPLIES:
                account.taken += len(piece)
                if account.taken > self._most:
                    raise Refused(429, f"its site has sent {account.taken:,} bytes since it was asked, {more_than(self._most)}")
            parts.append(piece)
            if not message.get("more_body"):
                break
        body = b"".join(parts)
        if what == "push-messages":
            self._check_announced(body)
        return body

    def _check_announced(self, body: bytes) -> None:
        from flwr.proto.fleet_pb2 import PushMessagesRequest

        try:
            request = PushMessagesRequest.FromString(body)
            if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
                raise ValueError("it does not announce one reply")
            check_tree(request.message_object_trees[0], self._most)
        except Exception as error:  # whatever a stranger's bytes make of protobuf
            raise Refused(400, one_line(error)) from None


class Port:
    """The guard behind a door, in a thread of its own."""

    def __init__(self, address: str, certificate: Path, key: Path, guard: Guard, sites: int, refusals: Refusals) -> None:
        import uvicorn

        host, port = split_address(address)
        try:
            listening = socket.create_server((host, port), reuse_port=False)
        except OSError as error:
            what = f"The server cannot listen at {address} ({one_line(error)}). Choose another address"
            raise InvalidConfig(what, key="server.address") from error
        self.address = f"{host}:{listening.getsockname()[1]}"
        door = guard.door = Door(listening, sites, refusals)
        config = uvicorn.Config(
            guard,
            loop="asyncio",  # which accepts through the door; others take its number
            http="h11",  # which bounds headers
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            ssl_certfile=str(certificate),
            ssl_keyfile=str(key),
            h11_max_incomplete_event_size=SMALL,
            backlog=STRANGERS,  # how many are accepted before anything else is done
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=5,
        )
        try:
            config.load()
        except OSError as error:  # SSLError is one
            door.close()
            raise InvalidConfig(f"{certificate} and {key} are no certificate and its key ({one_line(error)})", key="certificate") from error
        asyncio.sslproto.SSLProtocol.max_size = SMALL  # bytes that every connection has, used or not
        for name in ("uvicorn", "uvicorn.error", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

        class Server(uvicorn.Server):  # type: ignore[misc]
            async def on_tick(self, counter: int) -> bool:  # ten times a second
                door.sweep()
                refusals.flush()
                return bool(await super().on_tick(counter))

        self._server = Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [door]}, daemon=True, name="SuperLink")
        self._thread.start()
        until = time.monotonic() + 30
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise InvalidConfig(f"The SuperLink did not start at {address}", key="address")
            time.sleep(0.01)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)


def pieces(message: MutableMapping[str, Any]) -> Iterator[MutableMapping[str, Any]]:
    """A part of an answer in parts of its own, if it is large."""
    body, more = message.get("body", b""), message.get("more_body", False)
    if len(body) <= SMALL:
        yield message
        return
    for start in range(0, len(body), SMALL):
        yield {**message, "body": body[start : start + SMALL], "more_body": more or start + SMALL < len(body)}


def decoded(text: bytes) -> bytes:
    """A key or signature in a header; empty if it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidConfig(f"{address!r} is no address: write HOST:PORT, such as 127.0.0.1:9092", key="address")
    return host.strip("[]"), int(port)
