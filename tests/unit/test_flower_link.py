"""The server's rounds over a network that misbehaves: whatever a site sends, the round ends with what the others said.

No network here: a post that delivers at once, sites that are functions, and one of them that lies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from fedloom.assemble import make_bench
from fedloom.config import Settings
from fedloom.core.boundary import MANY, Manifest, Upload
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import FINISH, TRAIN, Arrays, Instruction, Report, frozen
from fedloom.core.result import LedgerEntry
from fedloom.data.readers import read
from fedloom.engine import flower
from fedloom.engine.flower import FlowerLink, RoundSettings
from fedloom.engine.loop import run_rounds, say_farewell
from fedloom.engine.seal import signed
from fedloom.engine.superlink import Reply
from fedloom.engine.wary import Wary
from fedloom.engine.wire import from_bytes, to_bytes
from fedloom.methods.base import METHODS

NAMES = ["a", "b", "c", "liar"]
KEYS = {name: ec.generate_private_key(ec.SECP384R1()) for name in NAMES}
AGREED = "what all agreed on"
Site = Callable[[bytes], "bytes | Reply | None"]


@dataclass(frozen=True)
class ToyState:
    round: int
    weights: Arrays


@dataclass(frozen=True)
class Toy:
    """Averages what sites send."""

    rounds: int = 2
    uploads: ClassVar[Manifest] = {"update": Upload("a change", like="weights"), "examples": Upload("how many", low=1, high=MANY)}

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
class Post:
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

    def __post_init__(self) -> None:
        self.post = Post(self.sites, {name: "first" for name in self.sites})
        keys = {name: KEYS[name].public_key() for name in self.sites}
        self.link = FlowerLink(self.post, keys, AGREED, self.method.uploads, self.settings, self.ledger.append, self.said.append)
        self.wary = Wary(self.method, self.said.append)

    def run(self, state: Any = None) -> Any:
        state = self.method.start(0) if state is None else state
        return run_rounds(self.wary, self.link, state, lambda state: None)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "GLANCE", 0.001)
    monkeypatch.setattr(flower, "AGAIN", 0.02)


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


# -- lies ---------------------------------------------------------------------------------


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


def spoiled(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array[1, 2] = value
        return array

    return change


first: dict[str, bytes] = {}


def replayed(asked: bytes) -> bytes:
    """In the second round, what it sent in the first."""
    return first["sent"]


def for_another_instruction(asked: bytes) -> bytes:
    other = replace(instruction_in(asked), seed=8)
    return sealed(honest_report(other), to_bytes(other, AGREED))


def torn(asked: bytes) -> bytes:
    return honest(asked)[:-5]


def torn_inside(asked: bytes) -> bytes:
    plain = to_bytes(honest_report(instruction_in(asked)), AGREED)
    return signed(plain[:-5], asked, KEYS["liar"])


LIES: dict[str, tuple[Site, str]] = {
    "replayed": (replayed, "is not an answer to this round's instruction"),
    "an answer to another instruction": (for_another_instruction, "is not an answer to this round's instruction"),
    "oversized": (lambda asked: signed(b"x" * (1 << 20) + b"x", asked, KEYS["liar"]), "1,048,577 bytes, more than the 1,048,576"),
    "truncated": (torn, "The report is damaged"),
    "truncated, then signed": (torn_inside, "The report is damaged or none of Fedloom's"),
    "nothing": (lambda asked: b"", "The report is damaged"),
    "a signature of nothing": (lambda asked: b"\xff\xff", "The report is damaged"),
    "noise": (lambda asked: signed(b"\x80\x04K\x01.", asked, KEYS["liar"]), "none of Fedloom's"),
    "an instruction": (lambda asked: signed(asked, asked, KEYS["liar"]), "This is no report"),
    "another federation": (
        lambda asked: signed(to_bytes(honest_report(instruction_in(asked)), "another"), asked, KEYS["liar"]),
        "belongs to another federation",
    ),
    "another's key": (lambda asked: sealed(honest_report(instruction_in(asked)), asked, "a"), "was not signed with the site's key"),
    "another site's report": (changed(client=lambda report: "a"), "liar sent a report in the name of a"),
    "another round": (changed(round=lambda report: report.round - 1), "answered round 0, but was asked for round 1"),
    "a later round": (changed(round=lambda report: report.round + 5), "answered round 6, but was asked for round 1"),
    "NaN": (with_update(spoiled(np.nan)), r"update\[w\] holds values that are not finite"),
    "infinity": (with_update(spoiled(-np.inf)), r"update\[w\] holds values that are not finite"),
    "a wrong shape": (with_update(lambda array: array.T), r"update\[w\] has shape \(3, 2\), expected \(2, 3\)"),
    "a wrong type": (with_update(lambda array: array.astype(np.float64)), r"update\[w\] has type float64, expected float32"),
    "one array more": (with_update(lambda array: array, x=np.zeros(1, np.float32)), "'x' differs"),
    "one array less": (changed(arrays=lambda report: {"update": {"w": report.arrays["update"]["w"]}}), "'v' differs"),
    "a field of its own": (
        changed(arrays=lambda report: {**report.arrays, "labels": report.arrays["update"]}),
        "labels may not leave the client; the method declares examples, update",
    ),
    "a fact of its own": (changed(facts=lambda report: {**report.facts, "diagnosis": "flu"}), "diagnosis may not leave the client"),
    "a missing field": (changed(facts=lambda report: {}), "examples is missing"),
    "NaN examples": (changed(facts=lambda report: {"examples": float("nan")}), "examples is nan"),
    "no examples": (changed(facts=lambda report: {"examples": 0}), "examples is 0, it must be at least 1"),
    "more examples than there are": (changed(facts=lambda report: {"examples": 1e308}), r"examples is 1e\+308, it must be at most 1e\+09"),
    "examples as text": (changed(facts=lambda report: {"examples": "12"}), "examples is '12'"),
    "too large a norm": (
        with_update(lambda array: 100 * np.ones_like(array)),
        "update has a norm of 245, more than 10 times that of the weights it is about",
    ),
    "nothing at all": (changed(arrays=lambda report: {}, facts=lambda report: {}), r"of no use to the method \(KeyError: 'examples'\)"),
    "in another's name": (lambda asked: Reply("", "a", honest(asked)), "a answered in its name"),
    "from nobody": (lambda asked: Reply("", "", honest(asked)), "A stranger answered in its name"),
    "an error": (lambda asked: Reply("", "liar", error="no images left"), "no images left"),
    "an error in another's name": (lambda asked: Reply("", "b", error="no images left"), "b answered in its name"),
    "a forged line": (
        changed(facts=lambda report: {**report.facts, "x\nb, round 2: left out: \x1b[31mred": 1}),
        "x b, round 2: left out: \N{REPLACEMENT CHARACTER}.31mred may not leave",
    ),
    "a long line": (lambda asked: Reply("", "liar", error="word " * 1000), "word word.{1,500}…$"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_left_out_with_one_line_and_the_others_go_on(lie: str) -> None:
    send, why = LIES[lie]

    def liar(asked: bytes) -> Any:
        """Honest in the first round, so that it has something to replay."""
        if instruction_in(asked).round == 1:
            return send(asked)
        first["sent"] = honest(asked)
        return first["sent"]

    federation = Federation({**dict.fromkeys(NAMES[:3], honest), "liar": liar})
    assert same(federation.run(), of_the_honest())
    (line,) = federation.said
    assert re.match(r"liar, round 2: left out: ", line) and re.search(why, line), line
    assert line.isprintable() and len(line) <= 501
    rounds = [(entry.client, entry.round) for entry in federation.ledger]
    assert {("a", 0), ("b", 0), ("c", 0), ("liar", 0), ("a", 1), ("b", 1), ("c", 1)} <= set(rounds)
    assert all(entry.architecture == "" and entry.test_accuracy is None for entry in federation.ledger)


def test_all_honest() -> None:
    federation = Federation(dict.fromkeys(NAMES, honest))
    assert same(federation.run(), of_the_honest(liar_in=(0, 1)))
    assert federation.said == [] and len(federation.ledger) == 8
    entry = federation.ledger[0]
    assert entry.uploads == ("examples", "update") and entry.bytes_up == 40 + len('{"examples": 10.0}') and entry.bytes_down == 40


def test_a_farewell_must_bring_nothing() -> None:
    def talkative(asked: bytes) -> bytes:
        instruction = replace(instruction_in(asked), action=TRAIN)
        return sealed(honest_report(instruction), asked)

    federation = Federation({**dict.fromkeys(NAMES[:3], honest), "liar": talkative})
    state = federation.method.start(0)
    say_farewell(federation.wary, federation.link, state, {"c"}, lambda: None)
    (line,) = federation.said
    assert "liar, the farewell: left out: The final participation must send nothing" in line
    assert [(entry.client, entry.final) for entry in federation.ledger] == [("a", True), ("b", True)]


# -- foreign architectures: what only the method can judge --------------------------------------


@pytest.fixture(scope="module")
def hapfnas(tiny: Callable[..., Settings]) -> Any:
    settings = tiny("method=hapfnas", "rounds=2", "participants=4", "clients=4")
    bench = make_bench(settings, read(settings.data), torch.device("cpu"))
    return METHODS["hapfnas"].make(settings.components["hapfnas"], bench)


def searched(method: Any, instruction: Instruction, choices: Any = None, cut: Any = None) -> Report:
    """As if it had found the smallest network of the space."""
    smallest = method.bench.space.named["smallest"]
    part = method.bench.part_of(instruction.arrays["weights"], smallest if cut is None else cut)
    update = {name: np.full_like(array, 0.01 * (1 + NAMES.index(instruction.client))) for name, array in part.items()}
    own = np.array(smallest.choices if choices is None else choices, np.int32)
    arrays = {"update": update, "architecture": {"choices": own}}
    return Report(instruction.client, instruction.round, arrays, {"examples": 12})


@pytest.mark.parametrize(
    "lie, why",
    [
        (lambda method: {"choices": [99] * len(method.bench.space.genes)}, "99"),
        (lambda method: {"choices": [-1] * len(method.bench.space.genes)}, "-1"),
        (lambda method: {"cut": method.bench.space.named["largest"]}, "does not have the arrays of its architecture"),
        (lambda method: {"choices": method.bench.space.named["largest"].choices}, "does not have the arrays of its architecture"),
    ],
    ids=["too high", "negative", "another's part", "another's name"],
)
def test_a_foreign_architecture_is_left_out(hapfnas: Any, lie: Callable[[Any], dict[str, Any]], why: str) -> None:
    """They pass the door, which knows shapes but no spaces; the method's refusal must not end the federation."""
    state = replace(hapfnas.start(0), round=1)  # from here on clients send what they found

    def answers(asked: bytes) -> bytes:
        instruction = instruction_in_large(asked)
        lies = lie(hapfnas) if instruction.client == "liar" else {}
        return sealed(searched(hapfnas, instruction, **lies), asked)

    federation = Federation(dict.fromkeys(NAMES, answers), RoundSettings(minimum=3, patience=0.1), hapfnas)
    after = federation.run(state)
    (line,) = federation.said
    assert line.startswith("liar, round 2: left out: ") and why in line
    expected = hapfnas.absorb(state, [searched(hapfnas, order) for order in hapfnas.plan(state, NAMES) if order.client != "liar"])
    assert set(after.architectures) == {"a", "b", "c"}
    assert all(np.array_equal(after.supernet[name], expected.supernet[name]) for name in expected.supernet)


def instruction_in_large(data: bytes) -> Instruction:
    return from_bytes(Instruction, data, 1 << 28, AGREED)


def test_what_is_the_settings_fault_still_ends_a_run() -> None:
    class Diverging(Toy):
        def absorb(self, state: ToyState, reports: Sequence[Report]) -> ToyState:
            raise InvalidConfig("The supernet diverged. Lower the rate")

    with pytest.raises(InvalidConfig, match="Lower the rate"):
        Federation(dict.fromkeys(NAMES, honest), method=Diverging()).run()


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_state_stays_finite_whatever_passes_every_bound() -> None:
    """With norm=0 nobody looks at lengths, and the largest floats add up to infinity."""
    largest = with_update(lambda array: np.full_like(array, np.finfo(np.float32).max))
    federation = Federation({**dict.fromkeys(NAMES[:3], honest), "liar": largest}, RoundSettings(minimum=3, patience=0.1, norm=0))
    state = federation.run(ToyState(1, frozen({"w": np.full((2, 3), 3e38, np.float32), "v": np.ones(4, np.float32)})))
    assert all(np.isfinite(array).all() for array in state.weights.values())
    assert federation.said == ["liar, round 2: left out: weights would no longer be finite"]


def test_useless_reports_of_all_end_in_a_round_without_any() -> None:
    empty = changed(arrays=lambda report: {}, facts=lambda report: {})
    federation = Federation({"liar": empty}, RoundSettings(minimum=1, patience=0.1))
    state = federation.run()
    assert state.round == 2 and same(replace(state, round=0), Toy().start(0)) and len(federation.said) == 2


# -- when a round ends -----------------------------------------------------------------------


def rounds_of(federation: Federation) -> list[tuple[int, str]]:
    return [(entry.round, entry.client) for entry in federation.ledger]


def test_a_round_ends_without_those_that_are_not_connected_once_it_has_its_minimum() -> None:
    federation = Federation(dict.fromkeys(NAMES, honest), method=Toy(1))
    del federation.post.connections["liar"]
    assert same(federation.run(), of_the_honest(1, liar_in=()))
    assert federation.said == ["round 1 ends without liar: not connected"]


def test_patience_lets_a_late_site_take_part() -> None:
    federation = Federation(dict.fromkeys(NAMES, honest), RoundSettings(minimum=3, patience=30), Toy(1))
    del federation.post.connections["liar"]
    looks = 0

    def online() -> dict[str, str]:
        nonlocal looks
        looks += 1
        return {**federation.post.connections, **({"liar": "at last"} if looks > 20 else {})}

    federation.post.online = online  # type: ignore[method-assign]
    assert same(federation.run(), of_the_honest(1))
    assert federation.said == []


def test_without_its_minimum_a_round_waits_and_says_so_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "AGAIN", 0.05)
    federation = Federation(dict.fromkeys(NAMES, honest), RoundSettings(minimum=0, patience=0), Toy(1))
    del federation.post.connections["b"]
    looks = 0

    def online() -> dict[str, str]:
        nonlocal looks
        looks += 1
        return {**federation.post.connections, **({"b": "x"} if len(federation.said) >= 3 else {})}

    federation.post.online = online  # type: ignore[method-assign]
    assert same(federation.run(), of_the_honest(1))
    assert federation.said == ["round 1 has 3 of the 4 reports it needs; waiting for b"] * 3
    assert looks > 20  # it did not fill the log with what it waits for


def test_who_failed_is_asked_again_if_it_is_needed() -> None:
    answers = iter([Reply("", "liar", error="out of memory"), Reply("", "liar", error="out of memory")])
    sites: dict[str, Site] = {**dict.fromkeys(NAMES[:3], honest), "liar": lambda asked: next(answers, honest(asked))}
    federation = Federation(sites, RoundSettings(minimum=4, patience=0), Toy(1))
    assert same(federation.run(), of_the_honest(1))
    again = "round 1 has 3 of the 4 reports it needs; asking liar again"
    assert federation.said == ["liar, round 1: left out: out of memory", again] * 2
    assert [site for site, _ in federation.post.sent] == ["a", "b", "c", "liar", "liar", "liar"]


def test_no_answer_in_time() -> None:
    federation = Federation({**dict.fromkeys(NAMES[:3], honest), "liar": lambda asked: None})
    assert same(federation.run(), of_the_honest(liar_in=()))
    assert federation.said == [f"liar, round {round}: left out: no answer in 0.2 seconds" for round in (1, 2)]
    assert federation.post.forgotten == ["message 4", "message 8"]  # an answer that still comes is not taken


def test_a_late_report_does_not_count_for_the_next_round() -> None:
    """Its message was forgotten; and if a post gave it out all the same, its signature is for another instruction."""
    kept: list[bytes] = []

    def late(asked: bytes) -> bytes | None:
        kept.append(honest(asked))
        return None if len(kept) == 1 else kept[0]

    federation = Federation({**dict.fromkeys(NAMES[:3], honest), "liar": late})
    assert same(federation.run(), of_the_honest(liar_in=()))
    assert len(federation.said) == 2 and "no answer in 0.2 seconds" in federation.said[0]
    assert "not an answer to this round's instruction" in federation.said[1]


def test_answers_to_messages_that_nobody_sent_are_passed_over() -> None:
    federation = Federation(dict.fromkeys(NAMES, honest), method=Toy(1))
    replies = federation.post.replies

    def more(waiting: Sequence[str]) -> list[Reply]:
        found = replies(waiting)
        return [*found, *found, Reply("message 99", "a", b"")]

    federation.post.replies = more  # type: ignore[method-assign]
    assert same(federation.run(), of_the_honest(1)) and federation.said == []


def test_a_site_that_returns_is_asked_again() -> None:
    """It lost what it was asked before; the server learns of it even if it never saw the site gone."""
    federation = Federation({})

    def restarted(asked: bytes) -> bytes | None:
        if federation.post.connections["liar"] == "first":
            federation.post.connections["liar"] = "second"
            return None
        return honest(asked)

    sites: dict[str, Site] = {**dict.fromkeys(NAMES[:3], honest), "liar": restarted}
    federation = Federation(sites, RoundSettings(minimum=4, timeout=60, patience=60), Toy(1))
    assert same(federation.run(), of_the_honest(1))
    assert federation.said == ["liar, round 1: the connection is lost"]
    assert federation.post.forgotten == ["message 4"]


@pytest.mark.parametrize("how", ["says so", "vanishes"])
def test_a_site_that_is_lost_again_and_again_does_not_hold_up_the_others(how: str) -> None:
    federation = Federation({})

    def lost(asked: bytes) -> Reply | None:
        if how == "says so":
            return Reply("", "liar", lost=True)
        federation.post.connections["liar"] += "x"
        return None

    settings = RoundSettings(minimum=3, timeout=60, patience=0.05)
    federation = Federation({**dict.fromkeys(NAMES[:3], honest), "liar": lost}, settings, Toy(1))
    assert same(federation.run(), of_the_honest(1, liar_in=()))
    line = "liar, round 1: the connection is lost"
    assert federation.said == [line, line, f"{line}, 3 times: left out"]


def test_a_farewell_does_not_wait_for_ever() -> None:
    federation = Federation(dict.fromkeys(NAMES, honest))
    federation.post.connections = {"a": "first"}
    say_farewell(federation.wary, federation.link, federation.method.start(0), set(), lambda: None)
    assert federation.said == ["the farewell ends without b, c, liar: not connected"]
    assert [entry.client for entry in federation.ledger] == ["a"]
