"""A server or a site that does not run for a while: suspended, stopped, or with a clock that jumps."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from fedloom.federation.agreement import RoundSettings
from fedloom.federation.server import link as link_module
from fedloom.federation.site.connection import Connection
from support.port import Port, received
from support.toy_federation import NAMES, Federation, Site, Toy, honest, of_the_honest, same

pytestmark = pytest.mark.xdist_group("flower")


def test_the_servers_part_does_not_expire(port: Port, north: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minutes later, as after a suspension, all are gone to Flower, the server too; sites come back with their next heartbeat."""
    from flwr.server.superlink.linkstate import in_memory_linkstate as links
    from flwr.supercore.corestate import in_memory_corestate as tasks

    for module in (links, tasks):
        monkeypatch.setattr(module, "now", lambda now=module.now: now() + timedelta(seconds=120))
    assert port.link.online() == {}
    until = time.monotonic() + 10
    while not port.link.online():
        assert time.monotonic() < until
        time.sleep(0.05)
    message = port.link.send("north", b"x")
    assert message and received(north) == b"x"
    north.reply(b"y")
    assert port.answered(message)[0].data == b"y"


@pytest.mark.parametrize("clock", ["both", "the wall's"])
def test_nobody_is_late_or_gone_because_the_server_stood_still(clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred seconds pass between two looks. The site answers, and its heartbeats come again, five seconds after them."""
    moment, ahead = [1000.0], [0.0]  # of the monotonic clock, and what the other is ahead of it

    def sleep(seconds: float) -> None:
        moment[0] += seconds

    fake = SimpleNamespace(monotonic=lambda: moment[0], time=lambda: moment[0] + ahead[0], sleep=sleep)
    monkeypatch.setattr(link_module, "time", fake)
    sites: dict[str, Site] = {**dict.fromkeys(NAMES[:3], honest), "liar": lambda asked: None}
    federation = Federation(sites, RoundSettings(minimum=3, timeout=60, patience=0), Toy(1))
    replies, looks, back = federation.post.replies, 0, 0.0

    def slow(waiting: Any) -> Any:
        nonlocal looks, back
        looks += 1
        if looks == 2:
            (moment if clock == "both" else ahead)[0] += 100
            back = moment[0] + 4
        if looks == 4:
            federation.post.waiting["message 4"] = link_module.Reply("message 4", "liar", honest(federation.post.sent[3][1]))
        return replies(waiting)

    def online() -> dict[str, str]:
        return federation.post.connections if moment[0] >= back else {}

    monkeypatch.setattr(federation.post, "replies", slow)
    monkeypatch.setattr(federation.post, "online", online)
    lose = federation.link._lose
    monkeypatch.setattr(federation.link, "_lose", lambda round: lose(round) if looks != 2 else None)  # it was stopped just before
    assert same(federation.run(), of_the_honest(1))
    assert federation.said == ["The server did not run for 100 seconds, or its clock was set. round 1 goes on"]
