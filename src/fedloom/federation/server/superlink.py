"""The server's end of the network: a Flower SuperLink inside this process, with nothing but its Fleet API at the port.

Flower's own ``flower-superlink`` also serves its Control and Runtime APIs there, so anyone who reaches the port can submit code that
every site then runs. Here the server half runs in this process and sites run the Fedloom they installed: no code is sent, and only sites
whose keys were registered before get any further than the first request.
"""

from __future__ import annotations

import base64
import binascii
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.core.errors import InvalidConfig, one_line, printable
from fedloom.federation.wire.flower import as_record, from_record, need_flower

SLACK = 1 << 20  # bytes of a request beside its payload
TRIES = 3  # times that a site may send its reply to one message, should the network break
LIFETIME = 30 * 24 * 3600.0  # seconds a message may wait; rounds end by timeouts of our own

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Reply:
    """What came back for one message: bytes, or why there are none."""

    message: str  # the id of what it answers
    site: str
    data: bytes = b""
    error: str = ""
    lost: bool = False  # the site is gone; it may come back


class SuperLink:
    """Messages to sites and back, by the names their keys were registered under.

    say: where refusals are reported, one line each. most: bytes a reply may have.
    """

    def __init__(
        self, address: str, certificate: Path, key: Path, sites: Mapping[str, bytes], most: int, say: Callable[[str], None]
    ) -> None:
        need_flower()
        from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
        from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
        from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories

        self._tell, self._most = say, most
        _, self._factory = get_objectstore_linkstate_factories(FLWR_IN_MEMORY_DB_NAME, get_federation_manager(is_simulation=False))
        state = self._state = self._factory.state()
        # Registered here and nowhere else: the port has no way to add a key.
        self._node_of = {name: state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, 0) for name, public in sites.items()}
        self._site_of = {node: name for name, node in self._node_of.items()}
        self._keys = dict(sites)
        self._taken = dict.fromkeys(sites.values(), 0)  # bytes of replies, by key, since the site was last asked
        self._waiting: set[str] = set()  # messages that an answer may still come to
        self._arriving: dict[str, Any] = {}  # replies that are announced, parts of which are still on their way
        self._run = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        (self._task,) = (task.task_id for task in state.get_tasks(run_ids=[self._run]))
        state.claim_task(self._task)
        state.activate_task(self._task)  # sites may answer from here on
        self._server, self._thread, self.address = self._start(address, certificate, key)
        self._open = True
        threading.Thread(target=self._stay_alive, daemon=True, name="heartbeat of the server").start()

    # -- messages ----------------------------------------------------------------
    def online(self) -> dict[str, str]:
        """The sites that are connected, and since when: another time is another connection, which knows nothing of earlier messages."""
        from flwr.supercore.constant import NodeStatus

        nodes = self._state.get_node_info(node_ids=list(self._site_of), statuses=[NodeStatus.ONLINE])
        return {self._site_of[node.node_id]: str(node.last_activated_at) for node in nodes}

    def send(self, site: str, data: bytes) -> str:
        """Put a message where the site will find it; its id, or nothing if the site was never there."""
        from flwr.app import Metadata
        from flwr.app.message import make_message, remove_content_from_message
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        metadata = Metadata(
            run_id=self._run,
            message_id="",
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=self._node_of[site],
            reply_to_message_id="",
            group_id="",
            created_at=time.time(),
            ttl=LIFETIME,
            message_type="query",
        )
        message = make_message(metadata=metadata, content=as_record(data))
        message.metadata.__dict__["_message_id"] = message.object_id
        session = self._state.start_session(self._run)
        stored, missing = self._state.store_message_and_object_tree(remove_content_from_message(message), get_object_tree(message), session)
        if not stored:
            return ""
        self._taken[self._keys[site]] = 0
        self._waiting.add(str(message.metadata.message_id))
        for name, item in get_all_nested_objects(message).items():
            if name in missing:
                self._state.store_object(self._run, session, name, item.deflate())
        return str(message.metadata.message_id)

    def replies(self, waiting: Collection[str]) -> list[Reply]:
        """Answers to these messages that are there as a whole; each is given once."""
        known = {message for message in waiting if message not in self._arriving}
        found = self._state.get_message_res(message_ids=known, run_id=self._run)
        self._state.delete_messages(message_ins_ids={message.metadata.reply_to_message_id for message in found})
        self._arriving |= {message.metadata.reply_to_message_id: message for message in found}
        answers = [self._reply(self._arriving[message]) for message in waiting if message in self._arriving]
        there = [answer for answer in answers if answer is not None]
        for answer in there:
            del self._arriving[answer.message]
        self._done({answer.message for answer in there})
        return there

    def forget(self, messages: Collection[str]) -> None:
        """Answers to these are no longer waited for; one that still comes is refused, and what was sent is not kept."""
        self._state.delete_messages(message_ins_ids=set(messages))
        for message in messages:
            reply = self._arriving.pop(message, None)
            for name in (message, reply.metadata.message_id if reply else message):
                with suppress(Exception):  # it may be gone already
                    self._state.object_store.delete(name)
        self._done(messages)

    def _done(self, messages: Collection[str]) -> None:
        """Nothing is kept while no answer is due: not what was sent to sites that have left, nor what came without being asked for."""
        self._waiting -= set(messages)
        if not self._waiting:
            self._state.object_store.clear()

    def _reply(self, message: Any) -> Reply | None:
        """What a message says, or nothing while a part of it is on its way."""
        from flwr.common.constant import ErrorCode
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        answered, site = message.metadata.reply_to_message_id, self._site_of.get(message.metadata.src_node_id, "")
        store, name = self._state.object_store, message.metadata.message_id
        if message.has_error():
            with suppress(Exception):
                store.delete(name)
            if message.error.code in (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE):
                return Reply(answered, site, lost=True)
            return Reply(answered, site, error=one_line(ValueError(message.error.reason)) or "it failed without saying why")
        try:
            names = [tree.object_id for tree in iterate_object_tree(store.get_object_tree(name))]
            contents = {part: self._state.get_object(self._run, part) for part in names}
            if b"" in contents.values():
                return None
            if None in contents.values():
                raise ValueError("it was broken off")
            reply = Reply(answered, site, data=from_record(inflate_object_from_contents(name, contents), self._most))
        except Exception as error:  # whatever a stranger's bytes make of Flower
            reply = Reply(answered, site, error=f"its reply is not readable ({one_line(error)})")
        with suppress(Exception):
            store.delete(name)
        return reply

    # -- the port ------------------------------------------------------------------
    def _start(self, address: str, certificate: Path, key: Path) -> tuple[Any, threading.Thread, str]:
        import uvicorn

        host, port = split_address(address)
        try:
            listening = socket.create_server((host, port), reuse_port=False)
        except OSError as error:
            what = f"The server cannot listen at {address} ({one_line(error)}). Choose another address"
            raise InvalidConfig(what, key="server.address") from error
        config = uvicorn.Config(
            self._guarded(self._fleet()),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            ssl_certfile=str(certificate),
            ssl_keyfile=str(key),
            h11_max_incomplete_event_size=SLACK,
        )
        try:
            config.load()
        except OSError as error:  # SSLError is one
            listening.close()
            raise InvalidConfig(f"{certificate} and {key} are no certificate and its key ({one_line(error)})", key="certificate") from error
        for name in ("uvicorn", "uvicorn.error"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True, name="SuperLink")
        thread.start()
        until = time.monotonic() + 30
        while not server.started:
            if not thread.is_alive() or time.monotonic() > until:
                raise InvalidConfig(f"The SuperLink did not start at {address}", key="address")
            time.sleep(0.01)
        return server, thread, f"{host}:{listening.getsockname()[1]}"

    def _fleet(self) -> Any:
        """Flower's Fleet API and what it needs, nothing else."""
        from fastapi import FastAPI
        from flwr.supercore.error import http_error_translator
        from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
        from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
        from flwr.superlink.routers.fleet.router import router
        from starlette.middleware import Middleware
        from starlette.middleware.base import BaseHTTPMiddleware

        middleware = [
            Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
            Middleware(ProtobufTranslationMiddleware),
            Middleware(NodeAuthMiddleware),  # every request is signed with a site's key
        ]
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, middleware=middleware)
        app.state.linkstate_factory = self._factory
        app.state.enable_supernode_auth = True  # nobody registers a key through the port
        app.include_router(router)
        return app

    def _guarded(self, app: Any) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """Refuse what is too large or comes from strangers before it is read, and report what Flower refuses."""
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

        most = self._most + SLACK
        enough = TRIES * most

        async def guard(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return
            what, who, read = scope["path"].rpartition("/")[2], (scope.get("client") or ("somebody",))[0], 0
            headers = dict(scope["headers"])
            length = headers.get(b"content-length", b"0")

            async def refuse(status: int, why: str) -> None:
                self._say(f"Refused a request ({what}) from {who}: {why}")
                await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
                await send({"type": "http.response.body", "body": b""})

            if not scope["path"].startswith("/v1/fleet/"):
                return await refuse(404, "there is no such thing here")
            key = decoded(headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER.encode(), b""))
            if key not in self._taken:  # whether a request is signed with the key that it names Flower checks
                return await refuse(403, "its key is not registered")
            if what in REPLIES and self._taken[key] >= enough:
                return await refuse(429, f"its site has sent {self._taken[key]:,} bytes since it was asked")
            if not length.isdigit() or int(length) > most:
                return await refuse(413, f"it has {length.decode('latin-1')[:20]} bytes, {more_than(most)}")

            async def counted() -> MutableMapping[str, Any]:
                nonlocal read
                message = await receive()
                read += len(message.get("body", b""))
                if read > most:
                    raise ValueError(more_than(most))
                return message

            async def watched(message: MutableMapping[str, Any]) -> None:
                if message["type"] == "http.response.start" and message["status"] >= 400:
                    message["status"] = status = 413 if read > most else message["status"]
                    why = more_than(most) if read > most else REFUSALS.get(status, f"Flower says {status}")
                    self._say(f"Refused a request ({what}) from {who}: {why}")
                elif message["type"] == "http.response.start" and what in REPLIES:
                    self._taken[key] += read
                await send(message)

            await app(scope, counted, watched)

        return guard

    def _say(self, text: str) -> None:
        self._tell(printable(text))  # a stranger's words are part of some lines

    def _stay_alive(self) -> None:
        while self._open:
            self._state.acknowledge_task_heartbeat(self._task)
            time.sleep(10)

    def close(self) -> None:
        self._open = False
        self._server.should_exit = True
        self._thread.join(timeout=10)


REPLIES = ("push-messages", "push-object")  # requests whose bytes stay in memory until somebody asks for them
REFUSALS = {  # by what Flower says
    401: "it is not signed with the key it names, or the clocks differ",
    412: "its site is connected already, or not any more",
}


def decoded(key: bytes) -> bytes:
    """A public key in a header; empty if it is none."""
    try:
        return base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        return b""


def more_than(most: int) -> str:
    return f"more than the {most:,} bytes that are accepted"


def split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidConfig(f"{address!r} is no address: write HOST:PORT, such as 127.0.0.1:9092", key="address")
    return host.strip("[]"), int(port)
