"""What can be reached at a server's port, by whom, and what comes of it: a real SuperLink and real connections, all in this process."""

from __future__ import annotations

import os
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.errors import ConnectionRefused, InvalidConfig, UnusableFormat
from fedloom.federation.certificates import make_certificates
from fedloom.federation.server.port import SLACK, SMALL, split_address
from fedloom.federation.server.superlink import Reply, SuperLink
from fedloom.federation.site import connection as connection_module
from fedloom.federation.site.connection import Connection
from fedloom.federation.wire import refusals
from fedloom.federation.wire.flower import FLOWER, need_flower
from fedloom.federation.wire.signatures import private_key, public_bytes, public_key
from fedloom.testing import tiny_file
from support.checks import Fedloom, check_refused
from support.federation import FEDERATION, SITE, SITES, write_digits
from support.port import MOST, Port, listening, received

pytestmark = pytest.mark.xdist_group("flower")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    with listening(tmp_path_factory.mktemp("certs") / "certs") as opened:
        yield opened
    with pytest.raises(ConnectionRefused, match="The server does not answer"):
        opened.connect()


@pytest.fixture
def port(server: Port, monkeypatch: pytest.MonkeyPatch) -> Port:
    monkeypatch.setattr(refusals, "APART", 0.0)  # every refusal has its line
    server.said.clear()
    return server


@pytest.fixture
def north(port: Port) -> Iterator[Connection]:
    with port.connect("north") as connection:
        connection._answered = False
        yield connection
        connection._answered = False  # so that it leaves at once, for the next test


def test_there_and_back(port: Port, north: Connection) -> None:
    for size in (0, 1, 1000, MOST):
        data = os.urandom(size)
        message = port.link.send("north", data)
        assert received(north) == data
        north.reply(data[::-1])
        assert port.answered(message) == [Reply(message, "north", data[::-1])]
    assert list(port.link.online()) == ["north"] and port.said == []
    assert port.link.send("absent", b"x") == ""  # it was never there
    assert len(port.link._state.object_store) == 0  # all that was carried is gone


def test_an_error_instead_of_an_answer(port: Port, north: Connection) -> None:
    message = port.link.send("north", b"x")
    received(north)
    north.reply(None, "no\nimages")
    assert port.answered(message) == [Reply(message, "north", error="no images")]


# -- who gets in --------------------------------------------------------------------------------


def test_an_unregistered_key_is_refused_with_one_line(port: Port, north: Connection) -> None:
    with pytest.raises(ConnectionRefused, match=r"does not know this site's key\. Its operator must put the public key among") as raised:
        port.connect("stranger")
    assert raised.value.facts["status"] == 403
    assert port.said == ["Refused a request (activate-node) from 127.0.0.1: its key is not registered"]
    message = port.link.send("north", b"x")  # and the others go on
    received(north)
    north.reply(b"y")
    assert port.answered(message)[0].data == b"y"


def test_nobody_registers_a_key_through_the_port(port: Port) -> None:
    from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest

    key = public_bytes(public_key(port.certs / "server/sites/stranger.pub"))
    content = RegisterNodeFleetRequest(public_key=key).SerializeToString()
    assert port.post("/v1/fleet/register-node", content, "stranger") == 404
    assert port.post("/v1/fleet/register-node", content, "north") == 404  # nor does a registered site for it
    assert len(port.said) == 2
    with pytest.raises(ConnectionRefused):
        port.connect("stranger")


def test_another_sites_key_is_of_no_use_without_its_private_part(port: Port) -> None:
    """Public keys may be public: a request that names one must be signed with it."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest

    east = public_bytes(public_key(port.certs / "server/sites/east.pub"))
    content = ActivateNodeRequest(public_key=east, heartbeat_interval=10).SerializeToString()
    named = {"flwr-public-key": b64encode(east).decode()}
    assert port.post("/v1/fleet/activate-node", content, "stranger", **named) == 401
    assert port.said == ["Refused a request (activate-node) from 127.0.0.1: it is not signed with the key it names, or the clocks differ"]
    assert "east" not in port.link.online()


def test_a_clock_that_is_ahead_is_named(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supernode import node_auth_http_interceptor

    monkeypatch.setattr(node_auth_http_interceptor, "now", lambda: datetime.now(UTC) + timedelta(seconds=60))
    with pytest.raises(ConnectionRefused, match="does not accept this site's signature: the clocks differ"):
        port.connect("north")
    assert len(port.said) == 1


def test_a_site_is_connected_once(port: Port, north: Connection) -> None:
    with pytest.raises(ConnectionRefused, match="connected already"):
        port.connect("north")
    assert port.said == ["Refused a request (activate-node) from 127.0.0.1: its site is connected already, or not any more"]


def test_another_connection_is_known_as_another(port: Port) -> None:
    first = port.connect("north")
    since = port.link.online()["north"]
    first.close()
    assert "north" not in port.link.online()
    with port.connect("north"):
        assert port.link.online()["north"] != since


@pytest.mark.parametrize("hosts", [["127.0.0.1"], ["example.org"]])
def test_a_server_that_is_not_the_one_it_should_be_ends_a_site(fedloom_: Fedloom, port: Port, hosts: list[str], tmp_path: Path) -> None:
    """Signed by another authority, or by the right one for another name: exit code 14 and one sentence, and no further attempt."""
    certs, said = tmp_path / "certs", []
    make_certificates(certs, SITES, hosts)
    write_digits(tmp_path / "images")
    tiny_file(tmp_path)
    (tmp_path / "federation.toml").write_text(FEDERATION.format(method="fedavg", port=1, server_images=""))
    link = port.link
    if hosts == ["example.org"]:
        keys = {"north": public_bytes(public_key(certs / "server/sites/north.pub"))}
        link = SuperLink("127.0.0.1:0", certs / "server/server.pem", certs / "server/server-key.pem", keys, MOST, said.append)
    (tmp_path / "north.toml").write_text(SITE.format(name="north", port=link.address.rpartition(":")[2], onnx="false"))
    try:
        outcome = fedloom_("site", "north.toml")
    finally:
        if link is not port.link:
            link.close()
    check_refused(outcome, ConnectionRefused, "its certificate is not signed by the authority this site trusts, or is for another name")
    assert ConnectionRefused.exit_code == 14 and "north" not in link.online()


# -- what is there ------------------------------------------------------------------------------


def test_nothing_of_flower_but_its_fleet_answers(port: Port) -> None:
    """Through its Control API anybody could have a program run at every site."""
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

    others = [path for _, path in PROTOBUF_REQUEST_TYPES if not path.startswith("/v1/fleet/")]
    assert {"/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/v1/runtime/push-messages"} <= set(others)
    others += ["/docs", "/openapi.json", "/redoc", "/", "/v1/fleet", "/v1/fleet/../control/start-run", "/v1/fleet/nothing"]
    for path in others:
        port.said.clear()
        assert port.post(path) == 404, path
        assert len(port.said) == 1, path
    assert len(others) > 60


def test_no_program_is_there_to_be_fetched(port: Port, north: Connection) -> None:
    from flwr.proto.fab_pb2 import GetFabRequest

    request = GetFabRequest(node=north._node, run_id=port.link._run, hash_str="")
    assert port.post("/v1/fleet/get-fab", request.SerializeToString()) >= 400


@pytest.mark.parametrize(("what", "most"), [("pull-messages", SMALL), ("push-object", MOST + SLACK)])
def test_an_oversized_request_is_not_read(port: Port, what: str, most: int) -> None:
    assert port.post(f"/v1/fleet/{what}", b"x" * (most + 1)) == 413
    assert port.said == [
        f"Refused a request ({what}) from 127.0.0.1: it has {most + 1} bytes, more than the {most:,} bytes that are accepted"
    ]


def test_nor_one_that_does_not_say_how_large_it_is(port: Port) -> None:
    parts = (b"x" * (1 << 20) for _ in range(5))
    assert port.post("/v1/fleet/push-object", parts, "absent") == 413  # which sent nothing before that would count too
    assert port.said == [f"Refused a request (push-object) from 127.0.0.1: more than the {MOST + SLACK:,} bytes that are accepted"]


def test_a_stranger_cannot_write_lines_of_a_log(port: Port) -> None:
    port.post("/v1/fleet/x%0aRefused%20nobody%1b[2J", name="stranger")
    (line,) = port.said
    assert line.isprintable() and line.startswith("Refused a request (x Refused nobody")


# -- replies that do not come as they should -----------------------------------------------------------------


def test_an_oversized_reply_is_not_taken(port: Port, north: Connection) -> None:
    message = port.link.send("north", b"x")
    received(north)
    north.reply(b"x" * (MOST + 1))
    (reply,) = port.answered(message)
    assert reply.error == "its reply is not readable (more than the 3,145,728 bytes that are accepted)" and reply.data == b""


def test_a_reply_without_end_is_broken_off(port: Port, north: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower takes parts of any size and keeps them until somebody asks; a question is worth one answer of the largest size."""
    from flwr.app import Array, ArrayRecord, RecordDict

    def endless(data: bytes) -> Any:
        array = Array(dtype="uint8", shape=(MOST,), stype="fedloom", data=os.urandom(MOST))
        return RecordDict({"message": ArrayRecord({"x" * MOST: array})})

    message = port.link.send("north", b"x")
    received(north)
    with monkeypatch.context() as patch, pytest.raises(ConnectionRefused, match="this site has sent too much since it was asked"):
        patch.setattr(connection_module, "as_record", endless)
        north.reply(b"")
    store: Any = port.link._state.object_store
    assert sum(len(entry.content) for entry in store.store.values()) <= MOST + SLACK
    assert port.said and all(line.startswith("Refused a request (push-object) from 127.0.0.1: its site has sent ") for line in port.said)
    port.link.forget([message])
    assert len(store) == 0  # the next question finds an empty house
    again = port.link.send("north", b"y")
    while received(north) != b"y":
        pass
    north.reply(b"in time")
    assert port.answered(again) == [Reply(again, "north", b"in time")]


def test_a_reply_that_is_announced_and_does_not_come_holds_up_nobody(
    port: Port, north: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.supercore.inflatable import inflatable_utils

    with port.connect("east") as east:
        silent, other = port.link.send("north", b"x"), port.link.send("east", b"x")
        received(north)
        received(east)
        with monkeypatch.context() as patch:
            patch.setattr(inflatable_utils, "push_objects", lambda *parts, **more: None)
            north.reply(b"never")
        east.reply(b"here")
        assert port.answered(silent, other, seconds=1) == [Reply(other, "east", b"here")]
        east._answered = False
        began = time.monotonic()
        assert port.link.replies([silent]) == [] and time.monotonic() - began < 1
        port.link.forget([silent])
        assert len(port.link._state.object_store) == 0


def test_a_reply_after_its_message_was_forgotten_goes_nowhere(port: Port, north: Connection) -> None:
    message = port.link.send("north", b"x")
    received(north)
    port.link.forget([message])
    north.reply(b"too late")  # no error: the site waits for the next
    again = port.link.send("north", b"y")
    assert received(north) == b"y"
    north.reply(b"in time")
    assert port.answered(again) == [Reply(again, "north", b"in time")] and port.said == []


def test_a_registered_site_can_answer_for_another_which_is_why_reports_are_sealed(port: Port, north: Connection) -> None:
    """Flower believes the sender that a message names, if one knows which message to answer."""
    with port.connect("east") as east:
        message = port.link.send("north", b"x")
        received(north)
        east._message = north._message
        east.reply(b"north says so")
        (reply,) = port.answered(message)
        assert reply.site == "north" and reply.data == b"north says so"
        east._answered = False


def test_a_site_that_leaves_without_an_answer_is_lost(port: Port) -> None:
    connection = port.connect("west")
    message = port.link.send("west", b"x")
    received(connection)
    connection.close()
    (reply,) = port.answered(message)
    assert reply.lost and reply.message == message


# -- the one version that this was written for -------------------------------------------------------


def test_another_flower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert metadata.version("flwr") == FLOWER
    monkeypatch.setattr(metadata, "version", lambda name: "1.42.0")
    with pytest.raises(UnusableFormat, match=r"Flower 1\.42\.0 is installed, and this was written for 1\.41\.0\. Install flwr==1\.41\.0"):
        need_flower()


def test_a_missing_flower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UnusableFormat, match=r"needs Flower, which is not installed here\. .* pip install 'fedloom\[federate\]'"):
        need_flower()


def test_flower_does_not_call_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.delenv("FLWR_DISABLE_UPDATE_CHECK", raising=False)
    need_flower()
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0" and os.environ["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    from flwr.supercore import telemetry

    assert telemetry.FLWR_TELEMETRY_ENABLED == "0"  # as it was read when Flower was imported


@pytest.mark.parametrize("address", ["", "9092", "localhost", ":9092", "localhost:", "localhost:http", "localhost:99999", "localhost:-1"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(InvalidConfig, match="is no address: write HOST:PORT"):
        split_address(address)


def test_addresses() -> None:
    assert split_address("[::1]:9092") == ("::1", 9092) and split_address("example.org:1") == ("example.org", 1)


def test_an_address_that_is_taken_and_a_certificate_that_is_none(port: Port, tmp_path: Path) -> None:
    make: Callable[..., SuperLink] = lambda address, certificate, key: SuperLink(address, certificate, key, {}, MOST, print)  # noqa: E731
    good = (port.certs / "server/server.pem", port.certs / "server/server-key.pem")
    with pytest.raises(InvalidConfig, match=rf"cannot listen at {port.link.address} .*Choose another address"):
        make(port.link.address, *good)
    with pytest.raises(InvalidConfig, match="are no certificate and its key"):
        make("127.0.0.1:0", good[0], port.certs / "north/key.pem")
    (tmp_path / "torn.pem").write_bytes(good[0].read_bytes()[:100])
    with pytest.raises(InvalidConfig, match="are no certificate and its key"):
        make("127.0.0.1:0", tmp_path / "torn.pem", good[1])
    with pytest.raises(InvalidConfig, match="are no certificate and its key"):
        make("127.0.0.1:0", tmp_path / "none.pem", good[1])


def test_a_server_cannot_send_a_site_elsewhere(server: Port) -> None:
    """Whoever answers with a redirect would make the site ask addresses of its own network."""
    asked: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(307)
            self.send_header("location", f"http://127.0.0.1:{inside.server_port}/inside")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    class Inside(Elsewhere):
        def do_POST(self) -> None:
            asked.append("inside")
            self.send_error(500)

    inside, outside = (ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in (Inside, Elsewhere))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certs / "server/server.pem", server.certs / "server/server-key.pem")
    outside.socket = context.wrap_socket(outside.socket, server_side=True)
    for one in (inside, outside):
        threading.Thread(target=one.serve_forever, daemon=True).start()
    try:
        with pytest.raises(ConnectionRefused, match="status 307"):
            key = private_key(server.certs / "north" / "key.pem")
            Connection(f"127.0.0.1:{outside.server_port}", server.certs / "north" / "ca.pem", key, MOST)
    finally:
        for one in (inside, outside):
            one.shutdown()
            one.server_close()
    assert asked == ["/v1/fleet/activate-node"]
