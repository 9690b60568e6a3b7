"""What strangers can write to a log: at most a line of each kind and second, and nothing that a terminal obeys."""

from __future__ import annotations

import re
import time

import pytest

from fedloom.core.errors import ConnectionRefused
from fedloom.federation.site.connection import Connection
from support.port import MOST, Port

pytestmark = pytest.mark.xdist_group("flower")


def test_a_flood_of_refusals_is_a_line_a_second_that_counts_them(port: Port) -> None:
    began = time.monotonic()
    for _ in range(40):
        assert port.post("/v1/fleet/pull-messages", name="stranger") == 403
    seconds = time.monotonic() - began
    assert port.post("/nothing") == 404  # another kind has a line of its own
    time.sleep(1.3)
    about = [line for line in port.said if "its key is not registered" in line]
    assert len(about) <= seconds + 2.5 and len(port.said) == len(about) + 1
    more = [int(found[1]) for line in about if (found := re.search(r" \(and (\d+) more like it\)$", line))]
    assert sum(more) + len(about) == 40


def test_no_escape_reaches_a_terminal(port: Port) -> None:
    assert port.post("/v1/fleet/x%0aListening%1b[2J%1b]0;title%07%c2%9b31m") == 404
    (line,) = port.said
    assert line.isprintable() and "\x1b" not in line and "\x9b" not in line


def test_nor_one_from_a_server(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    def hostile(*arguments: object, **more: object) -> object:
        raise httpx.RemoteProtocolError("illegal status \x1b[2J\x9b31m")

    monkeypatch.setattr(httpx.Client, "send", hostile)
    with pytest.raises(ConnectionRefused) as raised:
        Connection(port.link.address, port.certs / "north/ca.pem", port.key("north"), MOST)
    assert str(raised.value).isprintable()
