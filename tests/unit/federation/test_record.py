"""`fedloom audit SITE.toml`: what a site knows of what left it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.core.boundary import Upload
from fedloom.core.errors import DamagedRun
from fedloom.core.privacy import PrivacySettings
from fedloom.engine.protection import Account
from fedloom.engine.store import Store
from fedloom.federation.site.record import _as_logged
from fedloom.federation.site.statement import Departure
from fedloom.report.audit import fields_that_left
from fedloom.report.view import Course
from fedloom.report.words import privacy_words
from support.checks import Fedloom, check_refused, everything
from support.federation import SITE
from support.site import at, write_agreement


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = write_agreement(tmp_path_factory.mktemp("agreed"), "fedavg")
    file = place / "federation.toml"
    file.write_text(file.read_text() + "[privacy]\nclip = 0.01\nnoise = 5\n")
    (place / "north.toml").write_text(SITE.format(name="north", port=1, onnx="false"))
    with at(place, place / "at-north" / "digits" / "north") as north:
        north.participant.answer(north.data(0))
        north.participant.answer(north.data(0))  # once more
        north.participant.answer(north.data(1))
    return place


def test_what_left_a_site(agreed: Path, fedloom_: Fedloom) -> None:
    before = everything(agreed)
    outcome = fedloom_("audit", agreed / "north.toml", "--rounds")
    assert outcome.code == 0 and everything(agreed) == before
    said = " ".join(outcome.out.split())
    assert said.startswith("What left north in the federation digits") and "rounds 1-2" in said
    assert "privacy.clip=0.01, privacy.noise=5" in said and "privacy.noise: all send 1" in said
    assert "left.jsonl is whole: each of its 3 lines follows" in said and "1 reports left again" in said
    with at(agreed, agreed / "elsewhere") as place:
        run = place.agreement.settings
    spent = Account(run.privacy, run.participants).at_site(2)
    assert " ".join(privacy_words(spent).split()) in said
    assert spent["epsilon"]["server"] > spent["epsilon"]["others"] > 0


def test_a_log_that_was_changed_is_refused(agreed: Path, fedloom_: Fedloom) -> None:
    log = agreed / "at-north" / "digits" / "north" / "left.jsonl"
    whole = log.read_text()
    log.write_text("".join(whole.splitlines(keepends=True)[1:]))
    try:
        check_refused(fedloom_("audit", agreed / "north.toml"), DamagedRun, "does not follow from the lines before it")
    finally:
        log.write_text(whole)


def test_a_site_that_has_not_taken_part(agreed: Path, fedloom_: Fedloom) -> None:
    file = agreed / "east.toml"
    file.write_text(SITE.format(name="east", port=1, onnx="false"))
    check_refused(fedloom_("audit", file), DamagedRun, "has not taken part yet")


def test_parts_of_secure_sums_are_counted_from_the_log(agreed: Path) -> None:
    """Keys and shares leave too, and no line of the ledger has them."""
    entry = next(iter(Store(agreed / "at-north" / "digits" / "north").read_ledger()))
    parts = [{"card": 100}, {"shares": 300}, {"update": 4000}, {"opened": 50}, {"opened": 50}]
    left = [Departure("", entry.round, "sum", fields, sum(fields.values()), str(n)) for n, fields in enumerate(parts)]
    other = Departure("", entry.round + 1, "sum", {"update": 7}, 7, "another round's")
    logged = _as_logged(entry, [*left, other])
    assert logged.bytes_up == 4500 and logged.uploads == ("card", "opened", "shares", "update")
    declared = {"update": Upload("a change", like="weights"), "examples": Upload("how many")}
    numbers = fields_that_left(Course.of([logged]), declared, PrivacySettings(secure=True))
    assert numbers
    rows = {row[0]: dict(zip(numbers.columns, row, strict=True)) for row in numbers.rows}
    assert list(rows) == ["card", "shares", "update", "opened"] and all(row["what it is"] != "not declared" for row in rows.values())
    assert rows["opened"]["together"] == "100\u00a0B" and rows["update"]["readable by"].startswith("nobody")
