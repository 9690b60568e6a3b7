"""A real SuperLink in this process, and connections to it: a site's own, and requests that no site would make."""

from __future__ import annotations

import ssl
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from fedloom.federation.certificates import make_certificates
from fedloom.federation.server.superlink import Reply, SuperLink
from fedloom.federation.site.connection import Connection
from fedloom.federation.wire.signatures import private_key, public_bytes, public_key
from support.federation import SITES

MOST = 3 << 20


@dataclass
class Port:
    link: SuperLink
    certs: Path
    said: list[str]

    def connect(self, name: str = "north", key: Any = None, authority: Path | None = None) -> Connection:
        key = key or private_key(self.certs / name / "key.pem")
        return Connection(self.link.address, authority or self.certs / name / "ca.pem", key, MOST)

    def post(self, path: str, content: Any = b"", name: str = "north", **headers: str) -> int:
        """A request as a site would sign it, and what is answered."""
        key, now = private_key(self.certs / name / "key.pem"), datetime.now(UTC).isoformat()
        from flwr.supercore.primitives.asymmetric import sign_message

        signed = {
            "flwr-public-key": b64encode(public_bytes(key.public_key())).decode(),
            "flwr-timestamp": now,
            "flwr-signature": b64encode(sign_message(key, now.encode())).decode(),
            "content-type": "application/protobuf",
        }
        with httpx.Client(verify=ssl.create_default_context(cafile=self.certs / name / "ca.pem"), trust_env=False) as client:
            return client.post(f"https://{self.link.address}{path}", content=content, headers={**signed, **headers}).status_code

    def answered(self, *messages: str, seconds: float = 10) -> list[Reply]:
        until, found = time.monotonic() + seconds, []
        while len(found) < len(messages) and time.monotonic() < until:
            found += self.link.replies([message for message in messages if message not in {reply.message for reply in found}])
            time.sleep(0.01)
        return found


@contextmanager
def listening(folder: Path, most: int = MOST) -> Iterator[Port]:
    """folder: for keys and certificates. Registered are the three sites and "absent"; "stranger" is not."""
    said: list[str] = []
    make_certificates(folder, [*SITES, "absent", "stranger"], ["127.0.0.1"])
    keys = {name: public_bytes(public_key(folder / "server/sites" / f"{name}.pub")) for name in (*SITES, "absent")}
    link = SuperLink("127.0.0.1:0", folder / "server/server.pem", folder / "server/server-key.pem", keys, most, said.append)
    try:
        yield Port(link, folder, said)
    finally:
        link.close()


def received(connection: Connection, seconds: float = 10) -> bytes:
    until = time.monotonic() + seconds
    while (found := connection.receive()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found
