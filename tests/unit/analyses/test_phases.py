"""SPIDER's phases, from ledger entries by hand and from a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedloom.analyses.phases import Stage, beginnings, course
from fedloom.assemble import new_run
from fedloom.config import Settings
from fedloom.core.errors import DamagedRun, InvalidConfig
from fedloom.core.result import LedgerEntry
from fedloom.engine.run import Watcher
from fedloom.testing import Played
from fedloom.training.scoring import Scorer
from support.checks import Fedloom, check_refused

Tiny = Callable[..., Settings]
ENTRY = LedgerEntry("a", 0, False, 0, 0, (), {}, "", 0.5, 0.25, 0, 0, 8.0, 0.0)


def noted(phase: int, edges: int, memory: float) -> dict[str, float]:
    return {"phase": phase, "decided_edges": edges, "absent_edges": 0, "local_step_mb": memory}


def test_a_round_is_the_mean_of_its_participants_and_as_far_as_the_last_of_them() -> None:
    entries = [
        replace(ENTRY, notes=noted(1, 0, 8.0)),
        replace(ENTRY, client="b", notes=noted(1, 0, 8.0), validation_accuracy=0.7),
        replace(ENTRY, round=3, notes=noted(2, 27, 5.0), test_accuracy=None, validation_accuracy=0.6),
        replace(ENTRY, round=3, client="b", notes=noted(3, 28, 4.0), peak_memory_mb=9.0, test_accuracy=0.75, validation_accuracy=0.8),
        replace(ENTRY, round=4, client="b", notes=noted(3, 28, 4.0)),
    ]
    stages = course(entries)
    assert stages == [
        Stage(1, 1, 2, pytest.approx(0.6), 0.25, 0, 0, 8.0, 8.0),  # type: ignore[arg-type]
        Stage(4, 2, 2, pytest.approx(0.7), 0.75, 27.5, 0, 9.0, 5.0),  # type: ignore[arg-type]
        Stage(5, 3, 1, 0.5, 0.25, 28, 0, 8.0, 4.0),
    ]
    assert beginnings(stages) == {"pre-training": 1, "search": 4, "training": 5}


@pytest.fixture(scope="module")
def run(tiny: Tiny, nobody: Watcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made once") / "run"
    new_run(tiny("method=spider", "rounds=4", "spider.warmup=1", "participants=3"), folder, nobody)
    return folder


def test_the_command(run: Path, fedloom_: Fedloom, tmp_path: Path) -> None:
    outcome = fedloom_("analyse", "phases", run, "--out", "there", "--json")
    table = json.loads((tmp_path / "there" / "phases.json").read_text())
    assert outcome.code == 0 and json.loads(outcome.out) == table and table["schema"] == "fedloom.phases/1"
    assert table["phases"] == {"pre-training": 1, "search": 2, "training": 3}
    assert [stage["decided_edges"] for stage in table["rounds"]] == [0, 14, 28, 28]
    memory = [stage["local_step_mb"] for stage in table["rounds"]]
    assert memory[0] == table["rounds"][0]["peak_memory_mb"] > memory[1] > memory[2] == memory[3]
    assert len({stage["peak_memory_mb"] for stage in table["rounds"]}) == 1
    text = " ".join(ElementTree.parse(tmp_path / "there" / "phases.svg").getroot().itertext())
    assert all(word in text for word in ("accuracy in %", "memory in MB", "edges", "pre-training", "search", "training"))
    shown = fedloom_("analyse", "phases", run, "--out", "there")
    assert "search from round 2 on, training from round 3 on" in shown.out and "28.0" in shown.out


def test_accuracies_before_the_search_are_those_of_the_whole_local_supernet(tiny: Tiny) -> None:
    played = Played(tiny("method=spider", "spider.warmup=1"))
    instruction = played.method.plan(played.state, played.federation.names)[0]
    answer = played.answer(instruction)
    mixtures, data = played.method.mixtures, played.site(instruction.client).data
    local = {name.removeprefix("local/"): array for name, array in answer.memory.arrays.items() if name.startswith("local/")}
    weights, tools = played.method.tools.tensors(local), played.method.tools

    class Whole:
        def forward(self, images, weights, architecture, statistics):  # type: ignore[no-untyped-def]
            return tools.supernet.mixture(images, weights, None, statistics)

    scorer = Scorer(Whole(), tools.training, tools.pixels)  # type: ignore[arg-type]
    known = scorer.calibrate(weights, None, data.train)  # type: ignore[arg-type]
    assert answer.diary.test_accuracy == scorer.score_network(weights, None, known, data.test).accuracy  # type: ignore[arg-type]
    assert answer.diary.notes["phase"] == 1 and mixtures.offered.all()


def test_refusals(run: Path, finished_run: Path, fedloom_: Fedloom, tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    check_refused(fedloom_("analyse", "phases", finished_run), InvalidConfig, "a run of fedavg", "method=spider")
    check_refused(fedloom_("analyse", "phases", "nowhere"), DamagedRun, "not a run folder")
    (finished_run / "ledger.jsonl").write_text("")
    text = (finished_run / "config.toml").read_text()
    (finished_run / "config.toml").write_text(
        text.replace('method = "fedavg"', 'method = "spider"').replace('"mobilenetv3"\n', '"darts"\n', 1)
    )
    check_refused(fedloom_("analyse", "phases", finished_run), InvalidConfig, "has no rounds to look at")
