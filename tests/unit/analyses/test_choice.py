"""What a choice of one's own could give: by hand, of a run, stopped and resumed, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from fedloom.analyses import choice as choice_module
from fedloom.analyses.choice import Choice, choice_of, findings, halves
from fedloom.assemble import new_run, reopen_run
from fedloom.commands.choice import verdict
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import DamagedRun, Interrupted, InvalidArchitecture, InvalidConfig
from fedloom.core.seeds import derive_seed, rng
from fedloom.engine.run import Watcher
from fedloom.maths import choosing
from fedloom.search.near import Near
from support.checks import Fedloom, check_refused, everything

Tiny = Callable[..., Settings]
SEARCH = ("method=perfedsde", "perfedsde.generator=random", "perfedsde.anchor=medium", "perfedsde.distance=0.4", "perfedsde.sampling=near")


@pytest.fixture(scope="module")
def searched(tiny: Tiny, nobody: Watcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; copy it to change it."""
    folder = tmp_path_factory.mktemp("made once") / "run"
    new_run(tiny(*SEARCH), folder, nobody)
    return folder


def nothing(*news: object) -> None:
    return None


def measured(folder: Path, file: Path, others: int = 2, repeats: int = 2, **changes: Any) -> dict[str, Any]:
    return choice_of(reopen_run(folder), others, repeats, **{"epochs": 1, **changes}).measure(file, nothing)


# -- a run --------------------------------------------------------------------------------------------
def test_a_cell_is_a_network_of_the_supernet_tuned_and_tested_on_halves(searched: Path, tmp_path: Path) -> None:
    table = measured(searched, tmp_path / "choice.json", repeats=3)
    run = reopen_run(searched)
    tools, data, client = run.tools, run.federation.data_of("client-001"), "client-001"
    architecture = Architecture.parse(table["architectures"][1])
    plain = tools.supernet.plain(tools.tensors(run.state().weights), architecture)
    for repeat in range(3):
        draw = rng(derive_seed(run.settings.seed, "choice", client, repeat), "finetune")
        tuned = tools.trainer.train_network(plain, architecture, data.train, [table["rate"]], draw).weights
        statistics = tools.scorer.calibrate(tuned, architecture, data.train)
        parts = halves(data, rng(run.settings.seed, "choice", client, "halves"))
        found = [tools.scorer.score_network(tuned, architecture, statistics, part).accuracy for part in parts]
        assert table["accuracies"][1][1][repeat] == found
        loss = tools.scorer.score_network(tuned, architecture, statistics, data.validation).loss
        assert table["losses"][1][1][repeat] == pytest.approx(loss)
    assert np.shape(table["accuracies"]) == (3, 3, 3, 2) and np.shape(table["losses"]) == (3, 3, 3)


def test_halves_are_all_test_images_once(searched: Path) -> None:
    data = reopen_run(searched).federation.data_of("client-000")
    first, second = halves(data, rng(0))
    assert len(second) - len(first) in (0, 1)
    together = torch.cat([first.images, second.images]).flatten(1)
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, data.test.images.flatten(1).tolist()))
    assert not torch.equal(together, data.test.images.flatten(1))  # drawn, not as they came


def test_architectures_are_the_anchor_what_clients_have_and_random_ones_near_it(searched: Path) -> None:
    run = reopen_run(searched)
    own = {entry.architecture for entry in run.store.read_ledger() if entry.final}
    found = choice_of(run, 12, 2)
    first, *others = found.architectures
    space = run.tools.space
    assert first == space.named["medium"] and len({*found.architectures}) == 13
    assert {one.id for one in others[: found.found]} == own - {first.id}
    near = Near(space, first, 0.4)
    away = [near.genes(one) / len(space.genes) for one in others[found.found :]]
    assert 0 < np.mean(away) < 0.4  # a gene that may differ is drawn, and may be the anchor's again
    far = choice_of(run, 12, 2, distance=1.0).architectures[found.found + 1 :]
    assert np.mean([near.genes(one) / len(space.genes) for one in far]) > np.mean(away)
    assert choice_of(run, 2, 2, first="largest").architectures[0] == space.named["largest"]
    few = choice_of(run, 1, 2)
    assert len(few.architectures) == 2 and few.architectures[1].id in own | {few.architectures[1].id}
    assert [one.id for one in choice_of(run, 12, 2).architectures] == [one.id for one in found.architectures]


def test_budgets_hold(tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    new_run(tiny(*SEARCH, "budget.macs=240e3"), tmp_path / "run", nobody)
    run = reopen_run(tmp_path / "run")
    assert all(run.tools.space.fits(one) for one in choice_of(run, 6, 2, distance=1.0).architectures)


def test_findings_are_those_of_the_measurements(searched: Path, tmp_path: Path) -> None:
    table = measured(searched, tmp_path / "choice.json")
    accuracies, losses = np.array(table["accuracies"]), np.array(table["losses"])
    for name in ("another", "best_for_all", "best_for_each"):
        assert table[name]["points"] == pytest.approx(100 * getattr(choosing, name)(accuracies))
    assert table["by_validation_loss"]["points"] == pytest.approx(100 * choosing.lowest_loss(accuracies, losses))
    spread = choosing.spread(accuracies)
    assert table["ceiling"]["points"] == pytest.approx(100 * choosing.ceiling(spread.own, 3))
    assert table["deviations"]["error"] == pytest.approx(100 * max(spread.error, 0) ** 0.5)
    assert findings(accuracies, losses)["ceiling"] == table["ceiling"]


def test_it_goes_on_where_it_was_stopped(searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(searched, tmp_path / "whole.json")
    tuned, calls = Choice._tuned, []

    def stop(self: Choice, client: str, architecture: Architecture) -> Any:
        calls.append(client)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return tuned(self, client, architecture)

    monkeypatch.setattr(Choice, "_tuned", stop)
    with pytest.raises(KeyboardInterrupt):
        measured(searched, tmp_path / "choice.json")
    part = json.loads((tmp_path / "choice.json").read_text())
    assert sum(cell is not None for row in part["accuracies"] for cell in row) == 4 and "ceiling" not in part
    assert measured(searched, tmp_path / "choice.json") == whole and len(calls) == 5 + 5
    assert (tmp_path / "choice.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


@pytest.mark.parametrize("method", ["perfedrlnas", pytest.param("spider", marks=pytest.mark.slow)])
def test_other_methods_that_share_a_supernet(tiny: Tiny, nobody: Watcher, tmp_path: Path, method: str) -> None:
    new_run(tiny(f"method={method}"), tmp_path / "run", nobody)
    table = measured(tmp_path / "run", tmp_path / "choice.json", clients=2)
    space = reopen_run(tmp_path / "run").tools.space
    assert table["architectures"][0] == space.named["medium"].id and np.shape(table["accuracies"]) == (2, 3, 2, 2)


# -- the command ---------------------------------------------------------------------------------------
def test_the_command(searched: Path, fedloom_: Fedloom, tmp_path: Path) -> None:
    before, options = everything(searched), ("--others", 2, "--epochs", 1, "--out", "there")
    outcome = fedloom_("analyse", "choice", searched, *options)
    assert outcome.code == 0 and everything(searched) == before
    table = json.loads((tmp_path / "there" / "choice.json").read_text())
    assert "9/9: architecture 2 at client-002" in outcome.out and "Standard deviations of accuracy" in outcome.out
    for name in ("another", "best_for_all", "best_for_each", "by_validation_loss", "ceiling"):
        low, high = table[name]["interval"]
        assert f"{table[name]['points']:+.2f}" in outcome.out and low <= high
    assert verdict(table) in outcome.out
    text = " ".join(ElementTree.parse(tmp_path / "there" / "choice.svg").getroot().itertext())
    assert "both agree" in text and "another training, the other half" in text
    again = fedloom_("analyse", "choice", searched, *options, "--json")
    assert again.code == 0 and json.loads(again.out) == table


def test_the_answer_in_a_sentence() -> None:
    """Shown only where the whole interval is above zero."""
    shown, open_ = (verdict({"ceiling": {"interval": [low, 2.0]}}) for low in (0.5, 0.0))
    assert shown.startswith("Architectures suit clients differently") and "0.50 to 2.00 points" in shown
    assert open_.startswith("It is not shown") and "at most 2.00 points" in open_


def test_stopping_it_says_how_to_go_on(searched: Path, fedloom_: Fedloom, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Choice, "_tuned", stop)
    words = "The same command goes on with what is in there/choice.json"
    check_refused(fedloom_("analyse", "choice", searched, "--out", "there"), Interrupted, words)


def test_refusals(searched: Path, finished_run: Path, fedloom_: Fedloom, tmp_path: Path) -> None:
    def refused(kind: type[Exception], *words: str, of: Path = searched, options: tuple[object, ...] = ()) -> None:
        outcome = fedloom_("analyse", "choice", of, "--epochs", 1, "--out", "there", *options)
        check_refused(outcome, kind, *words)  # type: ignore[arg-type]

    refused(DamagedRun, "not a run folder", of=tmp_path / "nowhere")
    refused(InvalidConfig, "fedavg has no shared supernet", of=finished_run)
    for option in ("--rate", "--distance"):
        refused(InvalidConfig, f"{option} must be a finite number, got nan", options=(option, "nan"))
    refused(InvalidConfig, "has 3, and 2 or more", options=("--clients", 1))
    refused(InvalidConfig, "has 3, and 2 or more", options=("--clients", 4))
    refused(InvalidArchitecture, "There is no architecture named 'mediun'", "medium", options=("--first", "mediun"))
    folder = Path(shutil.copytree(searched, tmp_path / "run"))
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "finished": False}))
    refused(InvalidConfig, "is not finished", f"fedloom resume {folder}", of=folder)


def test_refusals_that_need_a_run_of_their_own(tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    new_run(tiny(*SEARCH, "budget.macs=[240e3,0]"), tmp_path / "fleet", nobody)
    with pytest.raises(InvalidConfig, match="different budgets"):
        choice_of(reopen_run(tmp_path / "fleet"), 2, 2)
    new_run(tiny(*SEARCH, "training.finetune_epochs=0"), tmp_path / "untuned", nobody)
    with pytest.raises(InvalidConfig, match="does not fine-tune"):
        choice_of(reopen_run(tmp_path / "untuned"), 2, 2)
    assert choice_of(reopen_run(tmp_path / "untuned"), 2, 2, epochs=1).epochs == 1


def test_a_file_of_other_settings_or_a_broken_one_is_left_alone(searched: Path, fedloom_: Fedloom, tmp_path: Path) -> None:
    def refused(kind: type[Exception], *words: str) -> None:
        before = file.read_bytes()
        outcome = fedloom_("analyse", "choice", searched, "--others", 1, "--epochs", 1, "--out", "there")
        check_refused(outcome, kind, *words)  # type: ignore[arg-type]
        assert file.read_bytes() == before

    file = tmp_path / "there" / "choice.json"
    table = measured(searched, file, others=1)
    for key, value, words in (("epochs", 30, "epochs is 30 there and 1 here"), ("architectures", [], "architectures differ")):
        file.write_text(json.dumps({**table, key: value}))
        refused(InvalidConfig, "was measured otherwise", words, "another --out")
    cell = [[0.5, 0.5], [0.5, 2.0]]
    for accuracies in ([[cell, cell]] * 3, [[[[0.5, 0.5]]] * 2] * 3, [], [[None]] * 3, [["no", "cell"]] * 3):
        file.write_text(json.dumps({**table, "accuracies": accuracies}))
        refused(DamagedRun, "choice.json is damaged")
    file.write_text(json.dumps({**table, "losses": [[["low", "high"]] * 2] * 3}))
    refused(DamagedRun, "choice.json is damaged")
    file.write_text('{"schema"')
    refused(DamagedRun, "choice.json is damaged")
    assert choice_module.REPEATS >= 2  # of one repetition nothing is independent
