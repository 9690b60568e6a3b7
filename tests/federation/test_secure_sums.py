"""Secure sums with real keys and masks: what the server gets, what happens when sites die, and what sites refuse."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from fedloom.core.errors import BadMessage, DamagedRun
from fedloom.core.messages import TRAIN, Instruction, Report
from fedloom.core.privacy import COVERAGE, UPDATE, PrivacySettings
from fedloom.federation.agreement import RoundSettings
from fedloom.federation.site.sums import STATE
from fedloom.federation.wire.sums import KEYS, MASKED, OPEN, SHARES
from fedloom.maths.sums import FixedPoint, flat
from support.secure import SITES, Secure, held, same

pytestmark = pytest.mark.usefixtures("no_pauses", "no_disk")


@pytest.fixture
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power in these tests, and waiting for a disk would take most of their time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def asks(action: str, label: str = "") -> Callable[[Instruction], bool]:
    return lambda instruction: instruction.action == action and label in ("", instruction.facts.get("label"))


@pytest.mark.parametrize("parts", [True, False])
def test_the_server_gets_the_sum_that_a_simulation_makes_without_masks(parts: bool, tmp_path: Path) -> None:
    federation = Secure(tmp_path, parts)
    (found,) = federation.exchange()
    assert same(found, federation.expected("abcde")) and federation.said == []
    exact = np.mean([flat(held(name).arrays[UPDATE]).astype(np.float64) for name in SITES], 0)
    all_trained = np.arange(2100) < 1000
    assert np.abs(flat(found.arrays[UPDATE]) - exact)[all_trained].max() <= FixedPoint(8.0, 5).step / 2 + 1e-8  # and float32's own
    seen = [len(site.sent) for site in federation.sites.values()]
    assert seen == [7 if parts else 5] * 5  # trained, keys, shares, and for each sum a part and its opening


def test_weights_are_bounded_and_summed_too(tmp_path: Path) -> None:
    federation = Secure(tmp_path, False, PrivacySettings(secure=True, examples=12))
    (found,) = federation.exchange()
    weights = [10, 11, 12, 12, 12]  # of 13 and 14 no more count
    exact = np.average([flat(held(name).arrays[UPDATE]).astype(np.float64) for name in SITES], 0, weights)
    assert np.abs(flat(found.arrays[UPDATE]) - exact).max() <= FixedPoint(8.0, 5).step + 1e-8
    assert same(found, federation.expected("abcde"))


def chi_square(words: Any) -> float:
    found = np.bincount(np.frombuffer(words.tobytes(), np.uint8), minlength=256)
    mean = found.sum() / 256
    return float(chi2.sf(((found - mean) ** 2 / mean).sum(), 255))


def test_the_server_never_holds_a_single_sites_update_and_a_part_of_the_sum_is_noise(tmp_path: Path) -> None:
    federation = Secure(tmp_path)
    federation.exchange()
    for label, plain in ((COVERAGE, federation.sums.counts_of), (UPDATE, federation.sums.update_of)):
        words = {name: _sent(federation, name, label) for name in SITES}
        total = sum(words.values())
        for size in range(1, 5):
            for some in combinations(SITES, size):
                part: Any = sum(words[name] for name in some)
                assert chi_square(part.astype(total.dtype)) > 1e-6, (label, some)  # 60 draws: by chance once in ten thousand
                # Nor does the whole sum without the others: the server knows the sum, and it has masks of its own in it.
        for name in SITES:
            assert np.mean(words[name] == plain(held(name))) < 0.02
            assert chi_square(plain(held(name))) < 1e-9, "or the test would take anything for noise"
    kept = (tmp_path / "server" / "state" / "sums.safetensors").read_bytes()
    for name in SITES:
        update = federation.sums.update_of(held(name))
        assert update[:20].tobytes() not in kept and held(name).arrays[UPDATE]["v"][:10].tobytes() not in kept


def _sent(federation: Secure, name: str, group: str) -> Any:
    (found,) = (report.arrays[group]["words"] for report in federation.sites[name].sent if group in report.arrays)
    return found


# -- sites that die ----------------------------------------------------------------------------------
DEATHS = {  # when the site c dies, and whose counts and updates are then in the sums
    "after it sent its keys": ("after", asks(KEYS), "abde", "abde"),
    "before its masked counts": ("dies", asks(MASKED, COVERAGE), "abde", "abde"),
    "after its masked counts": ("after", asks(MASKED, COVERAGE), "abcde", "abde"),
    "between the two sums": ("after", asks(OPEN, COVERAGE), "abcde", "abde"),
    "before its masked update": ("dies", asks(MASKED, UPDATE), "abcde", "abde"),
    "after its masked update": ("after", asks(MASKED, UPDATE), "abcde", "abcde"),
}


@pytest.mark.parametrize("moment", DEATHS)
def test_one_of_five_sites_dies(moment: str, tmp_path: Path) -> None:
    how, when, counted, summed = DEATHS[moment]
    federation = Secure(tmp_path)
    setattr(federation.sites["c"], how, when)
    (found,) = federation.exchange()
    counts: Any = sum(federation.sums.counts_of(held(name)).astype(int) for name in counted)
    seen = counts >= 3 + len(counted) - len(summed)
    total: Any = sum(federation.sums.fixed.encoded(flat(held(name).arrays[UPDATE]) * seen) for name in summed)
    expected = np.where(seen, federation.sums.fixed.decoded(total) / np.maximum(counts * len(summed) / len(counted), 1e-9), 0)
    assert np.array_equal(flat(found.arrays[UPDATE]), expected.astype(np.float32))
    assert np.array_equal(flat(found.arrays[COVERAGE]), seen)
    check_nobody_is_unmasked(federation)


def check_nobody_is_unmasked(federation: Secure) -> None:
    """Of no site and sum have both kinds of shares left the others: of its own mask, and of its pair key; and no sum was opened twice."""
    kinds: dict[tuple[str, str], set[int]] = {}
    opened: dict[str, set[str]] = {}
    for site in federation.sites.values():
        answers = iter(site.sent)
        for instruction in site.heard:
            report = next(answers, None)
            if instruction.action != OPEN or report is None:
                continue
            label, session = str(instruction.facts["label"]), str(instruction.facts["session"])
            opened.setdefault(label, set()).add(session + str(instruction.facts["arrived"]))
            for other, share in report.arrays["opened"].items():
                kinds.setdefault((label, other), set()).add(len(share))
    assert kinds and all(len(lengths) == 1 for lengths in kinds.values())
    assert all(len(ways) == 1 for ways in opened.values())


def test_a_site_that_comes_back_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed after its keys, and again before it helps to open: what it needs is on its disk."""
    federation = Secure(tmp_path, round=RoundSettings(patience=30, message_mb=1))
    site, deaths = federation.sites["c"], []

    def dies(instruction: Instruction) -> bool:
        which = (instruction.action, instruction.facts.get("label"))
        if instruction.action in (SHARES, OPEN) and which not in deaths:
            deaths.append(which)
            site.restart()
            federation.post.connections["c"] = f"after {len(deaths)} deaths"
            raise FileNotFoundError  # never delivered
        return False

    deliver = federation.post.sites["c"]

    def lossy(data: bytes) -> Any:
        try:
            return deliver(data)
        except FileNotFoundError:
            return None

    site.dies, federation.post.sites["c"] = dies, lossy
    (found,) = federation.exchange()
    assert len(deaths) == 3 and same(found, federation.expected("abcde"))
    assert federation.said == ["c, round 1: the connection is lost"] * 3


def test_where_a_round_needs_all_its_sites_a_sum_waits_for_them(tmp_path: Path) -> None:
    """As it waits for reports: `minimum` is 0."""
    federation = Secure(tmp_path, parts=False, round=RoundSettings(patience=0, message_mb=1))
    site = federation.sites["c"]

    deliver = federation.post.sites["c"]

    def lossy(data: bytes) -> Any:
        answer = deliver(data)
        if "c" not in federation.post.connections:
            federation.post.connections["c"] = f"again {len(federation.said)}"
        return answer

    site.dies = lambda instruction: instruction.action == MASKED and len(federation.said) < 4
    federation.post.sites["c"] = lossy
    (found,) = federation.exchange()
    assert same(found, federation.expected("abcde"))
    assert "c, round 1: the connection is lost, 3 times: left out" in federation.said
    assert "round 1 has 4 of the 5 reports it needs; asking c again" in federation.said


@pytest.mark.parametrize("dead", ["cd", "bcde"])
def test_fewer_than_the_threshold_open_nothing_and_the_round_says_so_in_one_line(dead: str, tmp_path: Path) -> None:
    federation = Secure(tmp_path)
    for name in dead:
        federation.sites[name].after = asks(MASKED, COVERAGE)
    assert federation.exchange() == []
    left = 5 - len(dead)
    assert federation.said[-1] == f"round 1 ends without an average: {left} sites are left in a sum of 5, and 4 are needed to open it"
    assert not any(COVERAGE in report.arrays and "opened" in report.arrays for site in federation.sites.values() for report in site.sent)
    assert {entry.client for entry in federation.ledger} == set(SITES)


def test_fewer_than_least_are_no_sum(tmp_path: Path) -> None:
    federation = Secure(tmp_path, settings=PrivacySettings(secure=True, least=4))
    for name in "de":
        federation.sites[name].dies = asks(TRAIN)
    assert federation.exchange() == []
    assert federation.said[-1] == "round 1 ends without an average: 3 sites have trained, and a sum needs 4 (privacy.least)"


# -- a server that dies ----------------------------------------------------------------------------
class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", [(OPEN, COVERAGE), (MASKED, UPDATE), (OPEN, UPDATE)])
def test_a_server_that_is_killed_goes_on_to_the_same_sum(moment: tuple[str, str], tmp_path: Path) -> None:
    federation = Secure(tmp_path)

    def killed(instruction: Instruction) -> bool:
        if asks(*moment)(instruction):
            raise Killed  # when the first two sites have answered this question
        return False

    federation.sites["c"].dies = killed
    with pytest.raises(Killed):
        federation.exchange()
    federation.sites["c"].dies = lambda instruction: False
    federation.start_server()
    (found,) = federation.exchange()
    assert same(found, federation.expected("abcde"))
    check_nobody_is_unmasked(federation)
    if moment == (OPEN, UPDATE):  # what it wrote down then is of no use any more
        (later,) = federation.exchange(round=1)
        assert same(later, federation.expected("abcde", 1))


# -- a server that lies ----------------------------------------------------------------------------
@pytest.fixture
def asked(tmp_path: Path) -> dict[tuple[str, str], Instruction]:
    """What the site a was asked in an honest round, by action and label, and the federation."""
    federation = Secure(tmp_path)
    federation.exchange()
    heard = {(one.action, str(one.facts.get("label", ""))): one for one in federation.sites["a"].heard}
    return {**heard, ("", ""): federation}  # type: ignore[dict-item]


def refused(asked: Any, instruction: Instruction) -> str:
    federation: Secure = asked["", ""]
    with pytest.raises(BadMessage) as error:
        federation.sites["a"].member.answer(instruction, held("a", instruction.round))
    federation.sites["a"].restart()  # which does not make it forget
    with pytest.raises(BadMessage):
        federation.sites["a"].member.answer(instruction, held("a", instruction.round))
    return str(error.value)


def with_facts(instruction: Instruction, **facts: str) -> Instruction:
    return replace(instruction, facts={**instruction.facts, **facts})


def test_the_same_question_gets_the_same_answer(asked: Any) -> None:
    member = asked["", ""].sites["a"].member
    for which in ((MASKED, COVERAGE), (MASKED, UPDATE), (OPEN, COVERAGE), (OPEN, UPDATE), (KEYS, "")):
        one, other = (member.answer(asked[which], held("a")) for _ in range(2))
        group = next(iter(one.arrays))
        if which[0] != KEYS:  # a signature has randomness in it
            assert all(np.array_equal(array, other.arrays[group][name]) for name, array in one.arrays[group].items())


def test_no_site_says_both_that_another_was_lost_and_that_it_arrived(asked: Any) -> None:
    lost = with_facts(asked[OPEN, UPDATE], arrived="a,b,c,d")
    assert "was opened for other sites or entries before, and is not opened twice" in refused(asked, lost)


def test_no_part_is_masked_twice_for_other_sites_or_entries(asked: Any) -> None:
    assert "is not masked twice" in refused(asked, with_facts(asked[MASKED, UPDATE], members="a,b,c,d"))
    bits = np.full_like(asked[MASKED, UPDATE].arrays["seen"]["bits"], 255)
    question = replace(asked[MASKED, UPDATE], arrays={**asked[MASKED, UPDATE].arrays, "seen": {"bits": bits}})
    assert "is not masked twice" in refused(asked, question)


def test_a_second_session_of_a_round_does_not_open_a_sum_again(asked: Any) -> None:
    federation: Secure = asked["", ""]
    (federation.folder / "server" / "state" / "sums.safetensors").unlink()  # so that the server begins anew
    assert federation.exchange() == []
    assert "ends without an average: 0 sites are left in a sum of 5" in federation.said[-1]
    assert all("opened twice" in line for line in federation.said if line.startswith(("a,", "b,")))
    assert len(federation.exchange(round=1)) == 1, "and the next round is another"


def test_few_sites_unknown_ones_and_foreign_keys_are_refused(asked: Any) -> None:
    shares = asked[SHARES, ""]
    cards = dict(shares.arrays["cards"])
    few = replace(shares, arrays={"cards": {name: cards[name] for name in "ab"}})
    assert "2 sites are too few for a sum: 3 were agreed on (privacy.least)" in refused(asked, few)
    stranger = replace(shares, arrays={"cards": {**cards, "x": cards["b"]}})
    assert "The keys of x are signed with another key than was agreed on" in refused(asked, stranger)
    swapped = replace(shares, arrays={"cards": {**cards, "b": cards["c"]}})
    assert "The keys of b are signed with another key than was agreed on" in refused(asked, swapped)
    changed = np.array(cards["b"])
    changed[0] ^= 1
    assert "The keys of b are not signed by it for this sum" in refused(asked, replace(shares, arrays={"cards": {**cards, "b": changed}}))
    without = {name: card for name, card in cards.items() if name != "a"}
    assert "own keys are missing" in refused(asked, replace(shares, arrays={"cards": without}))
    assert "session that this site has no keys for" in refused(asked, with_facts(shares, session="0" * 32))
    assert "session that this site has no keys for" in refused(asked, replace(shares, round=3))
    assert "32 hexadecimal digits" in refused(asked, with_facts(asked[KEYS, ""], session="../x"))


def test_sums_of_few_members_or_arrivals_are_refused(asked: Any) -> None:
    assert "Its sum has 3 sites, and at least 4" in refused(asked, with_facts(asked[MASKED, COVERAGE], members="a,b,c"))
    assert "Its sum has 4 sites" in refused(asked, with_facts(asked[MASKED, COVERAGE], members="b,c,d,e"))
    assert "3 sites are left in a sum of 5, and 4 are needed to open it" in refused(
        asked, with_facts(asked[OPEN, COVERAGE], arrived="a,b,c")
    )
    assert "in order, each once" in refused(asked, with_facts(asked[MASKED, COVERAGE], members="a,a,b,c,d"))
    assert "There is no sum of 'weights'" in refused(asked, with_facts(asked[MASKED, COVERAGE], label="weights"))
    unsaid = replace(asked[MASKED, COVERAGE], facts={"session": asked[KEYS, ""].facts["session"], "members": "a,b,c,d,e"})
    assert "It has no 'label'" in refused(asked, unsaid)


def test_shares_that_were_sealed_for_another_do_not_open(asked: Any) -> None:
    question = asked[OPEN, UPDATE]
    boxes = dict(question.arrays["shares"])
    swapped = replace(question, arrays={**question.arrays, "shares": {**boxes, "b": boxes["c"]}})
    assert "not sealed for this site" in refused(asked, swapped)


def test_a_site_that_sends_wrong_shares_or_parts_spoils_no_sum(tmp_path: Path) -> None:
    federation = Secure(tmp_path / "shares", parts=False)
    site, honest = federation.sites["b"], federation.sites["b"].answer

    def lies(instruction: Instruction) -> Report:
        report = honest(instruction)
        if instruction.action != OPEN:
            return report
        return replace(report, arrays={"opened": {name: share ^ 1 for name, share in report.arrays["opened"].items()}})

    site.answer = lies  # type: ignore[method-assign]
    assert federation.exchange() == []
    assert federation.said == ["round 1 ends without an average: the shares of a do not fit, because a site sent wrong ones"]
    federation = Secure(tmp_path / "parts", parts=False)
    site, other = federation.sites["b"], federation.sites["b"].answer
    site.answer = lambda instruction: (  # type: ignore[method-assign]
        replace(other(instruction), arrays={UPDATE: {"words": np.zeros(3, np.float32)}})
        if instruction.action == MASKED
        else other(instruction)
    )
    (found,) = federation.exchange()
    assert same(found, federation.expected("acde"))
    assert any("a part of a sum has shape (3,)" in line for line in federation.said)


def test_a_damaged_memory_of_sums_is_refused(tmp_path: Path) -> None:
    federation = Secure(tmp_path)
    federation.exchange()
    (tmp_path / "a" / STATE).write_text("{}}")
    with pytest.raises(DamagedRun, match="is damaged"):
        federation.sites["a"].restart()


def test_the_ledger_says_what_left(tmp_path: Path) -> None:
    federation = Secure(tmp_path)
    federation.exchange()
    assert sorted(entry.client for entry in federation.ledger) == list(SITES)
    for entry in federation.ledger:
        assert entry.uploads == ("card", "coverage", "opened", "shares", "update")
        assert entry.upload_bytes["update"] == 4 * 2100 and entry.upload_bytes["coverage"] == 2100
        assert entry.bytes_up == sum(entry.upload_bytes.values()) and entry.bytes_down > 2100 * 4
