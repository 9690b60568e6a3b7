"""A site's end of the network: a connection to a SuperLink's Fleet API.

To the server it is a Flower SuperNode, with a key of its own. Unlike ``flower-supernode`` it never fetches the program of a run, starts no
process per message and waits for the next message where it computes.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedloom.core.errors import ConnectionRefused, one_line, printable
from fedloom.federation.wire.flower import CHUNK, OUTER, as_record, joined, more_than, need_flower

HEARTBEAT = 10.0  # seconds; after two without one the server takes the site for gone, and only then lets it in again

WHY = {  # by the server's status
    413: "The server refused the report: it is larger than the federation accepts",
    429: "The server refused the report: this site has sent too much since it was asked",
    401: "The server does not accept this site's signature: the clocks differ (this site's may be at most 5 seconds ahead)",
    403: "The server does not know this site's key. Its operator must put the public key among the federation's",
    412: "The server refused this site: it is connected already (after a crash: for about 20 seconds)",
}


class Connection:
    """receive -> work -> reply, one message at a time; a thread says that the site is alive meanwhile."""

    def __init__(self, server: str, authority: Path, key: Any, most: int) -> None:
        need_flower()
        from flwr.proto.fleet_pb2 import ActivateNodeRequest
        from flwr.proto.node_pb2 import Node
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        self._most = most
        public = key.public_key()
        signs = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(key, public)]
        self._client = FleetHttpClient(f"https://{server}", interceptors=signs, verify=ssl.create_default_context(cafile=str(authority)))
        self._client._client.follow_redirects = False  # a server must not send this site's requests to addresses of its choice
        self._client._client.headers["accept-encoding"] = "identity"
        self._client._client.event_hooks = {"response": [_bound]}
        request = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=HEARTBEAT)
        try:
            self._node = Node(node_id=self._ask(self._client.ActivateNode, request).node_id)
        except ConnectionRefused:
            self._client.close()
            raise
        self._left, self.lost, self._answered = threading.Event(), False, False
        self._message: Any = None  # the one that was received last
        self._beat = threading.Thread(target=self._stay_alive, daemon=True, name="heartbeat of the site")
        self._beat.start()

    def receive(self) -> bytes | None:
        """The next message, if there is one."""
        from flwr.common.serde import message_from_proto
        from flwr.proto.fleet_pb2 import PullMessagesRequest
        from flwr.supercore.inflatable.inflatable_protobuf_utils import (
            make_confirm_message_received_fn_protobuf,
            make_pull_object_fn_protobuf,
        )
        from flwr.supercore.inflatable.inflatable_utils import pull_objects

        found = self._ask(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not found.messages_list:
            return None
        self._answered = False  # whoever sends the next has fetched the last
        try:
            self._message, name = message_from_proto(found.messages_list[0]), found.message_object_trees[0].object_id
        except Exception as error:  # whatever a stranger's bytes make of Flower
            raise ConnectionRefused(f"The server's message is not readable ({printable(one_line(error))})") from error
        self._message.metadata.__dict__["_message_id"] = name
        run = self._message.metadata.run_id
        pull = make_pull_object_fn_protobuf(self._client.PullObject, self._node, run)
        data = joined(name, lambda parts: self._ask(lambda names: pull_objects(names, pull_object_fn=pull), list(parts)), self._most)
        self._ask(make_confirm_message_received_fn_protobuf(self._client.ConfirmMessageReceived, self._node, run), name)
        return data

    def reply(self, data: bytes | None, error: str = "") -> None:
        """Answer the message that was received last, with bytes or with why there are none."""
        from flwr.app import Error, Message
        from flwr.app.message import remove_content_from_message
        from flwr.common.constant import ErrorCode
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, push_objects

        what = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, error) if data is None else as_record(data)
        message = Message(what, reply_to=self._message)
        message.metadata.__dict__["_message_id"] = message.object_id
        request = PushMessagesRequest(
            node=self._node,
            messages_list=[message_to_proto(remove_content_from_message(message) if data is not None else message)],
            message_object_trees=[get_object_tree(message)],
            clientapp_runtime_list=[0.0],
        )
        answer = self._ask(self._client.PushMessages, request)
        push = make_push_object_fn_protobuf(self._client.PushObject, self._node, message.metadata.run_id, answer.session_id)
        due = set(answer.objects_to_push)
        with suppress(ObjectPushError):  # the server waits for this answer no longer; it will ask again
            self._ask(lambda parts: push_objects(parts, push, object_ids_to_push=due), get_all_nested_objects(message))
        self._answered = True

    def _ask(self, call: Callable[[Any], Any], request: Any) -> Any:
        import httpx

        try:
            return call(request)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            raise ConnectionRefused(WHY.get(status, f"The server refused a request, with status {status}"), status=status) from error
        except (httpx.HTTPError, OSError) as error:
            untrusted = "CERTIFICATE_VERIFY_FAILED" in str(error)
            foreign = "its certificate is not signed by the authority this site trusts, or is for another name"
            why = foreign if untrusted else printable(one_line(error))
            raise ConnectionRefused(f"The server does not answer: {why}", untrusted=untrusted) from error
        except ValueError as error:  # not a message, or too large a one
            raise ConnectionRefused(f"The server's answer is not readable ({printable(one_line(error))})") from error

    def _stay_alive(self) -> None:
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        while not self._left.is_set():
            try:
                answer = self._client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT))
                self.lost = not answer.success
            except Exception:  # the server may be starting again; whoever receives next will see
                self.lost = True
            self._left.wait(HEARTBEAT / 3)

    def close(self) -> None:
        """Leave; at once, unless an answer may not be fetched yet: Flower drops those of sites that have left."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        if not self._left.is_set():
            self._left.set()
            self._beat.join(timeout=HEARTBEAT)  # a heartbeat after it has left would let it in again
            if not self._answered:
                with suppress(Exception):  # it is leaving anyway
                    self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))
            self._client.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _bound(response: Any) -> None:
    """Read no more of an answer than the largest can have: one part of a message, or a message without its parts."""
    import httpx

    most = OUTER + (CHUNK if response.request.url.path.endswith("/pull-object") else 0)
    content = response.stream

    class Bounded(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            read = 0
            for piece in content:
                read += len(piece)
                if read > most:
                    raise ValueError(more_than(most))
                yield piece

        def close(self) -> None:
            content.close()

    if "content-encoding" in response.headers:
        raise ValueError("it is compressed, and may be of any size")
    response.stream = Bounded()
