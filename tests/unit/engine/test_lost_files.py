"""A run that has lost models, its result or its state says so: no model is where none is, no seconds are lost, no round is repeated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedloom.assemble import new_run, resume_run
from fedloom.config import Settings
from fedloom.core.errors import DamagedRun
from fedloom.core.result import LedgerEntry
from fedloom.engine import run as engine
from fedloom.engine.run import Watcher
from fedloom.engine.store import Spent, Store
from support.checks import Fedloom, everything

GOLDEN = Path(__file__).parents[2] / "golden" / "runs"
CLIENTS = ("client-000", "client-001", "client-002")
REMARK = "what it took before it went on after round 2 is not known: neither result.json nor state/seconds.json says it"


def result_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text()))


def lose(folder: Path, *clients: str) -> None:
    for client in clients:
        (folder / "clients" / client / "model.safetensors").unlink()


# -- the server's state and the ledger ----------------------------------------------------------------


STATE, LEDGER = "state/server.safetensors", "ledger.jsonl"


@pytest.mark.parametrize(
    ("lost", "named"), [((STATE,), STATE), ((STATE, "result.json"), STATE), ((LEDGER,), LEDGER), ((LEDGER, STATE), LEDGER)]
)
def test_a_run_without_its_state_or_ledger_does_not_begin_again(
    fedloom_: Fedloom, finished_run: Path, lost: tuple[str, ...], named: str
) -> None:
    for name in lost:
        (finished_run / name).unlink()
    before = everything(finished_run)
    outcome = fedloom_("resume", finished_run)
    assert outcome.code == DamagedRun.exit_code and f"{named} is missing" in outcome.err
    assert everything(finished_run) == before


# -- personal models ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "words", "cure"),
    [
        (CLIENTS[1:2], "1 personal model is missing in {folder}/clients/ (client-001)", "Restore it from a copy"),
        (CLIENTS, "3 personal models are missing in {folder}/clients/ (client-000, client-001, client-002)", "Restore them from a copy"),
    ],
)
def test_resume_of_a_finished_run_names_models_that_are_missing(
    fedloom_: Fedloom, finished_run: Path, lost: tuple[str, ...], words: str, cure: str
) -> None:
    lose(finished_run, *lost)
    before = everything(finished_run)
    outcome = fedloom_("resume", finished_run)
    assert outcome.code == DamagedRun.exit_code and outcome.err.count("\n") == 1
    assert words.format(folder=finished_run) in outcome.err and cure in outcome.err
    assert "fedavg on digits: test accuracy" in outcome.out  # what is known is shown all the same
    assert outcome.out.splitlines()[-1] == f"The result is in {finished_run}/result.json"
    assert everything(finished_run) == before


def test_a_result_is_written_again_although_a_model_is_missing(fedloom_: Fedloom, finished_run: Path) -> None:
    clients = result_of(finished_run)["clients"]
    lose(finished_run, "client-001")
    (finished_run / "result.json").unlink()
    outcome = fedloom_("resume", finished_run)
    assert outcome.code == DamagedRun.exit_code and "1 personal model is missing" in outcome.err
    assert result_of(finished_run)["finished"] and result_of(finished_run)["clients"] == clients


def test_both_cures_work(fedloom_: Fedloom, finished_run: Path, tmp_path: Path) -> None:
    path = finished_run / "clients" / "client-001" / "model.safetensors"
    model = path.read_bytes()
    path.unlink()
    command = fedloom_("resume", finished_run).err.split("`")[1].split()
    assert command[0] == "fedloom" and fedloom_(*command[1:]).code == 0
    assert (tmp_path / "ANOTHER" / "clients" / "client-001" / "model.safetensors").read_bytes() == model
    path.write_bytes(model)
    outcome = fedloom_("resume", finished_run)
    assert outcome.code == 0 and f"the personal models in {finished_run}/clients/" in outcome.out


def test_show_and_report_need_no_models(fedloom_: Fedloom, finished_run: Path) -> None:
    assert "missing" not in fedloom_("show", finished_run).out
    lose(finished_run, *CLIENTS)
    whole = fedloom_("show", finished_run)
    assert whole.code == 0 and "client-001" in whole.out and "What left the clients: examples, update" in whole.out
    assert "3 personal models are missing" in whole.out.splitlines()[-1]
    assert fedloom_("report", finished_run).code == 0 and (finished_run / "report.html").stat().st_size > 10_000


def test_show_of_a_client_whose_model_is_missing(fedloom_: Fedloom, finished_run: Path) -> None:
    (architecture,) = (row["architecture"] for row in result_of(finished_run)["clients"] if row["name"] == "client-001")
    lose(finished_run, "client-001")
    outcome = fedloom_("show", finished_run, "--client", "client-001")
    assert outcome.code == 0 and "no personal model yet" not in outcome.out
    assert architecture in "".join(outcome.out.splitlines()) and "1 personal model is missing" in outcome.out.splitlines()[-1]
    other = fedloom_("show", finished_run, "--client", "client-000")
    assert other.code == 0 and "missing" not in other.out


def test_export_of_a_model_that_is_missing(fedloom_: Fedloom, finished_run: Path, tmp_path: Path) -> None:
    lose(finished_run, CLIENTS[1])
    outcome = fedloom_("export", finished_run, "--client", CLIENTS[1], "--out", tmp_path / "model.safetensors")
    assert outcome.code == DamagedRun.exit_code and "1 personal model is missing" in outcome.err and CLIENTS[1] in outcome.err


def test_of_many_missing_models_some_are_named(tmp_path: Path) -> None:
    said = Store(tmp_path).missing_models(f"client-{number}" for number in range(7))
    assert "7 personal models are missing" in said and "(client-0, client-1, client-2, client-3, client-4, …)" in said
    assert "(client-0, client-1, client-2, client-3, client-4)" in Store(tmp_path).missing_models(f"client-{n}" for n in range(5))
    assert Store(tmp_path).missing_models([]) == ""


# -- seconds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [None, "", "{", "[]", '{"cost": {"seconds": NaN}, "finished": true, "environment": {}}'])
def test_a_result_that_is_written_again_has_the_seconds_of_before(fedloom_: Fedloom, finished_run: Path, damage: str | None) -> None:
    path, before = finished_run / "result.json", result_of(finished_run)
    path.unlink()
    if damage is not None:
        path.write_text(damage)
    outcome = fedloom_("resume", finished_run)
    after = result_of(finished_run)
    assert outcome.code == 0 and "too few" not in outcome.out
    assert before["cost"]["seconds"] <= after["cost"]["seconds"] < before["cost"]["seconds"] + 10
    assert "seconds" not in after["environment"]


@pytest.mark.parametrize(
    ("stopped_at", "lost", "seconds"),
    [
        (4, "", 700),  # the second of round 2, which is run again
        (4, "result.json", 700),
        (4, "state/seconds.json", 700),
        (6, "", 700),  # the second of the final ones; the first is not run again
        (6, "result.json", 700),
        (6, "state/seconds.json", 600),  # result.json is from before the final ones
    ],
)
def test_every_participation_that_is_kept_is_counted_once(
    tiny: Callable[..., Settings],
    nobody: Watcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stopped_at: int,
    lost: str,
    seconds: float,
) -> None:
    """By a clock that only participations move, by 100 seconds each: two rounds of two, and three final ones."""
    heard: list[LedgerEntry] = []

    def stop(entry: LedgerEntry) -> None:
        heard.append(entry)
        if len(heard) == stopped_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "own_seconds", lambda: 100.0 * len(heard))
    watcher = SimpleNamespace(**{**vars(nobody), "participation": stop})
    with pytest.raises(KeyboardInterrupt):
        new_run(tiny("method=fedavg"), tmp_path / "run", watcher)
    if lost:
        (tmp_path / "run" / lost).unlink()
    assert resume_run(tmp_path / "run", watcher).seconds == seconds
    assert result_of(tmp_path / "run")["cost"]["seconds"] == seconds
    assert resume_run(tmp_path / "run", nobody).seconds == seconds


def test_seconds_that_nobody_knows_are_named_and_stay_so(fedloom_: Fedloom, finished_run: Path) -> None:
    (finished_run / "result.json").unlink()
    (finished_run / "state" / "seconds.json").unlink()
    for lost in ("", "state/seconds.json", "result.json"):  # either file alone knows that something is missing
        if lost:
            (finished_run / lost).unlink()
        outcome = fedloom_("resume", finished_run)
        assert outcome.code == 0 and f"The seconds are too few: {REMARK}" in outcome.out
        assert result_of(finished_run)["environment"]["seconds"] == REMARK
    assert fedloom_("report", finished_run).code == 0 and REMARK in (finished_run / "report.html").read_text()


def test_runs_of_earlier_versions_have_their_seconds_in_the_result(nobody: Watcher, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "0.1.0-stopped", tmp_path / "run"))
    assert not (folder / "state" / "seconds.json").exists()
    result = result_of(folder)
    result["cost"]["seconds"] = 1000
    (folder / "result.json").write_text(json.dumps(result))
    went_on = resume_run(folder, nobody)
    assert 1000 < went_on.seconds < 1100 and "seconds" not in went_on.environment


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"seconds": "x", "remark": ""}', '{"seconds": NaN, "remark": ""}', '{"seconds": 1}'])
def test_damaged_seconds_are_unknown(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path)
    assert store.load_spent() is None
    store.save_spent(Spent(1.5, "but"))
    assert store.load_spent() == Spent(1.5, "but")
    store.write_text("state/seconds.json", text)
    assert store.load_spent() is None
