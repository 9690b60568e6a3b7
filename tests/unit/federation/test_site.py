"""Where a site checks what it is asked: a server that lies gets no answer, and nothing at the site changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.client_site import ClientSite
from fedloom.core.errors import BadMessage, ClientFailed, ConnectionRefused, DamagedRun, InvalidConfig
from fedloom.core.messages import FINISH, Instruction, Report
from fedloom.federation.agreement import SiteSettings
from fedloom.federation.site import rounds as site_module
from fedloom.federation.site.participant import own_data
from fedloom.federation.site.rounds import _answer
from fedloom.federation.wire.messages import to_bytes
from fedloom.federation.wire.refusals import Refusals
from support.checks import everything
from support.federation import lines, write_digits
from support.site import Line, Place, at, talk, write_agreement


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agreement(tmp_path_factory.mktemp("sites"))


@pytest.fixture
def place(images: Path, tmp_path: Path) -> Iterator[Place]:
    with at(images, tmp_path / "site") as place:
        yield place


@pytest.fixture(scope="module")
def two_rounds(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with at(images, folder) as place:
        for round in (0, 1):
            place.participant.answer(place.data(round))
    return folder


@pytest.fixture
def answered(images: Path, two_rounds: Path, tmp_path: Path) -> Iterator[Place]:
    """A site after two rounds."""
    shutil.copytree(two_rounds, tmp_path / "site")
    with at(images, tmp_path / "site") as place:
        yield place


def spoiled(instruction: Instruction, value: float) -> Instruction:
    weights = {name: np.array(array) for name, array in instruction.arrays["weights"].items()}
    next(iter(weights.values())).flat[0] = value
    return replace(instruction, arrays={"weights": weights})


def reshaped(instruction: Instruction) -> Instruction:
    weights = {name: array[:-1] if array.ndim else array for name, array in instruction.arrays["weights"].items()}
    return replace(instruction, arrays={"weights": weights})


LIES: dict[str, tuple[Callable[[Place], bytes], str]] = {
    "NaN": (lambda p: to_bytes(spoiled(p.instruction(2), np.nan), p.agreement.digest), r"weights\[.*\] holds values that"),
    "infinity": (lambda p: to_bytes(spoiled(p.instruction(2), np.inf), p.agreement.digest), "not finite"),
    "a fact that is NaN": (
        lambda p: to_bytes(replace(p.instruction(2), facts={"rate": float("nan")}), p.agreement.digest),
        "rate is nan",
    ),
    "another site's": (
        lambda p: to_bytes(replace(p.instruction(2), client="east"), p.agreement.digest),
        "It is for east, and this is north",
    ),
    "an older round": (lambda p: p.data(0), "It is for round 1, and round 2 was begun already"),
    "beyond the agreed rounds": (lambda p: p.data(3), "It is for round 4, and 3 were agreed on"),
    "a farewell beyond them": (lambda p: p.data(4, FINISH), "It is for round 5, and 3 were agreed on"),
    "other settings": (lambda p: to_bytes(p.instruction(2), "0" * 64), "other settings of this one. Use the same federation"),
    "oversized": (lambda p: p.data(2) + b"\0" * (1 << 20), "more than the 1,048,576 that are accepted"),
    "truncated": (lambda p: p.data(2)[:-3], "damaged or none of Fedloom's"),
    "empty": (lambda p: b"", "damaged or none of Fedloom's"),
    "a report": (lambda p: to_bytes(Report("north", 2), p.agreement.digest), "This is no instruction"),
    "another action": (
        lambda p: to_bytes(replace(p.instruction(2), action="upload"), p.agreement.digest),
        "asks for 'upload', which is neither train nor finish",
    ),
}


def test_a_lie_is_refused_and_nothing_is_written(answered: Place) -> None:
    participant, before = answered.participant, everything(answered.store.folder)
    for name, (make, said) in LIES.items():
        with pytest.raises(BadMessage, match=said):
            participant.answer(make(answered))
        assert everything(answered.store.folder) == before, name
    report = answered.report(participant.answer(answered.data(2)), answered.data(2))  # and the honest one is answered as ever
    assert report.round == 2 and report.client == "north" and not participant.done


@pytest.mark.parametrize(("lie", "why"), [(lambda i: replace(i, arrays={}), "KeyError: 'weights'"), (reshaped, "north, round 2")])
def test_what_cannot_be_computed_changes_nothing_that_was_answered(
    answered: Place, lie: Callable[[Instruction], Instruction], why: str
) -> None:
    before = everything(answered.store.folder)
    with pytest.raises(ClientFailed, match=why):
        answered.participant.answer(to_bytes(lie(answered.instruction(2)), answered.agreement.digest))
    after = everything(answered.store.folder)
    assert {name for name in after if after[name] != before[name]} == {"state/begun.json"}


def test_a_round_that_is_asked_for_again_gets_the_same_report(answered: Place) -> None:
    """The server was killed and asks again: the same instruction, the same report, one line more in the log of what left."""
    asked = answered.data(2)
    first = answered.report(answered.participant.answer(asked), asked)
    once = everything(answered.store.folder)
    again = answered.report(answered.restart().answer(asked), asked)
    assert to_bytes(first) == to_bytes(again)
    twice = everything(answered.store.folder)
    assert {name for name in twice if twice[name] != once[name]} == {"left.jsonl", "state/answer.safetensors"}  # one line more
    assert [line["round"] for line in lines(answered.store.folder / "left.jsonl")] == [0, 1, 2, 2]
    assert [line["round"] for line in lines(answered.store.folder / "ledger.jsonl")] == [0, 1, 2]


def test_the_end(answered: Place) -> None:
    answered.participant.answer(answered.data(2))
    asked = answered.data(3, FINISH)
    report = answered.report(answered.participant.answer(asked), asked)
    assert report.arrays == {} and report.facts == {} and not answered.participant.done  # it has not been sent
    answered.participant.sent()
    assert answered.participant.done
    # Killed before it settled: when it starts again there is nothing to wait for, and no server is needed.
    assert answered.restart().done
    folder = answered.participant.settle()
    text = (folder / "statement.txt").read_text()
    assert "4 reports with" in text and "in 3 rounds (1-3)" in text and (folder / "result.json").exists()
    assert "on this site's own test images its accuracy is" in answered.said[-2]


def test_a_torn_line_in_the_log_of_what_left_is_dropped(answered: Place) -> None:
    """A kill in the middle of it: the report it announces never left. Lines after it must still be readable in the end."""
    log = answered.store.folder / "left.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"at":"2031-')
    participant = answered.restart()
    assert log.read_bytes() == whole
    participant.answer(answered.data(2))
    participant.answer(answered.data(3, FINISH))
    assert len(lines(log)) == 4 and "4 reports" in (participant.settle() / "statement.txt").read_text()


def test_a_log_that_was_changed_is_not_vouched_for(answered: Place) -> None:
    answered.participant.answer(answered.data(3, FINISH))
    log = answered.store.folder / "left.jsonl"
    log.write_text(log.read_text().replace('"bytes":', '"byte":', 1))
    with pytest.raises(DamagedRun, match="must not be changed by hand"):
        answered.participant.settle()


# -- what a refusal tells the server ------------------------------------------------------------


def test_an_unreadable_instruction_is_answered_too(place: Place) -> None:
    """Or the server would wait for it until its patience ends."""
    replies = talk(place, ValueError("no such\narray"), None, place.data())
    assert replies[0] == (None, "the instruction was not readable") and replies[1][0] is not None and len(replies) == 2
    assert place.said[0] == "Refused an instruction: it is not readable (no such array)"


def test_what_went_wrong_with_the_sites_own_data_stays_there(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(instruction: Instruction, site: ClientSite) -> None:
        raise ValueError("patient 4711 has no label")

    monkeypatch.setattr(place.participant.method.__class__, "answer", lambda self, instruction, site: fails(instruction, site))
    (reply,) = talk(place, place.data())
    assert reply == (None, "ClientFailed; the site's own log says more")
    assert "patient 4711" in place.said[-1] and len(place.said) == 2  # "north: round 1", then why not
    assert not (place.store.folder / "left.jsonl").exists()


def test_a_refused_instruction_is_explained_to_the_server(place: Place) -> None:
    (reply,) = talk(place, to_bytes(place.instruction(), "other"))
    assert reply[0] is None and "other settings of this one" in reply[1]


def test_a_lost_connection_is_noticed(place: Place) -> None:
    connection = Line([None], [], lost=True)
    with pytest.raises(ConnectionRefused, match="does not know this connection any more"):
        _answer(connection, place.participant, 0.01, Refusals(place.said.append))  # type: ignore[arg-type]


# -- starting ---------------------------------------------------------------------------------


def test_its_images_must_be_enough(place: Place, tmp_path: Path) -> None:
    write_digits(tmp_path / "few", ["north"], train=2, test=1)
    with pytest.raises(
        InvalidConfig, match=r"gives \d training, \d validation and \d test images; a site needs at least 2, 1 and 1. Add images"
    ):
        own_data(replace(place.settings, images=str(tmp_path / "few" / "north")), place.agreement, torch.device("cpu"))


def test_attempts_to_reach_a_server_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    def refused(*arguments: Any) -> None:
        raise ConnectionRefused("nobody there")

    monkeypatch.setattr(site_module.time, "sleep", sleep)
    monkeypatch.setattr(site_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(site_module, "Connection", refused)
    said: list[str] = []
    with pytest.raises(ConnectionRefused, match="nobody there"):
        site_module._connected(SiteSettings(wait=200.0), None, said.append)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30, 30] and said == ["nobody there. Trying again"]  # said once


def test_an_untrusted_server_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def foreign(*arguments: Any) -> None:
        raise ConnectionRefused("its certificate is not signed", untrusted=True)

    monkeypatch.setattr(site_module, "Connection", foreign)
    said: list[str] = []
    with pytest.raises(ConnectionRefused, match="its certificate is not signed"):
        site_module._connected(SiteSettings(), None, said.append)
    assert said == []


def test_a_site_draws_its_own_noise_and_says_the_same_again(tmp_path: Path) -> None:
    agreed = write_agreement(tmp_path / "agreed", "fedavg")
    file = agreed / "federation.toml"
    file.write_text(file.read_text() + "[privacy]\nclip = 0.01\nnoise = 50\n")
    sent = []
    for site in ("one", "two"):  # the same site, images and instruction
        with at(agreed, tmp_path / site) as place:
            asked = place.data()
            first, again = (place.report(place.participant.answer(asked), asked) for _ in range(2))
            assert all(np.array_equal(first.arrays["update"][name], array) for name, array in again.arrays["update"].items())
            assert first.facts == {"examples": 1}
            sent.append(np.concatenate([array.ravel() for array in first.arrays["update"].values()]))
    share = 50 / place.agreement.settings.participants**0.5
    assert np.std(sent[0]) == pytest.approx(0.01 * share, rel=0.05)
    assert abs(np.corrcoef(sent)[0, 1]) < 0.1  # nobody else can know what was added
