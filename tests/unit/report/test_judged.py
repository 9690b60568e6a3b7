"""The report page's section about classes and probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.core.errors import DamagedRun
from fedloom.engine.store import read_result
from fedloom.report.charts.judged import judged_figures, judged_table, judgements
from fedloom.report.figure import Figure
from fedloom.report.page.single import page
from fedloom.report.reading import open_run
from support.report import Outline


def test_the_page_shows_classes_and_probabilities(finished_run: Path) -> None:
    run = open_run(finished_run)
    confusion, reliability = judged_figures(run)
    assert isinstance(confusion, Figure) and isinstance(reliability, Figure)
    rows = {row[0]: row for row in confusion.numbers.rows}
    told = read_result(finished_run)["judged"]
    assert list(rows) == list("0123456789")
    assert [int(row[1]) for row in rows.values()] == [entry["images"] for entry in told["classes"]]
    assert sum(int(row[0]) for row in reliability.numbers.rows) == sum(int(row[1]) for row in rows.values())
    assert {row[0] for row in judged_table(run).rows} == set(judgements(run)) == {"client-000", "client-001", "client-002"}
    words = Outline(page(run, [])).words["judged"]
    assert "balanced over classes" in words and "pure noise" in words and "client-002" in words


def test_a_run_of_an_earlier_version_has_no_such_section(finished_run: Path) -> None:
    path = finished_run / "result.json"
    result = json.loads(path.read_text())
    del result["judged"]
    for row in result["clients"]:
        del row["judged"]
    path.write_text(json.dumps(result))
    assert judged_figures(open_run(finished_run)) == []
    assert "judged" not in Outline(page(open_run(finished_run), [])).words


@pytest.mark.parametrize("judged", [3, {"classes": 3}, {"classes": [{"name": 3}]}, {"classes": ["0"]}], ids=str)
def test_damaged_judgements_are_refused(finished_run: Path, judged: object) -> None:
    path = finished_run / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "judged": judged}))
    with pytest.raises(DamagedRun, match="damaged"):
        read_result(finished_run)
