"""When a round over a network ends: minimum, patience, timeouts, sites that leave and return."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fedloom.engine.loop import say_farewell
from fedloom.federation.agreement import RoundSettings
from fedloom.federation.server import link as flower
from fedloom.federation.server.superlink import Reply
from support.toy_federation import (
    NAMES,
    Federation,
    Site,
    Toy,
    honest,
    of_the_honest,
    same,
)

pytestmark = pytest.mark.usefixtures("no_pauses")


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
    say_farewell(federation.method, federation.link, federation.method.start(0), set(), lambda: None)
    assert federation.said == ["the farewell ends without b, c, liar: not connected"]
    assert [entry.client for entry in federation.ledger] == ["a"]


def test_the_server_writes_down_what_each_report_held() -> None:
    federation = Federation(dict.fromkeys(NAMES, honest), method=Toy(1))
    federation.run()
    for entry in federation.ledger:
        assert entry.upload_shapes == {"update": "10 values (float32) in 2 arrays", "examples": "1 number"}
        assert entry.upload_bytes["update"] == 40 and sum(entry.upload_bytes.values()) == entry.bytes_up
