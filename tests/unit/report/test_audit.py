"""`fedloom audit`: what left a run's clients, in the terminal and on the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedloom.core.errors import DamagedRun
from fedloom.core.privacy import PrivacySettings
from fedloom.core.result import LedgerEntry
from fedloom.engine.store import Store
from fedloom.report.audit import fields_that_left, protection, readers, rounds_that_left
from fedloom.report.reading import open_run
from fedloom.report.words import byte_count
from support.checks import Fedloom, check_refused
from support.report import Outline, made_up_run


def words(text: str) -> str:
    return " ".join(text.split())


def test_every_field_with_its_shape_bytes_rounds_and_readers(finished_run: Path, fedloom_: Fedloom) -> None:
    entries = [entry for entry in Store(finished_run).read_ledger() if entry.upload_bytes]
    outcome = fedloom_("audit", finished_run, "--rounds")
    assert outcome.code == 0
    said = words(outcome.out)
    for name in ("update", "examples"):
        assert byte_count(sum(entry.upload_bytes[name] for entry in entries)) in outcome.out
    assert entries[0].upload_shapes["update"] in said and "values (float32) in" in said
    assert "rounds 1-2" in said and "readable by the server; everybody, in the mean of its round" in said
    assert said.count("protected by nothing") == 2 and "privacy.noise is 0, so there is no epsilon" in said
    for number in (0, 1):
        sizes = [entry.upload_bytes["update"] for entry in entries if entry.round == number]
        assert f"│ {number + 1} │ {len(sizes)} │" in said and f"│ {sum(sizes):,} │" in said


def test_the_page_says_the_same(finished_run: Path, fedloom_: Fedloom) -> None:
    assert fedloom_("report", finished_run).code == 0
    page = words(Outline((finished_run / "report.html").read_text()).words["privacy"])
    run = open_run(finished_run)
    for numbers in (fields_that_left(run.course, run.manifest, run.protection), rounds_that_left(run.course)):
        assert numbers
        for row in numbers.rows:
            assert words("".join(row)) in page
    assert "so there is no epsilon: nothing bounds" in page


def test_rows_follow_the_ledger(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "run", rounds=3)
    store = Store(folder)
    entries = list(store.read_ledger())
    skipped = [
        replace(e, bytes_up=0, uploads=(), upload_bytes={}, upload_shapes={}) if e.round == 1 and not e.final else e for e in entries
    ]
    odd = [
        replace(e, upload_shapes={**e.upload_shapes, "update": "7 values (float32) in 1 arrays"}) if e.round == 2 else e for e in skipped
    ]
    write(folder, odd)
    run = open_run(folder)
    numbers = fields_that_left(run.course, run.manifest, run.protection)
    assert numbers
    rows = {row[0]: dict(zip(numbers.columns, row, strict=True)) for row in numbers.rows}
    assert list(rows) == ["update", "coverage", "examples"] and rows["update"]["rounds"] == "1, 3"
    assert rows["update"]["shape"] == "250 values (float32) in 2 arrays, and 1 other shapes"
    assert rows["update"]["together"] == "4.00\u00a0kB" and rows["coverage"]["readable by"] == "the server"


def test_a_ledger_that_does_not_say_it(tmp_path: Path, fedloom_: Fedloom) -> None:
    folder = made_up_run(tmp_path / "run")
    write(folder, [replace(entry, upload_bytes={}, upload_shapes={}) for entry in Store(folder).read_ledger()])
    said = words(fedloom_("audit", folder, "--rounds").out)
    assert said.count("shape not recorded rounds not recorded per report, mean not recorded") == 3
    assert "What left in each round was not recorded" in said


def test_a_method_that_sends_nothing(tmp_path: Path, fedloom_: Fedloom) -> None:
    outcome = fedloom_("audit", made_up_run(tmp_path / "run", method="local"))
    assert outcome.code == 0 and "nothing left" in outcome.out and "epsilon" not in outcome.out


def test_what_protects_a_field() -> None:
    plain, noisy = PrivacySettings(clip=2.0), PrivacySettings(clip=2.0, noise=0.5)
    assert protection("update", plain) == "privacy.clip=2" and protection("coverage", plain) == "nothing"
    assert (
        protection("update", noisy) == "privacy.clip=2, privacy.noise=0.5" and protection("examples", noisy) == "privacy.noise: all send 1"
    )
    secure = replace(noisy, secure=True, least=4)
    assert protection("update", secure) == "privacy.secure (least 4), privacy.clip=2, privacy.noise=0.5"
    assert protection("coverage", secure) == "privacy.secure (least 4)" and protection("card", secure) == "nothing"
    assert readers("update", True) == "nobody; everybody, in the sum of its round"
    assert readers("coverage", True) == "nobody; the server, in the sum of its round" and readers("coverage", False) == "the server"
    assert readers("shares", True) == "the site that each is sealed for" and readers("card", True) == "the server"


def test_what_is_no_run(tmp_path: Path, fedloom_: Fedloom) -> None:
    check_refused(fedloom_("audit", tmp_path), DamagedRun, "is not a run folder")
    (tmp_path / "left.jsonl").write_text("")
    check_refused(fedloom_("audit", tmp_path), DamagedRun, "fedloom audit SITE.toml")


def write(folder: Path, entries: list[LedgerEntry]) -> None:
    (folder / "ledger.jsonl").write_text("".join(f"{entry.to_json()}\n" for entry in entries))
