"""The papers' analyses of a run: candidates against candidates (Fig. 3), and costs (Tables D and 1)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.analyses.costs import LARGE, SMALL, THIS, costs
from fedloom.analyses.figure3 import DATA, DIFFUSION, EVOLUTION, EVOLUTION_RBF, Comparison, compare, picked
from fedloom.assemble import Reopened, new_run, reopen_run
from fedloom.commands import analyse as commands
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples
from fedloom.core.errors import DamagedRun, InvalidConfig, InvalidData
from fedloom.core.seeds import rng
from fedloom.engine.run import Watcher
from fedloom.report.plots import Panel, plot_lines
from fedloom.spaces.base import SearchSpace
from fedloom.spaces.budget import Bounded, BudgetSettings, bounded
from fedloom.training.scoring import Score, Scored, Scorer
from support.checks import Fedloom, check_refused, everything, flip_last_byte
from support.untrained import FakeGenerator

CLIENT = "client-001"


class Watched(FakeGenerator):
    """Remembers whose data it saw."""

    def __init__(self, space: SearchSpace) -> None:
        super().__init__(space)
        self.tasks: list[tuple[Tensor, Tensor]] = []

    def task(self, images: Tensor, labels: Tensor) -> Tensor | None:
        self.tasks.append((images, labels))
        return super().task(images, labels)


@pytest.fixture(scope="module")
def searched(tiny: Callable[..., Settings], nobody: Watcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of perfedsde: 3 clients, 2 rounds, populations of 4."""
    folder = tmp_path_factory.mktemp("searched") / "run"
    new_run(tiny("perfedsde.generator=evolution"), folder, nobody)
    return folder


@pytest.fixture(scope="module")
def run(searched: Path) -> Reopened:
    return reopen_run(searched)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[Architecture], Examples]]:
    """Which architectures were scored on which data."""
    seen: list[tuple[Sequence[Architecture], Examples]] = []
    real = Scorer.score_subnets

    def watched(self: Scorer, weights: Any, architectures: Sequence[Architecture], examples: Examples, train: Examples) -> list[Scored]:
        seen.append((architectures, examples))
        return real(self, weights, architectures, examples, train)

    monkeypatch.setattr(Scorer, "score_subnets", watched)
    return seen


def population_of(run: Reopened, client: str = CLIENT) -> list[Architecture]:
    rows = run.store.load_memory(client, 99).arrays["population"]
    return [Architecture("mobilenetv3", tuple(row.tolist())) for row in rows]


# -- figure 3: candidates ---------------------------------------------------------------------
def test_the_surrogate_picks_by_the_populations_scores(run: Reopened) -> None:
    space = run.tools.space
    known, candidates = ([space.canonical(row) for row in space.sample_many(rng(seed), count)] for seed, count in ((0, 200), (1, 50)))

    def value(architecture: Architecture) -> float:  # a linear function, which the surrogate reproduces
        return float(space.encode(architecture)[:5].sum())

    population = [Scored(one, Score(value(one), 0.0)) for one in known]
    chosen = picked(space, [*candidates, *known[:10]], population, 8)
    assert sorted(map(value, chosen)) == pytest.approx(sorted(map(value, candidates))[-8:])
    assert not set(chosen) & set(known)


# -- figure 3: a client -------------------------------------------------------------------------
def test_what_is_compared(run: Reopened, scored: list[tuple[Sequence[Architecture], Examples]]) -> None:
    source = Watched(run.tools.space)
    figure = compare(run, CLIENT, source, candidates=30)
    own, members = run.federation.data_of(CLIENT), population_of(run)
    assert (figure.client, figure.population, figure.candidates) == (CLIENT, 4, 30)

    # The generator saw the client's training data and drew as many as asked for, as strongly guided as it likes.
    ((images, labels),) = source.tasks
    assert torch.equal(images, own.train.images) and torch.equal(labels, own.train.labels)
    ((count, task, strength),) = source.calls
    assert count == 30 and task is not None and strength is None

    # First the population, on validation data; then each strategy on test and on validation data: nobody else's.
    assert list(scored[0][0]) == members and torch.equal(scored[0][1].images, own.validation.images)
    parts = {"test": own.test, "validation": own.validation}
    for place, name in enumerate((DIFFUSION, EVOLUTION, EVOLUTION_RBF)):
        for offset, which in enumerate(DATA):
            architectures, examples = scored[1 + 2 * place + offset]
            assert torch.equal(examples.images, parts[which].images)
            assert len(set(architectures)) == 4 and not set(architectures) & set(members)
            for architecture in architectures:
                run.tools.space.check(architecture)
            accuracies = figure.accuracies[name][which]
            assert list(accuracies) == sorted(accuracies) and len(accuracies) == 4
            assert all(round(accuracy * len(examples), 6) % 1 == 0 for accuracy in accuracies)
    assert len(scored) == 7


def test_accuracies_are_those_of_the_final_supernet(run: Reopened, scored: list[tuple[Sequence[Architecture], Examples]]) -> None:
    figure = compare(run, CLIENT, Watched(run.tools.space), candidates=30)
    own = run.federation.data_of(CLIENT)
    state = run.store.load_state(run.method.start(0))
    weights, fresh = run.tools.tensors(state.weights), run.tools.tensors(run.method.start(0).weights)
    assert any(not torch.equal(weights[name], fresh[name]) for name in weights)
    tested = scored[1][0]
    again = [one.score.accuracy for one in run.tools.scorer.score_subnets(weights, tested, own.test, own.train)]
    assert figure.accuracies[DIFFUSION]["test"] == tuple(sorted(again))


def test_the_same_again_and_nothing_of_other_clients(run: Reopened, searched: Path, tmp_path: Path) -> None:
    first = compare(run, CLIENT, Watched(run.tools.space), 30)
    folder = Path(shutil.copytree(searched, tmp_path / "run"))
    for other in ("client-000", "client-002"):
        shutil.rmtree(folder / "clients" / other)
    assert compare(reopen_run(folder), CLIENT, Watched(run.tools.space), 30) == first
    assert compare(run, "client-002", Watched(run.tools.space), 30) != first


def test_guidance_is_the_runs(run: Reopened) -> None:
    def drawn(guidance: float) -> tuple[int, Tensor | None, float | None]:
        settings = run.settings
        known = {**settings.components, "perfedsde": replace(settings.components["perfedsde"], guidance=guidance)}
        source = Watched(run.tools.space)
        compare(replace(run, settings=replace(settings, components=known)), CLIENT, source, 30)
        assert len(source.tasks) == (guidance != 0)
        return source.calls[0]

    assert drawn(0.0)[1] is None
    _, task, strength = drawn(2.5)
    assert task is not None and strength == 2.5


def test_a_budget_holds_for_generated_candidates(run: Reopened, scored: list[tuple[Sequence[Architecture], Examples]]) -> None:
    space = run.tools.supernet.space
    limit = sorted(space.cost(space.sample(rng(number))).macs for number in range(20))[10]
    tight = bounded(space, BudgetSettings(macs=limit), 8, lambda architecture: 0.0)
    assert isinstance(tight, Bounded)
    compare(replace(run, tools=replace(run.tools, space=tight)), CLIENT, Watched(space), 40)
    for architectures, _ in scored[1:]:
        assert all(space.cost(architecture).macs <= limit for architecture in architectures)


def test_numbers_of_a_figure() -> None:
    accuracies = {
        DIFFUSION: {"test": (0.5, 0.7), "validation": (0.2, 0.4)},
        EVOLUTION: {"test": (0.1, 0.3), "validation": (0.4, 0.4)},
        EVOLUTION_RBF: {"test": (0.5, 0.5), "validation": (0.3, 0.3)},
    }
    table = Comparison("a", 2, 9, accuracies).to_table()
    assert table["client"] == "a" and table["population"] == 2 and table["candidates"] == 9
    assert table["strategies"][DIFFUSION]["test"] == {"mean": pytest.approx(0.6), "best": 0.7, "accuracies": [0.5, 0.7]}
    assert table["diffusion_better_by"]["test"] == pytest.approx({EVOLUTION: 0.4, EVOLUTION_RBF: 0.1})
    assert table["diffusion_better_by"]["validation"] == pytest.approx({EVOLUTION: -0.1, EVOLUTION_RBF: 0.0})


# -- figure 3: the command -----------------------------------------------------------------------
@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> list[FakeGenerator]:
    """Takes the place of trained ones: all that were loaded."""
    loaded: list[FakeGenerator] = []

    def load(space: SearchSpace, file: str, features: str, device: torch.device, sampler: str, steps: int) -> FakeGenerator:
        assert (file, features, sampler, steps) == ("", "", "", 0)
        loaded.append(FakeGenerator(space))
        return loaded[-1]

    monkeypatch.setattr(commands, "load_generator", load)
    return loaded


def test_figure3_writes_numbers_and_pictures(fedloom_: Fedloom, generators: list[FakeGenerator], searched: Path, tmp_path: Path) -> None:
    before = everything(searched)
    outcome = fedloom_("analyse", "figure3", searched, "--client", CLIENT, "--client", "client-000", "--candidates", 30, "--out", "out")
    assert outcome.code == 0 and everything(searched) == before
    assert len(generators) == 1 and [count for count, _, _ in generators[0].calls] == [30, 30]
    content = json.loads((tmp_path / "out" / "figure3.json").read_text())
    assert content["schema"] == "fedloom.figure3/1" and content["dataset"] == "digits" and content["rounds"] == 2
    assert [client["client"] for client in content["clients"]] == [CLIENT, "client-000"]
    mean = content["clients"][0]["strategies"]["diffusion"]["test"]["mean"]
    better = content["clients"][0]["diffusion_better_by"]["test"]
    assert f"{mean:.2%}" in outcome.out and f"{100 * better['evolution']:+.2f} points" in outcome.out and "figure3.svg" in outcome.out
    picture = ElementTree.parse(tmp_path / "out" / "figure3.svg").getroot()
    text = " ".join(picture.itertext())
    assert "client-000, validation data" in text and "crossover and mutation" in text and "accuracy in %" in text
    assert (tmp_path / "out" / "figure3.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("generators")
def test_figure3_goes_into_the_run(fedloom_: Fedloom, searched: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(searched, tmp_path / "run"))
    assert fedloom_("analyse", "figure3", folder, "--client", CLIENT, "--candidates", 9).code == 0
    assert set(everything(folder / "analyses")) == {"figure3.json", "figure3.svg", "figure3.png"}


@pytest.mark.usefixtures("generators")
def test_figure3_refuses(fedloom_: Fedloom, searched: Path, finished_run: Path, tmp_path: Path) -> None:
    def refused(folder: Path, kind: type[Exception], *words: str, client: str = CLIENT) -> None:
        check_refused(fedloom_("analyse", "figure3", folder, *(("--client", client) if client else ())), kind, *words)  # type: ignore[arg-type]

    refused(searched, InvalidConfig, "'client-01'", "Did you mean 'client-001'?", client="client-01")
    refused(searched, InvalidConfig, "--client NAME", "client-000 to client-002", client="")
    refused(finished_run, InvalidConfig, "a run of fedavg", "method=perfedsde")
    refused(tmp_path / "nowhere", DamagedRun, "not a run folder")

    folder = Path(shutil.copytree(searched, tmp_path / "stopped"))
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "finished": False}))
    refused(folder, InvalidConfig, "is not finished", f"fedloom resume {folder}")
    shutil.copy(searched / "result.json", folder)
    flip_last_byte(folder / "clients" / CLIENT / "memory-2.safetensors")
    refused(folder, DamagedRun, "memory-", "damaged")
    shutil.rmtree(folder / "clients" / CLIENT)
    refused(folder, DamagedRun, CLIENT, "has lost the client's memory")
    (folder / "state" / "memories.json").write_text("{")
    refused(folder, DamagedRun, "memories.json is damaged")
    (folder / "state" / "memories.json").unlink()
    refused(folder, DamagedRun, CLIENT, "holds no population")
    (folder / "state" / "server.safetensors").unlink()
    refused(folder, DamagedRun, "server.safetensors is missing")
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace('name = "digits"', 'name = "cifar10"'))
    refused(folder, InvalidData, "cifar10 is not at")


# -- plots -----------------------------------------------------------------------------------------
def test_lines_of_a_plot_are_the_values() -> None:
    pictures = plot_lines([[Panel("left & right", {"one": [1, 2, 4], "two": [2, 2]})]], "rank", "value")
    assert pictures == plot_lines([[Panel("left & right", {"one": [1, 2, 4], "two": [2, 2]})]], "rank", "value")
    root = ElementTree.fromstring(pictures["svg"])
    text = " ".join(root.itertext())
    assert all(word in text for word in ("left & right", "rank", "value", "one", "two"))
    lines = [element.get("d", "") for element in root.iter() if "d95f02" in element.get("style", "") and element.get("d")]
    points = np.array([[float(number) for number in point.split()] for point in lines[0].replace("M", "").split("L")])
    assert len(points) == 3
    steps = np.diff(points, axis=0)
    assert steps[0, 0] == pytest.approx(steps[1, 0], abs=0.01) and 2 * steps[0, 1] == pytest.approx(steps[1, 1], abs=0.01)


# -- costs -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("architecture", "like"), [("smallest", SMALL), ("largest", LARGE)])
def test_fedavg_costs_what_it_is_the_measure_of(
    tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path, architecture: str, like: str
) -> None:
    new_run(tiny("method=fedavg", f"fedavg.architecture={architecture}", "training.epochs=2", "rounds=1"), tmp_path / "run", nobody)
    found = costs(reopen_run(tmp_path / "run"))
    assert found.relative_macs[THIS] == pytest.approx(found.relative_macs[like])
    facts = 200  # bytes of names and numbers beside the weights
    space = reopen_run(tmp_path / "run").tools.space
    small = 8 * space.cost(space.named["smallest"]).parameters
    assert 0 < found.relative_bytes[THIS] - found.relative_bytes[like] < facts / small
    assert found.relative_macs[SMALL] == found.relative_bytes[SMALL] == 1 < found.relative_macs[LARGE]


def test_costs_are_the_ledgers_per_participation(run: Reopened) -> None:
    found = costs(run)
    entries = [entry for entry in run.store.read_ledger() if not entry.final]
    assert found.participations == len(entries) == 4
    for stage in ("rescore", "score", "train", "test"):
        seconds = [entry.seconds[stage] for entry in entries]
        assert found.seconds[stage].mean == pytest.approx(np.mean(seconds)) and found.seconds[stage].std == pytest.approx(np.std(seconds))
    assert "finetune" not in found.seconds  # of final participations
    others = [sum(seconds for stage, seconds in entry.seconds.items() if stage != "test") for entry in entries]
    assert found.seconds_sum.mean == pytest.approx(np.mean(others)) and found.seconds_sum.std == pytest.approx(np.std(others))
    assert found.bytes_both.mean == pytest.approx(found.bytes_up.mean + found.bytes_down.mean)
    weights = sum(int(np.prod(shape)) for shape in run.tools.supernet.shapes.values())
    assert found.bytes_down.mean == 4 * weights and found.bytes_down.std == 0
    assert found.evaluated_architectures.mean == 4 + 2  # population and offspring

    # 12 images less 30 % for validation, in batches of 8: one batch in each of the iterations
    space = run.tools.space
    assert found.relative_macs[THIS] == pytest.approx(found.trained_macs.mean / (8 * space.cost(space.named["smallest"]).macs))
    assert 1 < found.relative_macs[THIS] < found.relative_macs[LARGE]


def test_the_command_costs(fedloom_: Fedloom, searched: Path, run: Reopened) -> None:
    outcome = fedloom_("analyse", "costs", searched, "--json")
    assert outcome.code == 0 and json.loads(outcome.out) == asdict(costs(run))
    shown = fedloom_("analyse", "costs", searched).out
    found = costs(run)
    assert f"{found.bytes_both.mean / 1e6:.4f} ± 0.0000" in shown and f"{found.relative_bytes[THIS]:.2f}x" in shown
    assert "test, s (not in the sum)" in shown


def test_costs_refuses(fedloom_: Fedloom, tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path) -> None:
    new_run(tiny("method=local"), tmp_path / "alone", nobody)
    check_refused(fedloom_("analyse", "costs", "alone"), InvalidConfig, "alone has no rounds to count")
    check_refused(fedloom_("analyse", "costs", "nowhere"), DamagedRun, "not a run folder")
