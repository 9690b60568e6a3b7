"""A site that claims many images, many steps or a long update gets no larger share of the average than its due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from fedloom.core.boundary import Manifest
from fedloom.core.messages import Report
from fedloom.federation.agreement import RoundSettings
from fedloom.federation.server.link import REFUSALS
from fedloom.federation.server.superlink import Reply
from fedloom.federation.server.tolerant import Tolerant
from support.toy_federation import NAMES, Federation, Site, Toy, changed, honest, honest_report, of_the_honest, same, with_update

pytestmark = pytest.mark.usefixtures("no_pauses")
SETTINGS = RoundSettings(minimum=3, timeout=0.2, patience=0.1, message_mb=1)


def with_liar(liar: Site, **more: Any) -> Federation:
    return Federation({**dict.fromkeys(NAMES[:3], honest), "liar": liar}, SETTINGS, **more)


def claims(examples: float) -> Site:
    return changed(facts=lambda report: {"examples": examples})


@pytest.mark.parametrize("examples", [1e9, 1e6, 500.0])
def test_claimed_images_without_an_agreement(examples: float) -> None:
    """The honest ones have 10, 20 and 30: the median of four is 25 and the limit 250."""
    federation = with_liar(claims(examples))
    assert same(federation.run(), of_the_honest(liar_in=()))
    assert len(federation.said) == 2 and all(
        "left out: its examples is" in line and "federation.images" in line for line in federation.said
    )


def test_claimed_images_beyond_the_agreement() -> None:
    agreed = {"a": 10, "b": 20, "c": 30, "liar": 40}
    assert same(with_liar(honest, claims=agreed).run(), of_the_honest(liar_in=(0, 1)))
    federation = with_liar(claims(41), claims=agreed)
    assert same(federation.run(), of_the_honest(liar_in=()))
    assert federation.said[0] == "liar, round 1: left out: it claims 41 training images, and 40 were agreed on (federation.images)"


def test_a_large_site_may_be_large_if_that_was_agreed_on() -> None:
    federation = with_liar(claims(4000), claims={"a": 10, "b": 20, "c": 30, "liar": 4000})
    assert not same(federation.run(), of_the_honest(liar_in=())) and federation.said == []


def test_an_update_much_longer_than_the_others() -> None:
    """Shorter than ten times the weights, which the port would refuse, and still thirty times the median."""
    federation = with_liar(with_update(lambda array: array * 12))
    assert same(federation.run(), of_the_honest(liar_in=()))
    assert len(federation.said) == 2 and "left out: its update is" in federation.said[0]


def test_claimed_steps() -> None:
    class Counting(Toy):
        uploads: ClassVar[Manifest] = {**Toy.uploads, "coverage": replace(Toy.uploads["update"], counts=True)}

    method, said = Counting(1), []  # type: ignore[var-annotated]
    reports = [honest_report(instruction) for instruction in method.plan(method.start(0), NAMES)]
    steps = dict(zip(NAMES, (4, 5, 6, 10_000), strict=True))
    counted = [replace(r, arrays={**r.arrays, "coverage": {"w": np.full((2, 3), steps[r.client], np.int32)}}) for r in reports]
    after = Tolerant(method, said.append, SETTINGS).absorb(method.start(0), counted)
    assert (
        same(after, method.absorb(method.start(0), counted[:3])) and len(said) == 1 and "liar, round 1: left out: its coverage" in said[0]
    )


def test_two_reports_cannot_be_told_apart() -> None:
    method, said = Toy(1), []  # type: ignore[var-annotated]
    reports = [honest_report(instruction) for instruction in method.plan(method.start(0), NAMES[:2])]
    large = [reports[0], Report("b", 0, reports[1].arrays, {"examples": 1e6})]
    assert (
        same(Tolerant(method, said.append, SETTINGS).absorb(method.start(0), large), method.absorb(method.start(0), large)) and said == []
    )


def test_who_would_answer_the_same_again_does_not_hold_up_a_round() -> None:
    """Training that diverged does so again: the round ends with what there is, and says so."""
    failed = Reply("", "liar", error="ClientFailed; the site's own log says more")
    federation = Federation({**dict.fromkeys(NAMES[:3], honest), "liar": lambda asked: failed}, replace(SETTINGS, minimum=4), Toy(1))
    assert same(federation.run(), of_the_honest(1, liar_in=()))
    assert federation.said[-1] == "round 1 has 3 of the 4 reports it needs and ends without liar, who would answer the same again"
    assert [site for site, _ in federation.post.sent].count("liar") == 1


def test_who_sends_what_fails_a_check_is_asked_twice() -> None:
    nothing: Callable[[bytes], bytes] = lambda asked: b"nothing"  # noqa: E731
    federation = Federation({**dict.fromkeys(NAMES[:3], honest), "liar": nothing}, replace(SETTINGS, minimum=4), Toy(1))
    assert same(federation.run(), of_the_honest(1, liar_in=()))
    assert [site for site, _ in federation.post.sent].count("liar") == REFUSALS
