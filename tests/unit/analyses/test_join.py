"""Newcomers in the frozen supernet of a finished run of PerFedRLNAS."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.analyses.newcomers import Joined, arrivals, with_policies
from fedloom.assemble import new_run, reopen_run
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientSite
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.core.messages import Report
from fedloom.engine.newcomers import shared_state, welcome
from fedloom.engine.run import Watcher
from fedloom.methods.perfedrlnas import PerFedRLNAS
from support.checks import Fedloom, check_refused, everything

Tiny = Callable[..., Settings]
LABEL = ("split.rule=label", "split.alpha=10", "split.minimum=20", "rounds=1", "training.batch=128")  # all digits, in few steps


@pytest.fixture(scope="module")
def folder(tiny: Tiny, nobody: Watcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("join") / "run"
    new_run(tiny("method=perfedrlnas"), made, nobody)
    return made


def joined(folder: Path, clients: int = 4, rounds: int = 3, seed: int = 0) -> Joined:
    return with_policies(reopen_run(folder), clients, rounds, seed, lambda *_: None)


def test_what_newcomers_find(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[list[Report]] = []
    learned: Any = PerFedRLNAS.learned

    def listen(self: PerFedRLNAS, state: Any, reports: list[Report]) -> Any:
        heard.append(reports)
        after = learned(self, state, reports)
        assert all(np.array_equal(after.weights[name], state.weights[name]) for name in state.weights)  # frozen
        return after

    monkeypatch.setattr(PerFedRLNAS, "learned", listen)
    before = everything(folder)
    told: list[tuple[int, float, float]] = []
    found = with_policies(reopen_run(folder), 4, 3, 0, lambda *facts: told.append(facts))
    assert everything(folder) == before
    assert told == [(number + 1, *pair) for number, pair in enumerate(zip(found.accuracies, found.spreads, strict=True))]
    assert [newcomer.name for newcomer in found.newcomers] == [f"newcomer-00{number}" for number in range(4)]
    space = reopen_run(folder).tools.space
    for newcomer in found.newcomers:
        space.check(Architecture.parse(newcomer.architecture))
    assert [len(reports) for reports in heard] == [4, 4, 4]
    assert all(not report.arrays and set(report.facts) == {"accuracy", "seconds"} for reports in heard for report in reports)


def test_the_same_seed_gives_the_same_newcomers(folder: Path) -> None:
    assert joined(folder) == joined(folder) != joined(folder, seed=1)
    assert joined(folder, rounds=2).accuracies == joined(folder).accuracies[:2]


def test_search_finds_better_subnets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If accuracy were the share of genes with their last choice, newcomers would end with more of them than by chance."""
    run = reopen_run(folder)
    top = run.tools.space.sizes - 1

    class Score:
        def __init__(self, architecture: Architecture) -> None:
            self.accuracy = float((np.array(architecture.choices) == top).mean())

    monkeypatch.setattr(type(run.tools.scorer), "score_network", lambda self, plain, architecture, *_: Score(architecture))
    monkeypatch.setattr(type(run.tools.scorer), "calibrate", lambda *_: None)
    found = with_policies(run, 4, 60, 0, lambda *_: None)
    assert np.mean(found.accuracies[-10:]) > np.mean(found.accuracies[:10]) + 0.1
    assert np.mean([newcomer.test_accuracy for newcomer in found.newcomers]) > np.mean(found.accuracies[:10]) + 0.1


def test_the_command(folder: Path, fedloom_: Fedloom) -> None:
    outcome = fedloom_("join", folder, "--clients", 3, "--rounds", 2, "--out", "there")
    assert outcome.code == 0 and outcome.err == "" and "round 2/2: subnets tried" in outcome.out
    assert sorted(path.name for path in Path("there").iterdir()) == ["join.json", "join.png", "join.svg"]
    written = json.loads(Path("there/join.json").read_text())
    assert written["schema"] == "fedloom.join/1" and len(written["accuracies"]) == 2 and len(written["newcomers"]) == 3
    assert written == {**written, **json.loads(json.dumps(asdict(joined(folder, 3, 2))))}


@pytest.mark.parametrize("changes", [(*LABEL, "split.test=0.2"), ("split.rule=plato",)])
def test_no_client_trained_on_what_rewards_and_tests_newcomers(
    tiny: Tiny, nobody: Watcher, tmp_path: Path, changes: tuple[str, ...]
) -> None:
    new_run(tiny("method=perfedrlnas", *changes), tmp_path / "run", nobody)
    run = reopen_run(tmp_path / "run")
    assert run.federation.split.own_tests == ("split.test=0.2" in changes)
    newcomers = [arrivals(run, 4, 0).data_of(f"newcomer-00{number}") for number in range(4)]
    clients = [run.federation.data_of(name) for name in run.federation.names]

    def pictures(*parts: Any) -> set[bytes]:
        return {image.numpy().tobytes() for part in parts for image in part.images}

    trained = pictures(*(part for client in clients for part in (client.train, client.validation)))  # spider trains on both
    for one in newcomers:
        rewards, tests = pictures(one.validation), pictures(one.test)
        assert rewards and tests and not (rewards | tests) & trained and not rewards & tests
        assert abs(len(rewards) - len(tests)) <= 10 and len(one.train) > 0


def test_what_cannot_be_joined_is_refused(folder: Path, tiny: Tiny, nobody: Watcher, fedloom_: Fedloom, tmp_path: Path) -> None:
    new_run(tiny("method=local"), tmp_path / "other", nobody)
    check_refused(fedloom_("join", tmp_path / "other"), InvalidConfig, "local shares nothing that a newcomer could use")
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    for name, content in everything(folder).items():
        path = stopped / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (stopped / "result.json").unlink()
    check_refused(fedloom_("join", stopped), InvalidConfig, "is not finished. Finish it with `fedloom resume")
    new_run(tiny("method=perfedrlnas", *LABEL), tmp_path / "few", nobody)
    check_refused(fedloom_("join", tmp_path / "few", "--clients", 5000), InvalidData, "Use fewer clients or more data")


@pytest.mark.parametrize("changes", [("method=perfedsde",), ("method=spider", "space=darts"), ("method=hapfnas", "split.server=0.1")])
def test_every_search_method_welcomes_newcomers_and_hears_nothing(
    changes: tuple[str, ...], tiny: Tiny, nobody: Watcher, fedloom_: Fedloom, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    new_run(tiny(*changes), folder, nobody)
    before = everything(folder)
    outcome = fedloom_("join", folder, "--clients", 2, "--out", tmp_path / "out")
    assert outcome.code == 0 and "newcomer 2/2: test accuracy so far" in outcome.out and "their personal models: " in outcome.out
    assert everything(folder) == before
    told = json.loads((tmp_path / "out" / "join.json").read_text())
    space = reopen_run(folder).tools.space
    for newcomer in told["newcomers"]:
        space.check(Architecture.parse(newcomer["architecture"]))
        assert 0 <= newcomer["test_accuracy"] <= 1
    assert [newcomer["name"] for newcomer in told["newcomers"]] == ["newcomer-000", "newcomer-001"]


def test_newcomers_get_nothing_of_others(folder: Path) -> None:
    run = reopen_run(folder)
    state: Any = shared_state(run.state())
    assert run.state().policies and not (state.policies or state.visits or state.accuracies or state.memories)
    assert all(np.array_equal(state.weights[name], array) for name, array in run.state().weights.items())


def test_a_policy_that_learns_alone(folder: Path) -> None:
    """It moves towards what scored above its own mean so far; what is kept is the best of all it tried."""
    run = reopen_run(folder)
    method: Any = run.method
    data = run.federation.data_of(run.federation.names[0])
    scored: dict[str, float] = {}
    scorer = method.tools.scorer
    real = scorer.score_network

    def listen(plain: Any, architecture: Any, statistics: Any, examples: Any) -> Any:
        score = real(plain, architecture, statistics, examples)
        if examples is data.validation:
            scored.setdefault(architecture.id, score.accuracy)
        return score

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "score_network", listen)
        visited = welcome(method, shared_state(run.state()), ClientSite("late", data), rounds=6)
    assert visited.answer.model is not None and visited.answer.diary.evaluated_architectures == len(scored)
    assert scored[visited.answer.model.architecture] == max(scored.values())
