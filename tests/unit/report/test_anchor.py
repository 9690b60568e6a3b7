"""What page and terminal say of a search around an anchor: who left it, and what for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.core.result import ClientResult, Ledger, LedgerEntry, RunResult
from fedloom.engine.run import Watcher
from fedloom.report.anchor import Departures, anchor_line
from fedloom.report.neighbours import baselines_of
from fedloom.report.page import blocks
from fedloom.report.page.anchor import UNREACHABLE
from fedloom.report.page.single import page
from fedloom.report.reading import open_run
from fedloom.report.terminal.tables import summary
from support.checks import Fedloom
from support.report import Outline, made_up_run

Notes = Mapping[str, float]


def kept_anchor(loss: float = 0.2, rate: float = 0.03) -> Notes:
    return {"finalist": 0, "left_prior": 0, "finetune_rate": rate, "prior_loss": loss, "chosen_loss": loss, "genes_from_anchor": 0}


def left_anchor(genes: int, prior: float, chosen: float, rate: float = 0.03) -> Notes:
    return {"finalist": 1, "left_prior": 1, "finetune_rate": rate, "prior_loss": prior, "chosen_loss": chosen, "genes_from_anchor": genes}


def without(notes: Notes, *names: str) -> Notes:
    return {name: value for name, value in notes.items() if name not in names}


MIXED = [left_anchor(2, 0.5, 0.4), kept_anchor(0.2, 0.01), left_anchor(5, 0.9, 0.6), kept_anchor(0.1, 0.0)]
NOBODY = [kept_anchor()] * 4
EVERYBODY = [left_anchor(genes, 0.5, 0.375) for genes in (1, 2, 3, 4)]


def entry(number: int, notes: Notes, architecture: str = "", test: float | None = 0.5) -> LedgerEntry:
    """A client's last, with an architecture of its own if there is no other."""
    own = architecture or f"toy:{number}"
    return LedgerEntry(f"client-{number:03d}", 3, True, 0, 0, (), {}, own, 0.5, test, 0, 0, 0.0, 0.0, notes)


def entries_of(every: Sequence[Notes]) -> list[LedgerEntry]:
    return [entry(number, notes) for number, notes in enumerate(every)]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "page_svg", lambda figure: "<svg></svg>")


def outline(tmp_path: Path, notes: Sequence[Notes], accuracies: Sequence[float] = (0.9, 0.8, 0.7, 1.0), *overrides: str) -> Outline:
    count = len(notes)
    given = {"clients": count, "participants": min(2, count), "accuracies": accuracies[:count], "overrides": overrides}
    folder = made_up_run(tmp_path / "runs" / "own", final_notes=notes, **given)
    text = page(open_run(folder), baselines_of(folder))
    found = Outline(text)  # tags in balance
    assert len(found.ids) == len(set(found.ids)) and set(re.findall(r'href="#([^"]+)"', text)) <= set(found.ids)
    return found


def section(tmp_path: Path, notes: Sequence[Notes], *overrides: str) -> str:
    return outline(tmp_path, notes, (0.9, 0.8, 0.7, 1.0), *overrides).words["anchor"]


# -- numbers ------------------------------------------------------------------------------


def test_who_left_and_what_for() -> None:
    found = Departures.of([*entries_of(MIXED[:3]), entry(3, MIXED[3], "toy:1", test=0.75), replace(entry(9, MIXED[0]), final=False)])
    assert found and [client.name for client in found.left.clients] == ["client-000", "client-002"]
    assert found.left.losses == pytest.approx((0.7, 0.5)) and found.stayed.losses == pytest.approx((0.15, 0.15))
    assert found.left.test_accuracy == 0.5 and found.stayed.test_accuracy == 0.625
    assert found.everybody.architectures == 3 and found.unknown == 0
    assert found.left.genes == "3.5 genes on average (2 to 5)" and found.stayed.genes == "0 genes"
    assert found.everybody.rates == [(0.03, 2), (0.01, 1), (0.0, 1)]


def test_numbers_that_are_not_there_are_left_out_of_means() -> None:
    some = [
        without(left_anchor(2, 0.5, 0.4), "prior_loss", "finetune_rate"),
        {**left_anchor(4, 0.8, 0.6), "extra": math.nan},
        {"extra": 1.0},
    ]
    found = Departures.of([*entries_of(some), entry(3, {**MIXED[0], "genes_from_anchor": math.inf}), entry(4, MIXED[0], test=math.nan)])
    assert found and len(found.everybody.clients) == 3 and found.unknown == 2
    assert found.left.losses == pytest.approx((0.65, 0.5)) and found.left.without_losses == 1
    assert found.left.test_accuracy == 0.5 and (None, 1) in found.everybody.rates
    nothing = Departures.of([entry(0, MIXED[0], test=None)])
    assert nothing and nothing.left.test_accuracy is None


def test_a_prior_that_is_not_the_anchor_is_not_taken_for_it() -> None:
    """Without finalists only the best is tuned: it is the prior, and it may be another network than the anchor."""
    tuned = {**kept_anchor(0.25), "genes_from_anchor": 3}
    found = Departures.of(entries_of([tuned, kept_anchor()]))
    assert found and len(found.left.clients) == 1 and found.left.losses is None
    assert Departures.of(entries_of([without(MIXED[0], "left_prior")])).left.losses is None  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 1e308, 10**400], ids=["nan", "inf", "negative", "huge", "too long"])
def test_numbers_that_cannot_be(value: float) -> None:
    """A ledger may come from somebody else."""
    odd = entries_of([{**MIXED[0], "prior_loss": value}] * 2)
    assert anchor_line(odd, "clean") == "2 of 2 clients left the anchor, by 2 genes"
    assert Departures.of(entries_of([{**MIXED[0], "genes_from_anchor": value}])) is None


@pytest.mark.parametrize("notes", [[], [{}], [without(kept_anchor(), "genes_from_anchor")]], ids=["nobody", "no notes", "no anchor"])
def test_no_anchor(notes: Sequence[Notes]) -> None:
    assert Departures.of(entries_of(notes)) is None and anchor_line(entries_of(notes), "clean") == ""


# -- the page -------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_what_leaving_brought(tmp_path: Path) -> None:
    made_up_run(tmp_path / "runs" / "local", "local", accuracies=[0.5, 0.9, 0.7, 0.8])
    found = outline(tmp_path, MIXED)
    words = found.words["anchor"]
    assert list(found.words).index("anchor") < list(found.words).index("search")
    assert "The anchor (medium)" in words and "2 of 4 clients left the anchor." in words
    assert "fell: 0.700 with the anchor, 0.500 with what they kept" in words and "optimistic" in words
    assert "left the anchor20.7000.500−0.20080.0 %+20.0" in words  # 0.9 and 0.7, against 0.5 and 0.7 alone
    assert "stayed20.1500.1500.00090.0 %+5.0" in words and "all40.4250.325−0.10085.0 %+12.5" in words
    assert "ahead of local" in words and "other clients than those who stayed" in words
    assert "4 among 4 clients" in words and "1.8 genes on average (0 to 5)" in words and "3.5 genes on average (2 to 5)" in words
    assert (
        "0.03 (2 clients), 0.01 (1 client) and untuned (1 client)" in words and "Not counted" not in words and "last training" not in words
    )
    own = tmp_path / "runs" / "own"
    assert f"keeps the anchor: fedloom run {own}/config.toml training.evidence=1e+09 run.folder={own}-stay" in words


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("notes", [[{}] * 4, [without(kept_anchor(), "genes_from_anchor")] * 4], ids=["no notes", "no anchor"])
def test_the_page_has_no_such_section_without_an_anchor(notes: Sequence[Notes], tmp_path: Path) -> None:
    found = outline(tmp_path, notes)
    assert "anchor" not in found.words and "search" in found.words and "leave the anchor" not in found.words[""]


@pytest.mark.usefixtures("undrawn")
def test_nobody_left(tmp_path: Path) -> None:
    words = section(tmp_path, NOBODY)
    assert "0 of 4 clients left the anchor. So everybody has the architecture of the anchor" in words
    assert "stayed4" in words and "left the anchor4" not in words and "optimistic" not in words and "other clients" not in words
    assert "repeat the run" not in words


@pytest.mark.usefixtures("undrawn")
def test_everybody_left(tmp_path: Path) -> None:
    words = section(tmp_path, EVERYBODY, "training.rejoin=true", "training.finetune_rates=[0.03, 0.01]")
    assert "4 of 4 clients left the anchor. Their mean loss on validation images fell: 0.500 with the anchor, 0.375" in words
    assert "left the anchor4" in words and "stayed4" not in words and "all4" not in words and "other clients" not in words
    assert "before the last training" in words and "keeps the anchor and the first of the fine-tuning rates" in words


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("notes", "said"), [(MIXED[0], "1 of 1 client left the anchor. Their"), (MIXED[1], "0 of 1 client left the anchor.")]
)
def test_one_client(notes: Notes, said: str, tmp_path: Path) -> None:
    words = section(tmp_path, [notes])
    assert said in words and "1 among 1 client" in words and re.search(r"anchor by\s*[02] genes", words)


@pytest.mark.usefixtures("undrawn")
def test_notes_that_are_partly_missing(tmp_path: Path) -> None:
    words = section(tmp_path, [MIXED[0], without(MIXED[2], "prior_loss"), kept_anchor(), {}])
    assert "2 of 3 clients left the anchor" in words and "Not counted: 1 client whose" in words
    assert "1 of those who left have no such pair" in words
    words = section(tmp_path / "none", [{"genes_from_anchor": 2}] * 4)
    assert "cannot be said" in words and "left the anchor4–––85.0 %" in words and "not noted (4 clients)" in words
    words = section(tmp_path / "no finalists", [{**kept_anchor(), "genes_from_anchor": 2}] * 4, "perfedsde.finalists=0")
    assert "cannot be said" in words and "repeat the run" not in words  # what evidence keeps is not the anchor


@pytest.mark.usefixtures("undrawn")
def test_a_loss_that_rose_and_images_that_are_test_images(tmp_path: Path) -> None:
    words = section(tmp_path, [left_anchor(1, 0.25, 0.5)] * 4, "protocol=paper", "training.choice=accuracy")
    assert "loss on test images did not fall: 0.250" in words and "test loss of the anchor" in words and "+0.250" in words
    assert "validation" not in words and "repeat the run" not in words  # evidence would change nothing


# -- the terminal ------------------------------------------------------------------------------


def test_a_line_for_the_terminal() -> None:
    assert anchor_line(entries_of(MIXED), "clean") == (
        "2 of 4 clients left the anchor, by 3.5 genes on average (2 to 5); their validation loss 0.700 -> 0.500 "
        "(optimistic: the same images chose)"
    )
    assert anchor_line(entries_of(NOBODY), "clean") == "0 of 4 clients left the anchor"
    assert anchor_line(entries_of([{"genes_from_anchor": 1}]), "clean") == "1 of 1 client left the anchor, by 1 gene"
    assert "; their test loss 0.500 -> 0.375 (" in anchor_line(entries_of(EVERYBODY), "paper")


@pytest.mark.parametrize(("notes", "lines"), [(MIXED, 4), ([{}] * 4, 3)], ids=["anchor", "none"])
def test_the_summary_of_a_run(notes: Sequence[Notes], lines: int) -> None:
    ledger = Ledger()
    ledger.add(entries_of(notes))
    clients = tuple(ClientResult(name, 0.5, 0.5, one.architecture, 1, 1, 1, 1) for name, one in ledger.final.items())
    said = summary(RunResult("perfedsde", "toy", "digits", "clean", 0, 3, True, clients, ledger, 1.0, {})).splitlines()
    assert len(said) == lines and ("2 of 4 clients left the anchor" in said[2]) == (lines == 4) and "GMAC trained" in said[-1]


def test_show(fedloom_: Fedloom, tmp_path: Path) -> None:
    shown = fedloom_("show", made_up_run(tmp_path / "anchor", final_notes=MIXED))
    assert shown.code == 0 and "2 of 4 clients left the anchor" in shown.out and "0.700 -> 0.500" in " ".join(shown.out.split())
    shown = fedloom_("show", made_up_run(tmp_path / "none"))
    assert shown.code == 0 and "left the anchor" not in shown.out


# -- what it stands on ------------------------------------------------------------------------


def test_real_runs(tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path) -> None:
    """They have the notes, and the run that the page proposes is the same one, but that everybody keeps the anchor."""
    around = ["method=perfedsde", "rounds=1", "perfedsde.anchor=medium", "perfedsde.finalists=2", "training.choice=evidence"]
    ledgers = []
    for evidence in (0.0, UNREACHABLE):
        folder = tmp_path / f"{evidence:g}"
        result = new_run(tiny(*around, f"training.evidence={evidence:g}"), folder, nobody)
        found = Departures.of(result.ledger.final.values())
        assert found and len(found.everybody.clients) == len(result.clients) and not found.unknown and not found.everybody.without_losses
        assert all((client.losses[0] != client.losses[1]) == (client.genes > 0) for client in found.everybody.clients if client.losses)
        assert bool(found.left.clients) == (evidence == 0)
        ledgers.append([LedgerEntry.from_json(line) for line in (folder / "ledger.jsonl").read_text().splitlines()])
    rounds = [[(one.client, one.test_accuracy, one.notes) for one in ledger if not one.final] for ledger in ledgers]
    losses = [[one.notes["prior_loss"] for one in ledger if one.final] for ledger in ledgers]
    assert rounds[0] == rounds[1] and losses[0] == losses[1]
