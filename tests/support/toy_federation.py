"""A federation without a network: a post that delivers at once, sites that are functions, and a method that only averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from fedloom.core.boundary import LARGEST_COUNT, Manifest, Upload
from fedloom.core.messages import FINISH, TRAIN, Arrays, Instruction, Report, frozen
from fedloom.core.method import Method
from fedloom.core.result import LedgerEntry
from fedloom.engine.loop import run_rounds
from fedloom.federation.agreement import RoundSettings
from fedloom.federation.server.link import FlowerLink
from fedloom.federation.server.superlink import Reply
from fedloom.federation.server.tolerant import Tolerant
from fedloom.federation.wire.messages import from_bytes, to_bytes
from fedloom.federation.wire.signatures import signed

NAMES = ["a", "b", "c", "liar"]
KEYS = {name: ec.generate_private_key(ec.SECP384R1()) for name in NAMES}
AGREED = "what all agreed on"
Site = Callable[[bytes], "bytes | Reply | None"]


@dataclass(frozen=True)
class ToyState:
    round: int
    weights: Arrays
    seed: int = 0


@dataclass(frozen=True)
class Toy(Method[ToyState]):
    """Averages what sites send."""

    rounds: int = 2
    uploads: ClassVar[Manifest] = {"update": Upload("a change", like="weights"), "examples": Upload("how many", low=1, high=LARGEST_COUNT)}

    def start(self, seed: int) -> ToyState:
        return ToyState(0, frozen({"w": np.zeros((2, 3), np.float32), "v": np.ones(4, np.float32)}))

    def plan(self, state: ToyState, clients: Sequence[str]) -> list[Instruction]:
        return [Instruction(client, state.round, TRAIN, 7, {"weights": state.weights}) for client in clients]

    def absorb(self, state: ToyState, reports: Sequence[Report]) -> ToyState:
        if not reports:
            return replace(state, round=state.round + 1)
        total = sum(report.facts["examples"] for report in reports)  # type: ignore[misc]
        mean = {
            name: sum(float(report.facts["examples"]) * report.arrays["update"][name] for report in reports) / total
            for name in state.weights
        }
        return ToyState(state.round + 1, frozen({name: (array + mean[name]).astype(np.float32) for name, array in state.weights.items()}))

    def finished(self, state: ToyState) -> bool:
        return state.round >= self.rounds

    def farewell(self, state: ToyState, client: str) -> Instruction:
        return Instruction(client, state.round, FINISH, 7, {"weights": state.weights})

    def answer(self, instruction: Instruction, site: Any) -> Any:
        raise NotImplementedError


def instruction_in(data: bytes) -> Instruction:
    return from_bytes(Instruction, data, 1 << 20, AGREED)


def honest_report(instruction: Instruction) -> Report:
    if instruction.action == FINISH:
        return Report(instruction.client, instruction.round)
    size = 1.0 + NAMES.index(instruction.client)
    update = {name: np.full_like(array, size / 10) for name, array in instruction.arrays["weights"].items()}
    return Report(instruction.client, instruction.round, {"update": update}, {"examples": 10 * size})


def sealed(report: Report, asked: bytes, key: str = "") -> bytes:
    return signed(to_bytes(report, AGREED), asked, KEYS[key or report.client])


def honest(asked: bytes) -> bytes:
    return sealed(honest_report(instruction_in(asked)), asked)


@dataclass
class Transport:
    """Delivers to sites that answer at once, or not at all."""

    sites: dict[str, Site]
    connections: dict[str, str] = field(default_factory=lambda: {name: "first" for name in NAMES})
    waiting: dict[str, Reply] = field(default_factory=dict)
    sent: list[tuple[str, bytes]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def online(self) -> dict[str, str]:
        return dict(self.connections)

    def send(self, site: str, data: bytes) -> str:
        self.sent.append((site, data))
        message = f"message {len(self.sent)}"
        answer = self.sites[site](data)
        if isinstance(answer, Reply):
            self.waiting[message] = replace(answer, message=message)
        elif answer is not None:
            self.waiting[message] = Reply(message, site, answer)
        return message

    def replies(self, waiting: Sequence[str]) -> list[Reply]:
        return [self.waiting.pop(message) for message in waiting if message in self.waiting]

    def forget(self, messages: Sequence[str]) -> None:
        self.forgotten += messages


@dataclass
class Federation:
    sites: dict[str, Site]
    settings: RoundSettings = field(default_factory=lambda: RoundSettings(minimum=3, timeout=0.2, patience=0.1, message_mb=1))
    method: Any = field(default_factory=Toy)
    said: list[str] = field(default_factory=list)
    ledger: list[LedgerEntry] = field(default_factory=list)
    claims: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.post = Transport(self.sites, {name: "first" for name in self.sites})
        keys = {name: KEYS[name].public_key() for name in self.sites}
        self.link = FlowerLink(self.post, keys, AGREED, self.method.uploads, self.settings, self.ledger.append, self.said.append)
        self.tolerant = Tolerant(self.method, self.said.append, self.settings, self.claims)

    def run(self, state: Any = None) -> Any:
        state = self.method.start(0) if state is None else state
        return run_rounds(self.method, self.link, state, lambda state: None, self.tolerant.absorb)


def same(one: Any, other: Any) -> bool:
    return one.round == other.round and all(np.array_equal(one.weights[name], other.weights[name]) for name in one.weights)


def of_the_honest(rounds: int = 2, liar_in: Sequence[int] = (0,)) -> ToyState:
    """What comes of it if the liar's reports count in these rounds only."""
    method = Toy(rounds)
    state = method.start(0)
    for round in range(rounds):
        asked = method.plan(state, NAMES if round in liar_in else NAMES[:3])
        state = method.absorb(state, [honest_report(instruction) for instruction in asked])
    return state


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    """The honest report but for some fields; signed as it should be."""

    def answer(asked: bytes) -> bytes:
        report = honest_report(instruction_in(asked))
        return sealed(replace(report, **{name: change(report) for name, change in fields.items()}), asked, "liar")

    return answer


def with_update(change: Callable[[np.ndarray], np.ndarray], **more: np.ndarray) -> Callable[[bytes], bytes]:
    def arrays(report: Report) -> dict[str, Arrays]:
        update = dict(report.arrays["update"])
        return {"update": {**update, "w": change(np.array(update["w"])), **more}}

    return changed(arrays=arrays)
