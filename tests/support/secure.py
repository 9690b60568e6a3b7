"""Five sites and a server that make secure sums without a network: real keys and masks, a post that delivers at once, deaths on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from fedloom.core.errors import FedloomError
from fedloom.core.messages import TRAIN, Arrays, Instruction, Report, frozen
from fedloom.core.privacy import PrivacySettings
from fedloom.core.result import LedgerEntry
from fedloom.engine.sums import Sums
from fedloom.federation.agreement import RoundSettings
from fedloom.federation.server.link import FlowerLink
from fedloom.federation.server.sums import SecureLink
from fedloom.federation.server.superlink import Reply
from fedloom.federation.site.sums import Member
from fedloom.federation.wire.messages import from_bytes, to_bytes
from fedloom.federation.wire.signatures import fingerprint, signed
from support.toy_federation import AGREED, Transport

SITES = ("a", "b", "c", "d", "e")
KEYS = {name: ec.generate_private_key(ec.SECP384R1()) for name in SITES}
FINGERPRINTS = {name: fingerprint(key.public_key()) for name, key in KEYS.items()}
WEIGHTS: Arrays = frozen({"w": np.zeros((40, 50), np.float32), "v": np.zeros(100, np.float32)})
QUICK = RoundSettings(minimum=3, timeout=5, patience=0.05, message_mb=1)


def held(name: str, round: int = 0) -> Report:
    """Rows of w are trained by some: the first half by all, then fewer and fewer."""
    number, draw = SITES.index(name), np.random.default_rng(SITES.index(name) + 10 * round)
    rows = np.arange(40)[:, None] < 40 - 5 * number
    update = {"w": draw.normal(0, 0.1, (40, 50)).astype(np.float32) * rows, "v": draw.normal(0, 0.1, 100).astype(np.float32)}
    return Report(name, round, {"update": update, "coverage": {"w": rows, "v": np.ones(1, bool)}}, {"examples": 10 + number})


def asked_of(name: str, round: int = 0) -> Instruction:
    return Instruction(name, round, TRAIN, 7, {"weights": WEIGHTS})


@dataclass
class Site:
    """dies: told of every question; true: it dies before it answers. after: it dies after it answered."""

    name: str
    folder: Path
    sums: Sums
    dies: Callable[[Instruction], bool] = lambda instruction: False
    after: Callable[[Instruction], bool] = lambda instruction: False
    heard: list[Instruction] = field(default_factory=list)
    sent: list[Report] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.member = Member(self.name, KEYS[self.name], AGREED, FINGERPRINTS, self.sums, self.folder)

    def answer(self, instruction: Instruction) -> Report:
        if instruction.action == TRAIN:
            return Report(self.name, instruction.round)
        return self.member.answer(instruction, held(self.name, instruction.round))

    def __call__(self, data: bytes) -> bytes:
        instruction = from_bytes(Instruction, data, 1 << 20, AGREED)
        self.heard.append(instruction)
        report = self.answer(instruction)
        self.sent.append(report)
        return signed(to_bytes(report, AGREED), data, KEYS[self.name])


@dataclass
class Secure:
    """The server and its sites. settings: of privacy."""

    folder: Path
    parts: bool = True
    settings: PrivacySettings = field(default_factory=lambda: PrivacySettings(secure=True))
    round: RoundSettings = QUICK
    said: list[str] = field(default_factory=list)
    ledger: list[LedgerEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sums = Sums(self.settings, len(SITES), self.parts)
        self.sites = {name: Site(name, self.folder / name, self.sums) for name in SITES}
        self.post = Transport({name: self._deliver(name) for name in SITES}, {name: "first" for name in SITES})
        self.start_server()

    def start_server(self) -> None:
        keys = {name: KEYS[name].public_key() for name in SITES}
        secure = SecureLink(self.sums, AGREED, FINGERPRINTS, self.folder / "server", self.ledger.append, self.said.append)
        self.link = secure.over(FlowerLink(self.post, keys, AGREED, {}, self.round, secure.collect, self.said.append))

    def _deliver(self, name: str) -> Callable[[bytes], bytes | Reply | None]:
        def deliver(data: bytes) -> bytes | Reply | None:
            site, instruction = self.sites[name], from_bytes(Instruction, data, 1 << 20, AGREED)
            if site.dies(instruction):
                del self.post.connections[name]
                return None
            try:
                answer = site(data)
            except FedloomError as error:
                return Reply("", name, error=str(error))
            if site.after(instruction):
                del self.post.connections[name]
            return answer

        return deliver

    def exchange(self, round: int = 0) -> list[Report]:
        return self.link.exchange([asked_of(name, round) for name in SITES])

    def expected(self, names: str, round: int = 0) -> Report:
        """What comes of these sites without masks."""
        (found,) = self.sums.without_masks([held(name, round) for name in names])
        return found


def same(one: Report, other: Report) -> bool:
    return all(np.array_equal(one.arrays[group][name], other.arrays[group][name]) for group in other.arrays for name in other.arrays[group])
