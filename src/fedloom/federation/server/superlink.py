"""The server's end of the network: a Flower SuperLink inside this process, with nothing but its Fleet API at the port.

Flower's own ``flower-superlink`` also serves its Control and Runtime APIs there, so anyone who reaches the port can submit code that
every site then runs. Here the server half runs in this process and sites run the Fedloom they installed: no code is sent, and only sites
whose keys were registered before get any further than the first request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedloom.core.errors import one_line
from fedloom.federation.server.port import Guard, Port
from fedloom.federation.wire.flower import as_record, joined, need_flower
from fedloom.federation.wire.refusals import Refusals

LIFETIME = 30 * 24 * 3600.0  # seconds a message may wait; rounds end by timeouts of our own


class Arriving(Exception):
    """A part of a reply is still on its way."""


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

        self._most = most
        _, self._factory = get_objectstore_linkstate_factories(FLWR_IN_MEMORY_DB_NAME, get_federation_manager(is_simulation=False))
        state = self._state = self._factory.state()
        # Registered here and nowhere else: the port has no way to add a key.
        self._node_of = {name: state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, 0) for name, public in sites.items()}
        self._site_of = {node: name for name, node in self._node_of.items()}
        self._keys = dict(sites)
        self._waiting: set[str] = set()  # messages that an answer may still come to
        self._arriving: dict[str, Any] = {}  # replies that are announced, parts of which are still on their way
        self._run = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        (task,) = (task.task_id for task in state.get_tasks(run_ids=[self._run]))
        state.claim_task(task)
        state.activate_task(task)  # sites may answer from here on
        # To Flower the server half is a process that may die, and after a minute without a heartbeat its run is over for good. It is this
        # process, which may be suspended for longer.
        state.task_token_store[task].active_until = datetime.max.replace(tzinfo=UTC)
        refusals = Refusals(say)
        self._guard = Guard(self._fleet(), sites.values(), most, refusals)
        self._port = Port(address, certificate, key, self._guard, len(sites), refusals)
        self.address = self._port.address

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
        self._guard.asked(self._keys[site])
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

        answered, site = message.metadata.reply_to_message_id, self._site_of.get(message.metadata.src_node_id, "")
        store, name = self._state.object_store, message.metadata.message_id
        if message.has_error():
            with suppress(Exception):
                store.delete(name)
            if message.error.code in (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE):
                return Reply(answered, site, lost=True)
            return Reply(answered, site, error=one_line(ValueError(message.error.reason)) or "it failed without saying why")
        try:
            reply = Reply(answered, site, data=joined(name, self._parts, self._most))
        except Arriving:
            return None
        except Exception as error:  # whatever a stranger's bytes make of Flower
            reply = Reply(answered, site, error=f"its reply is not readable ({one_line(error)})")
        with suppress(Exception):
            store.delete(name)
        return reply

    def _parts(self, names: Sequence[str]) -> dict[str, bytes]:
        found = {name: self._state.get_object(self._run, name) for name in names}
        if None in found.values():
            raise ValueError("it was broken off")
        if b"" in found.values():
            raise Arriving
        return found

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

    def close(self) -> None:
        self._port.close()
