"""The personalisation gain: by hand, of a run, stopped and resumed, and what it refuses."""

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

from fedloom.analyses import gain as gain_module
from fedloom.analyses.gain import Gain, gain_of
from fedloom.assemble import new_run, reopen_run
from fedloom.config import Settings
from fedloom.core.errors import DamagedRun, Interrupted, InvalidConfig
from fedloom.core.method import Method
from fedloom.core.seeds import rng
from fedloom.engine.run import Watcher
from fedloom.files import read_arrays
from fedloom.maths.gain import personal_gains
from fedloom.report.plots import plot_matrix
from fedloom.training.recipe import falling
from support.checks import Fedloom, check_refused, everything, flip_last_byte

Tiny = Callable[..., Settings]


@pytest.fixture(scope="module")
def searched(tiny: Tiny, nobody: Watcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; copy it to change it."""
    folder = tmp_path_factory.mktemp("made once") / "run"
    new_run(tiny("method=spider", "training.finetune_epochs=0"), folder, nobody)
    return folder


# -- Eq. 6 ------------------------------------------------------------------------------------------
def test_gains_by_hand() -> None:
    """Client 0: (0.8 - 0.6 + 0.8 - 0.7) / 2 = 0.15; client 1: (0.5 - 0.5 + 0.5 - 0.9) / 2 = -0.2; client 2: (0.9 - 0.3 + 0.9 - 0.6) / 2."""
    matrix = np.array([[0.8, 0.6, 0.7], [0.5, 0.5, 0.9], [0.3, 0.6, 0.9]])
    assert personal_gains(matrix).tolist() == pytest.approx([0.15, -0.2, 0.45])
    assert personal_gains(matrix[:2, :2]).tolist() == pytest.approx([0.2, 0.0])
    assert personal_gains(np.full((3, 3), 1 / 3)).tolist() == [0.0, 0.0, 0.0]  # and not nearly


# -- a run --------------------------------------------------------------------------------------------
def measured(folder: Path, file: Path, **changes: Any) -> dict[str, Any]:
    options = {"clients": 0, "epochs": 2, "rate": 0.05, "start": "personal", **changes}
    return gain_of(reopen_run(folder), **options).measure(file, lambda *news: None)


def test_an_accuracy_is_the_test_accuracy_of_the_epoch_that_validation_chooses(searched: Path, tmp_path: Path) -> None:
    table = measured(searched, tmp_path / "gain.json", epochs=3, clients=2)
    run = reopen_run(searched)
    tools, data = run.tools, run.federation.data_of("client-001")
    network = gain_of(run, 2, 3, 0.05, "personal").networks["client-000"]
    rates = [falling(0.05, epoch / 3, "cosine") for epoch in range(3)]
    ends = [dict(network.weights)]
    for epochs in (1, 2, 3):  # trained anew up to each epoch
        draw = rng(run.settings.seed, "gain", "client-001")
        ends.append(tools.trainer.train_network(network.weights, network.architecture, data.train, rates[:epochs], draw).weights)
    scores = []
    for weights in ends:
        statistics = tools.scorer.calibrate(weights, network.architecture, data.train)
        parts = (data.validation, data.test)
        scores.append([tools.scorer.score_network(weights, network.architecture, statistics, part) for part in parts])
    best = min(scores, key=lambda pair: pair[0].rank)
    assert table["accuracies"][1][0] == best[1].accuracy
    assert table["gains"] == pytest.approx(personal_gains(np.array(table["accuracies"])).tolist())
    assert table["gain"] == pytest.approx(np.mean(table["gains"])) and table["protocol"] == "clean"


def test_what_it_starts_from(searched: Path) -> None:
    run = reopen_run(searched)
    personal, shared = (gain_of(run, 0, 1, None, start).networks for start in ("personal", "shared"))
    model = torch.from_numpy(_arrays(searched, "client-002")["stem.conv.weight"])
    assert torch.equal(personal["client-002"].weights["stem.conv.weight"], model)
    assert torch.equal(shared["client-002"].weights["stem.conv.weight"], torch.tensor(run.state().weights["stem.conv.weight"]))
    assert not torch.equal(model, shared["client-002"].weights["stem.conv.weight"])
    for client in personal:
        assert personal[client].architecture == shared[client].architecture
        assert list(personal[client].weights) and set(personal[client].weights) == set(shared[client].weights)
    assert gain_of(run, 0, 1, None, "shared").rate == run.settings.training.finetune_rates[0]


def _arrays(folder: Path, client: str) -> Any:
    return read_arrays(folder / "clients" / client / "model.safetensors")[0]


def test_it_goes_on_where_it_was_stopped(searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(searched, tmp_path / "whole.json", epochs=1)
    tuned, calls = Gain._tuned, []

    def stop(self: Gain, client: str, network: Any) -> float:
        calls.append(client)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return tuned(self, client, network)

    monkeypatch.setattr(Gain, "_tuned", stop)
    with pytest.raises(KeyboardInterrupt):
        measured(searched, tmp_path / "gain.json", epochs=1)
    part = json.loads((tmp_path / "gain.json").read_text())
    assert sum(value is not None for row in part["accuracies"] for value in row) == 4 and "gain" not in part
    assert measured(searched, tmp_path / "gain.json", epochs=1) == whole and len(calls) == 5 + 5
    assert (tmp_path / "gain.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert measured(searched, tmp_path / "gain.json", epochs=1) == whole and len(calls) == 10  # nothing is left to do


@pytest.mark.parametrize("method", ["perfedsde", "perfedrlnas"])
def test_other_methods_that_search(tiny: Tiny, nobody: Watcher, tmp_path: Path, method: str) -> None:
    more = ("perfedsde.generator=random",) if method == "perfedsde" else ()
    new_run(tiny(f"method={method}", *more), tmp_path / "run", nobody)
    for start in ("personal", "shared"):
        table = measured(tmp_path / "run", tmp_path / f"{start}.json", start=start, clients=2, epochs=1)
        assert table["clients"] == ["client-000", "client-001"] and np.shape(table["accuracies"]) == (2, 2)


# -- the command ---------------------------------------------------------------------------------------
def test_the_command(searched: Path, fedloom_: Fedloom, tmp_path: Path) -> None:
    before = everything(searched)
    outcome = fedloom_("gain", searched, "--epochs", 1, "--out", "there")
    assert outcome.code == 0 and everything(searched) == before
    table = json.loads((tmp_path / "there" / "gain.json").read_text())
    assert "9/9: client-002's network at client-002" in outcome.out and f"{100 * table['gain']:+.2f} points" in outcome.out
    text = " ".join(ElementTree.parse(tmp_path / "there" / "gain.svg").getroot().itertext())
    assert "whose architecture" in text and f"gain {100 * table['gains'][0]:+.1f}" in text
    assert f"{100 * table['accuracies'][2][1]:.1f}" in text
    again = fedloom_("gain", searched, "--epochs", 1, "--out", "there", "--json")
    assert again.code == 0 and json.loads(again.out) == table


def test_it_goes_into_the_run(searched: Path, fedloom_: Fedloom, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(searched, tmp_path / "run"))
    outcome = fedloom_("gain", folder, "--epochs", 1, "--clients", 2, "--json")
    assert outcome.code == 0 and len(json.loads(outcome.out)["gains"]) == 2 and "1/4: client-000's network" in outcome.err
    assert set(everything(folder / "analyses")) == {"gain.json", "gain.svg", "gain.png"}


def test_stopping_it_says_how_to_go_on(searched: Path, fedloom_: Fedloom, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Gain, "_tuned", stop)
    check_refused(fedloom_("gain", searched, "--out", "there"), Interrupted, "The same command goes on with what is in there/gain.json")


def test_refusals(searched: Path, finished_run: Path, fedloom_: Fedloom, tmp_path: Path) -> None:
    def refused(kind: type[Exception], *words: str, of: Path = searched, options: tuple[object, ...] = ()) -> None:
        check_refused(fedloom_("gain", of, "--epochs", 1, "--out", "there", *options), kind, *words)  # type: ignore[arg-type]

    refused(DamagedRun, "not a run folder", of=tmp_path / "nowhere")
    refused(InvalidConfig, "have the same architecture (fedavg)", "a method that searches", of=finished_run)
    refused(InvalidConfig, "--start must be personal or shared, got 'fresh'", options=("--start", "fresh"))
    for rate in ("nan", "inf"):
        refused(InvalidConfig, f"--rate must be a finite number, got {rate}", options=("--rate", rate))
    refused(InvalidConfig, "has 3, and 2 or more", options=("--clients", 1))
    refused(InvalidConfig, "has 3, and 2 or more", options=("--clients", 4))
    folder = Path(shutil.copytree(searched, tmp_path / "run"))
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "finished": False}))
    refused(InvalidConfig, "is not finished", f"fedloom resume {folder}", of=folder)
    shutil.copy(searched / "result.json", folder)
    flip_last_byte(folder / "clients" / "client-001" / "model.safetensors")
    refused(DamagedRun, "model.safetensors is damaged", of=folder)
    (folder / "clients" / "client-001" / "model.safetensors").unlink()
    refused(DamagedRun, "model.safetensors is missing", of=folder)


def test_a_file_of_other_settings_or_a_broken_one_is_left_alone(searched: Path, fedloom_: Fedloom, tmp_path: Path) -> None:
    def refused(kind: type[Exception], *words: str) -> None:
        before = file.read_bytes()
        check_refused(fedloom_("gain", searched, "--epochs", 1, "--clients", 2, "--out", "there"), kind, *words)  # type: ignore[arg-type]
        assert file.read_bytes() == before

    file = tmp_path / "there" / "gain.json"
    table = measured(searched, file, epochs=1, clients=2, rate=None)
    for key, value, words in (("epochs", 30, "epochs is 30 there and 1 here"), ("clients", ["client-000"], "clients differ")):
        file.write_text(json.dumps({**table, key: value}))
        refused(InvalidConfig, "was measured otherwise", words, "another --out")
    for broken in ({**table, "accuracies": [[0.5, 2.0], [0.5, 0.5]]}, {**table, "accuracies": [[0.5]]}, {"schema": table["schema"]}):
        file.write_text(json.dumps(broken))
        refused(DamagedRun, "gain.json is damaged")
    file.write_text('{"schema"')
    refused(DamagedRun, "gain.json is damaged")


def test_a_method_without_a_supernet_has_nothing_shared(searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = reopen_run(searched)
    monkeypatch.setattr(type(run.method), "supernet_of", Method.supernet_of)
    with pytest.raises(InvalidConfig, match="no shared supernet at its server"):
        gain_of(run, 0, 1, None, "shared").networks  # noqa: B018
    assert gain_module.EPOCHS == 30  # the paper's


def test_a_heat_map_says_its_numbers() -> None:
    pictures = plot_matrix([[10.0, 20.04], [30.0, 5.0]], ["a", "b"], ["c", "d"], "across", "down")
    assert pictures == plot_matrix([[10.0, 20.04], [30.0, 5.0]], ["a", "b"], ["c", "d"], "across", "down")
    text = " ".join(ElementTree.fromstring(pictures["svg"]).itertext())
    assert all(word in text for word in ("10.0", "20.0", "30.0", "5.0", "across", "down", "a", "d")) and pictures["png"].startswith(
        b"\x89PNG"
    )
