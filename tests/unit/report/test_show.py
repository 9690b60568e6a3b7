"""Runs in the terminal: `fedloom show`, its drawings, and numbers as characters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedloom.core.errors import DamagedRun, InvalidConfig
from fedloom.report.terminal.show import text_drawing
from fedloom.report.terminal.sparks import bar, spark_line
from fedloom.spaces.base import BlockDiagram, Box, CellGraph
from support.checks import Fedloom, check_refused


def test_spark_lines() -> None:
    assert spark_line([0, 7], 10) == "▁█"
    assert spark_line([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert spark_line([0, 0, 7, 7], 2) == "▁█"  # neighbours are averaged
    assert spark_line([3, 3], 5) == "▁▁" and spark_line([], 5) == ""
    assert len(spark_line(range(1500), 60)) == 60


def test_bars() -> None:
    assert bar(0, 4) == "    " and bar(1, 4) == "████" and bar(0.5, 4) == "██  "
    assert bar(1 / 32, 4) == "▏   " and bar(2.0, 4) == "████" and bar(-1, 4) == "    "


def test_an_architecture_in_characters() -> None:
    blocks = BlockDiagram((("stem", (Box("3×3", "1→8", 0.5), Box("5×5", "8→16", 1.0))), ("head", (Box("classes", "16→10", 0.25),))))
    lines = text_drawing(blocks).splitlines()
    assert lines[0] == "stem" and lines[3] == "head"
    assert lines[1] == f"  ├─ 3×3     {'█' * 12}{' ' * 12} 1→8"
    assert lines[2] == f"  └─ 5×5     {'█' * 24} 8→16"
    cell = CellGraph("normal cell", ("in", "a", "b"), ((0, 1, "skip"), (0, 2, "sep 3×3"), (1, 2, "max pool")))
    assert text_drawing((cell,)) == "normal cell\n  in\n  a <- in: skip\n  b <- in: sep 3×3\n       a: max pool"


def test_a_run(a_finished_run: Path, fedloom_: Fedloom) -> None:
    result = json.loads((a_finished_run / "result.json").read_text())
    outcome = fedloom_("show", a_finished_run)
    assert outcome.code == 0
    assert "fedavg on mobilenetv3, digits, seed 0: 2 rounds, finished" in outcome.out and "accuracy by round" in outcome.out
    for client in result["clients"]:
        assert client["name"] in outcome.out and f"{client['test_accuracy']:.1%}" in outcome.out
    for stage in result["cost"]["stages"]:
        assert stage in outcome.out
    assert "What left the clients: examples, update" in outcome.out


def test_a_client(a_finished_run: Path, fedloom_: Fedloom) -> None:
    outcome = fedloom_("show", a_finished_run, "--client", "client-001")
    assert outcome.code == 0 and "final" in outcome.out and "└─ classes" in outcome.out and "mobilenetv3:" in outcome.out
    check_refused(fedloom_("show", a_finished_run, "--client", "client-01"), InvalidConfig, "nothing of a client 'client-01'", "client-001")


def test_a_run_that_has_little_to_show(a_finished_run: Path, fedloom_: Fedloom, tmp_path: Path) -> None:
    little = tmp_path / "little"
    shutil.copytree(a_finished_run, little)
    (little / "ledger.jsonl").write_text("")
    shutil.rmtree(little / "clients")
    result = json.loads((little / "result.json").read_text())
    (little / "result.json").write_text(json.dumps({**result, "clients": [], "finished": False, "rounds": 1}))
    outcome = fedloom_("show", little)
    assert outcome.code == 0 and ": 1 round, not finished" in outcome.out
    assert "There are no personal models yet." in outcome.out and "there is none: no round had an accuracy" in outcome.out


FOREIGN = '{"schema":"fedloom.result/1","method":1,"clients":[],"cost":{},"uploads":[],"finished":true}'


@pytest.mark.parametrize("damage", ["{", "[]", "{}", FOREIGN])
def test_damaged_results(damage: str, a_finished_run: Path, fedloom_: Fedloom, tmp_path: Path) -> None:
    shutil.copytree(a_finished_run, tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text(damage)
    check_refused(fedloom_("show", tmp_path / "run"), DamagedRun, "result.json is damaged")
    check_refused(fedloom_("show", tmp_path), DamagedRun, "is not a run folder")
    (tmp_path / "run" / "result.json").unlink()
    check_refused(fedloom_("show", tmp_path / "run"), DamagedRun, "has no result.json")


def test_a_result_without_its_protocol_is_damaged(a_finished_run: Path, fedloom_: Fedloom, tmp_path: Path) -> None:
    shutil.copytree(a_finished_run, tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    del result["protocol"]
    (tmp_path / "run" / "result.json").write_text(json.dumps(result))
    check_refused(fedloom_("show", tmp_path / "run"), DamagedRun, "result.json is damaged", "no 'protocol'")
