"""One site of a federation in this process, and the server's half of its method, which writes the instructions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from fedloom.assemble.builder import make_tools
from fedloom.core.errors import ConnectionRefused
from fedloom.core.messages import FINISH, TRAIN, Instruction, Report
from fedloom.engine.store import Store
from fedloom.federation.agreement import Agreement, SiteBudget, SiteSettings, read_agreement
from fedloom.federation.certificates import make_certificates
from fedloom.federation.site.participant import Participant
from fedloom.federation.site.rounds import _answer
from fedloom.federation.wire.messages import from_bytes, to_bytes
from fedloom.federation.wire.refusals import Refusals
from fedloom.federation.wire.signatures import opened
from fedloom.methods.base import METHODS
from fedloom.testing import tiny_file
from support.federation import FEDERATION, SITE, SITES, write_digits

KEY = ec.generate_private_key(ec.SECP384R1())


@dataclass
class Place:
    """A site and the server's half of the method, which writes its instructions."""

    settings: SiteSettings
    agreement: Agreement
    store: Store
    said: list[str]

    def __post_init__(self) -> None:
        run = self.agreement.settings
        tools = make_tools(run, self.agreement.images(), torch.device("cpu"), self.agreement.sites)
        self.method: Any = METHODS[run.method].make(run.components[run.method], tools)
        self.state = self.method.start(run.seed)
        self.participant = self.restart()

    def restart(self) -> Participant:
        self.participant = Participant(self.settings, self.agreement, KEY, self.store, self.said.append)
        return self.participant

    def instruction(self, round: int = 0, action: str = TRAIN) -> Instruction:
        state = replace(self.state, round=round)
        if action == FINISH:
            return self.method.farewell(state, self.settings.name)
        return next(order for order in self.method.plan(state, self.agreement.sites) if order.client == self.settings.name)

    def data(self, round: int = 0, action: str = TRAIN) -> bytes:
        return to_bytes(self.instruction(round, action), self.agreement.digest)

    def report(self, answer: bytes, asked: bytes) -> Report:
        return from_bytes(Report, opened(answer, asked, KEY.public_key(), "north"), 1 << 20, self.agreement.digest)


def write_agreement(place: Path, method: str = "perfedsde") -> Path:
    """Images of three sites and what they agreed on."""
    place.mkdir(exist_ok=True)
    write_digits(place / "images")
    tiny_file(place)
    text = FEDERATION.format(method=method, port=1, server_images="")
    (place / "federation.toml").write_text(text + '[perfedsde]\ngenerator = "random"\nsurrogate = "none"\n')  # soon done
    return place


def write_site(agreed: Path, place: Path) -> Path:
    """What the command needs to be the site north of this agreement, except for a server."""
    make_certificates(place / "certs", SITES, ["127.0.0.1"])
    for name in ("federation.toml", "tiny.toml"):
        shutil.copy(agreed / name, place)
    (place / "images").symlink_to(agreed / "images")
    (place / "north.toml").write_text(SITE.format(name="north", port=1, onnx="false"))
    return place


@contextmanager
def at(images: Path, folder: Path, name: str = "north", secret: bool = False, budget: SiteBudget | None = None) -> Iterator[Place]:
    """secret: of its own, so that it draws something else than other sites of this name. budget: of its own."""
    own = str(images / "images" / name)
    settings = SiteSettings(name=name, images=own, device="cpu", threads=1, message_mb=1, secret=secret, onnx=False)
    settings = replace(settings, budget=budget or settings.budget)
    store = Store(folder)
    store.claim()
    try:
        yield Place(settings, read_agreement(images / "federation.toml"), store, [])
    finally:
        store.release()


@dataclass
class Line:
    """A connection on which these instructions arrive, one after the other; then it breaks."""

    arriving: list[Any]
    replies: list[tuple[bytes | None, str]]
    lost: bool = False

    def receive(self) -> bytes | None:
        if not self.arriving:
            raise ConnectionRefused("broken")
        found = self.arriving.pop(0)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    def reply(self, data: bytes | None, error: str = "") -> None:
        self.replies.append((data, error))


def talk(place: Place, *arriving: Any) -> list[tuple[bytes | None, str]]:
    connection = Line(list(arriving), [])
    with pytest.raises(ConnectionRefused):
        _answer(connection, place.participant, 0.01, Refusals(place.said.append))  # type: ignore[arg-type]
    return connection.replies
