"""A server that asks a round again: the honest one gets the same bytes, the curious one nothing that it has not got already."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.config import Settings
from fedloom.core.errors import BadMessage, ClientFailed
from fedloom.core.messages import FINISH
from fedloom.engine.store import Store
from fedloom.federation.wire.messages import to_bytes
from fedloom.methods.base import METHODS
from fedloom.testing import Played
from support.checks import everything
from support.federation import lines
from support.site import Place, at, talk, write_agreement


def curious(place: Place, round: int, number: int) -> bytes:
    """Other weights and another seed for a round: two answers and their difference say what one does not."""
    asked = place.instruction(round)
    weights = {name: np.array(array) for name, array in asked.arrays["weights"].items()}
    next(iter(weights.values())).flat[0] += 0.01 * number
    return to_bytes(replace(asked, seed=asked.seed + number, arrays={"weights": weights}), place.agreement.digest)


def test_twelve_questions_about_one_round_get_one_answer(fresh: Place) -> None:
    replies = talk(fresh, *(curious(fresh, 0, number) for number in range(12)))
    assert [reply is not None for reply, _ in replies] == [True] + 11 * [False]
    assert {why for _, why in replies[1:]} == {"It is not the instruction that round 1 was begun with, and no round has two"}
    assert len(lines(fresh.store.folder / "left.jsonl")) == 1
    fresh.restart()  # which does not make it forget
    (again,) = talk(fresh, curious(fresh, 0, 5))
    assert again[0] is None


def refusals(place: Place) -> list[str]:
    return [line for line in place.said if line.startswith("Refused an instruction: ")]


def test_a_refusal_is_one_line_and_curiosity_changes_nothing(fresh: Place, agreed: Path, tmp_path: Path) -> None:
    """Between the honest questions come others: of this round and of earlier ones, too many, too early and for somebody else."""
    with at(agreed, tmp_path / "undisturbed" / "north") as other:
        expected = [other.report(other.participant.answer(other.data(round)), other.data(round)) for round in range(3)]
    for round in range(3):
        honest = fresh.data(round)
        ((reply, _),) = talk(fresh, honest)
        assert reply is not None and to_bytes(fresh.report(reply, honest)) == to_bytes(expected[round])
        too_early = fresh.data(round + 1, FINISH) if round < 2 else b"no instruction"
        for question in (curious(fresh, round, 5), curious(fresh, 0, 6), fresh.data(7), too_early):
            before = len(refusals(fresh))
            ((reply, why),) = talk(fresh, question)
            assert reply is None and why and len(refusals(fresh)) == before + 1
    assert everything(fresh.store.folder / "clients") == everything(tmp_path / "undisturbed" / "north" / "clients")
    assert len(lines(fresh.store.folder / "left.jsonl")) == 3


def test_a_flood_of_questions_is_a_line_a_second(fresh: Place) -> None:
    began = time.monotonic()
    talk(fresh, *(curious(fresh, 0, number) for number in range(12)))
    assert 1 <= len(refusals(fresh)) <= time.monotonic() - began + 1


def test_the_statement_says_what_was_refused_and_how_often(fresh: Place) -> None:
    talk(fresh, *(curious(fresh, 0, number) for number in range(12)), ValueError("torn"), b"nonsense", fresh.data(1, FINISH))
    fresh.restart()
    talk_to_the_end(fresh)
    text = (fresh.participant.settle() / "statement.txt").read_text()
    assert "4 reports with" in text and "14 instructions of the server were refused, with no report:\n" in text
    assert "  11 times: It is not the instruction that round 1 was begun with, and no round has two\n" in text
    assert "  1 times: It ends the federation after 1 rounds, and 3 were agreed on\n" in text


def talk_to_the_end(place: Place) -> None:
    for asked in (place.data(1), place.data(2), place.data(3, FINISH)):
        place.participant.answer(asked)
    place.participant.sent()
    assert place.participant.done


def test_reasons_do_not_fill_the_disk(fresh: Place) -> None:
    """Each instruction is for another site, so that each is refused for another reason."""
    order = fresh.instruction()
    talk(fresh, *(to_bytes(replace(order, client=f"site {number}"), fresh.agreement.digest) for number in range(50)))
    talk_to_the_end(fresh)
    text = (fresh.participant.settle() / "statement.txt").read_text()
    assert "50 instructions of the server were refused" in text and "  30 times: for other reasons\n" in text


def test_the_same_question_gets_the_same_bytes_without_a_computation(answered: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU or a clock would make of it a second time might differ."""
    asked = answered.data(2)
    first = answered.report(answered.participant.answer(asked), asked)
    monkeypatch.setattr(answered.participant.method.__class__, "answer", None)
    for site in (answered.participant, answered.restart(), answered.restart()):
        assert to_bytes(answered.report(site.answer(asked), asked)) == to_bytes(first)
    left = lines(answered.store.folder / "left.jsonl")
    assert [line["round"] for line in left] == [0, 1, 2, 2, 2, 2] and len({line["sha256"] for line in left}) == 3
    monkeypatch.undo()
    answered.restart().answer(answered.data(3, FINISH))
    text = (answered.participant.settle() / "statement.txt").read_text()
    assert "7 reports" in text and "3 of them had left before: the server asked again, and was sent the same bytes again." in text


def test_an_instruction_that_failed_is_not_replaced_by_another(fresh: Place) -> None:
    """That one fails, and another does not, says something of the images, too."""
    failing = to_bytes(replace(fresh.instruction(), arrays={}), fresh.agreement.digest)
    for site in (fresh.participant, fresh.restart()):
        with pytest.raises(ClientFailed):
            site.answer(failing)
        with pytest.raises(BadMessage, match="It is not the instruction that round 1 was begun with"):
            site.answer(fresh.data())
    fresh.participant.answer(fresh.data(1))  # the next round is another matter


def test_the_federation_does_not_end_before_its_time(answered: Place) -> None:
    for round in (1, 2):
        with pytest.raises(BadMessage, match=r"It (ends the federation after 2 rounds, and 3 were agreed on|is not the instruction)"):
            answered.participant.answer(answered.data(round, FINISH))
    assert not answered.participant.done
    answered.participant.answer(answered.data(3, FINISH))  # round 3 was without it, which happens


def test_a_method_without_rounds_ends_at_once(tmp_path: Path) -> None:
    with at(write_agreement(tmp_path / "agreed", "local"), tmp_path / "north") as place:
        place.participant.answer(place.data(0, FINISH))
        assert lines(place.store.folder / "left.jsonl")[0]["action"] == FINISH


def test_a_site_that_missed_rounds_goes_on(fresh: Place) -> None:
    fresh.participant.answer(fresh.data(0))
    fresh.restart().answer(fresh.data(2))
    assert [line["round"] for line in lines(fresh.store.folder / "left.jsonl")] == [0, 2]


# -- what honest servers need ----------------------------------------------------------------------


@pytest.mark.parametrize("method", list(METHODS))
def test_a_server_that_starts_again_asks_with_the_same_bytes(method: str, tiny: Callable[..., Settings], tmp_path: Path) -> None:
    """It goes on from the state on its disk. Sites compare the bytes, so these must not depend on where the state comes from."""
    settings = tiny(f"method={method}", "rounds=3", "participants=1")
    played, store = Played(settings), Store(tmp_path)
    store.claim()
    while True:
        store.save_state(played.state, played.state.round)
        loaded = store.load_state(played.method.start(settings.seed))
        assert sent(played, loaded) == sent(played, played.state)
        if played.method.finished(played.state):
            break
        played.round()


def sent(played: Played, state: Any) -> list[bytes]:
    method, sites = played.method, played.federation.names
    orders = [method.farewell(state, site) for site in sites] if method.finished(state) else method.plan(state, sites)
    assert orders
    return [to_bytes(order, "digest") for order in orders]
