"""Several methods side by side: what is run, how it ends, what is printed."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fedloom import comparing, config
from fedloom.assemble.environment import environment, plugin_digests, stale
from fedloom.config import Settings
from fedloom.core.errors import DamagedRun, Interrupted, InvalidConfig, UnusableFolder
from fedloom.files import read_arrays
from fedloom.methods.base import METHODS
from fedloom.report.comparison import comparison_card
from fedloom.report.terminal.comparison import comparison_notes, comparison_table
from fedloom.report.terminal.live_runs import LiveRuns
from fedloom.testing.folders import content
from fedloom.training.local import SupernetJob, Trained, Trainer
from support.checks import Fedloom, check_refused, everything

ROOT = Path(__file__).parents[2]


# -- a real one -----------------------------------------------------------------------------------------


def test_runs_are_ordinary_runs_made_once(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("compare", tiny_file, "--methods", "fedavg,local", "--jobs", 2)
    shown = fedloom_(*command)
    assert shown.code == 0, shown.err
    base = tmp_path / "runs" / "compare-tiny"
    results = {name: json.loads((base / name / "result.json").read_text()) for name in ("fedavg-0", "local-0")}
    assert [result["method"] for result in results.values()] == ["fedavg", "local"]
    assert re.search(r"^fedavg-0: (round \d/2: 2 clients, accuracy|personal model \d \(client-00\d\) \d)", shown.out, re.MULTILINE)
    for name, result in results.items():
        assert f"{name}: {result['accuracy']['mean']:.1%} ± " in shown.out
    assert (base / "fedavg-0/state/split.safetensors").read_bytes() == (base / "local-0/state/split.safetensors").read_bytes()

    assert json.loads((base / "comparison.json").read_text()) == {"methods": ["fedavg", "local"]}  # whom a report compares with whom
    before = everything(base)
    monkeypatch.setattr(comparing, "FEDLOOM", ("false",))  # nothing is run again
    again = fedloom_(*command, "--json", "--table", "t.csv", "--table", "t.md", "--courses", "courses.csv")
    assert again.code == 0 and "fedavg-0: finished before: " in again.err and everything(base) == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["courses.csv", "t.csv", "t.md"]
    courses = list(csv.DictReader((tmp_path / "courses.csv").open()))  # local has no rounds
    assert [(row["method"], row["seed"], row["round"], row["clients"]) for row in courses] == [
        ("fedavg", "0", "1", "2"),
        ("fedavg", "0", "2", "3"),
    ]
    assert int(courses[-1]["bytes_up"]) == results["fedavg-0"]["cost"]["bytes_up"]
    fedavg, local = json.loads(again.out)["methods"]
    accuracies = [{one["name"]: one["test_accuracy"] for one in result["clients"]} for result in results.values()]
    expected = sum(accuracies[1][name] - accuracies[0][name] for name in accuracies[0]) / 3
    assert local["difference"]["mean"] == pytest.approx(expected) and local["difference"]["pairs"] == 3 and fedavg["difference"] is None
    assert fedavg["bytes_up"] == results["fedavg-0"]["cost"]["bytes_up"] > local["bytes_up"] == 0

    refused = fedloom_(*command, "rounds=1")
    check_refused(refused, UnusableFolder, "fedavg-0 holds a run with other settings: rounds is 2 there and 1 here", "run.folder")
    monkeypatch.setattr(comparing, "FEDLOOM", ("fedloom",))
    (base / "local-0" / "result.json").unlink()
    done, stopped, new = (comparing.plan(str(tiny_file), [], [method], 1)[0] for method in ("fedavg", "local", "perfedsde"))
    assert done.command == () and stopped.command == ("fedloom", "resume", "runs/compare-tiny/local-0")
    own = ("method=perfedsde", "seed=0", 'run.folder="runs/compare-tiny/perfedsde-0"')
    assert new.command == ("fedloom", "run", str(tiny_file), *own)
    (base / "local-0" / "config.toml").write_text("rounds = many")
    check_refused(fedloom_(*command), DamagedRun, "local-0 holds a run that cannot be read", "Choose another run.folder")


# -- which runs -------------------------------------------------------------------------------------------


def test_seeds_and_folder_are_settings(tiny_file: Path) -> None:
    runs = comparing.plan(str(tiny_file), ["seed=7", "run.folder=mine", "rounds=1"], ["local", "fedavg"], 2)
    assert [(run.method, run.seed, run.name) for run in runs] == [
        ("local", 7, "local-7"),
        ("fedavg", 7, "fedavg-7"),
        ("local", 8, "local-8"),
        ("fedavg", 8, "fedavg-8"),
    ]
    assert {run.folder.parent for run in runs} == {Path("mine")}
    for run in runs:  # the command asks for what was planned
        settings = config.load(run.command[4], run.command[5:])
        assert (settings.method, settings.seed, settings.run.folder, settings.rounds) == (run.method, run.seed, f"mine/{run.name}", 1)


def test_relative_paths_are_those_of_the_run_that_is_there(tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run keeps full paths; the same command again must not take them for others."""
    monkeypatch.chdir(tmp_path)
    changes = ["data.server=unlabelled", "data.folder=images", "perfedsde.features=features.pth", "weights=start.safetensors"]
    (run,) = comparing.plan(str(tiny_file), changes, ["local"], 1)
    run.folder.mkdir(parents=True)
    kept = config.map_paths(config.load(run.command[4], run.command[5:]), lambda path: path and str(tmp_path / path))
    (run.folder / "config.toml").write_text(config.to_toml(kept))
    assert comparing.plan(str(tiny_file), changes, ["local"], 1)[0].command == (*comparing.FEDLOOM, "resume", str(run.folder))
    with pytest.raises(UnusableFolder, match=r"data\.server is"):
        comparing.plan(str(tiny_file), ["data.server=others", *changes[1:]], ["local"], 1)


def test_what_is_printed_as_a_command_works(orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(tiny_file.read_text())
    text = (ROOT / "docs/how-to/compare.md").read_text() + (ROOT / "Makefile").read_text().replace("$(BIN)/", "$ ")
    commands = re.findall(r"^\s*\$ (fedloom compare .*)$", text, re.MULTILINE)
    assert len(commands) > 3 and commands[-1] == "fedloom compare quickstart --methods perfedsde,fedavg,local"
    for number, command in enumerate(commands):
        outcome = fedloom_(*shlex.split(command)[1:], f"run.folder=of-{number}")
        assert outcome.code == 0, outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "fedavg,locl"], ["There is no method named 'locl'", "Did you mean 'local'"]),
        (["--methods", "fedavg,"], ["--methods has a name that is empty", "perfedsde,fedavg"]),
        (["--methods", "fedavg,local,fedavg"], ["names fedavg twice"]),
        (["--methods", "fedavg", "method=local"], ["--methods names the methods"]),
        (["--methods", "fedavg,hapfnas"], ["split.server=0.0 for fedavg and split.server=0.02 for hapfnas", "such as split.server=0.02"]),
        (["--methods", "fedavg", "round=3"], ["Unknown key 'round'"]),
        (["--methods", "fedavg", "seed=-1"], ["seed must be at least 0"]),
        (["--methods", "fedavg", "--jobs", "3", "--side-by-side", "2"], ["--side-by-side 2", "--jobs 3", "Choose one of them"]),
        (["--methods", "fedavg", "--side-by-side", "2", "engine=processes"], ["engine=processes", "Choose one of them"]),
        (["--methods", "fedavg", "--side-by-side", "2", "--minutes", "3"], ["--minutes 3", "in one process", "Use --jobs"]),
        (["--methods", "fedavg", "--minutes", "-3"], ["--minutes -3", "0 for no limit"]),
        (["--methods", "fedavg", "--minutes", "nan"], ["--minutes nan", "0 for no limit"]),
    ],
)
def test_refusals(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    check_refused(fedloom_("compare", tiny_file, *arguments), InvalidConfig, *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["--methods", "local", "--seeds", "0"], ["--methods", "local", "--jobs", "-1"]])
def test_usage(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, arguments: list[str]) -> None:
    outcome = fedloom_("compare", tiny_file, *arguments)
    assert outcome.code == 2 and ("Invalid value" in outcome.err or "Missing option" in outcome.err)
    assert not list(tmp_path.iterdir())


def test_an_unknown_preset(fedloom_: Fedloom) -> None:
    check_refused(fedloom_("compare", "quickstrt", "--methods", "local"), InvalidConfig, "Did you mean 'quickstart'")


def test_one_run_per_core_and_one_on_a_gpu(tiny: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5})
    assert comparing.usual_jobs(tiny("inline.device=cpu")) == 3
    assert comparing.usual_jobs(tiny("inline.device=auto")) == 1
    assert comparing.usual_jobs(tiny("inline.device=mps")) == 1
    assert comparing.usual_jobs(tiny("engine=ray", "ray.device=cpu")) == 1  # it takes all cores for one run
    assert comparing.usual_jobs(tiny("engine=processes", "processes.device=cpu")) == 1


# -- side by side in one process -----------------------------------------------------------------------------
SEVERAL = ("--methods", "perfedsde,fedavg", "--seeds", 2)


def test_side_by_side_changes_no_result(fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[list[int]] = []  # the trainers' jobs, and whose weights they had
    train = Trainer._train_supernets

    def heard(self: Trainer, jobs: Sequence[SupernetJob]) -> list[Trained]:
        served.append([id(job.weights) for job in jobs])
        return train(self, jobs)

    shared = (tiny_file, *SEVERAL, "inline.together=2")
    assert fedloom_("compare", *shared, "run.folder=apart", "--jobs", 2).code == 0
    monkeypatch.setattr(Trainer, "_train_supernets", heard)
    outcome = fedloom_("compare", *shared, "run.folder=beside", "--side-by-side", 3)
    assert outcome.code == 0 and re.search(r"^perfedsde-1: round 2/2: 2 clients, accuracy", outcome.out, re.MULTILINE)
    assert {len(jobs) for jobs in served} == {4}  # two clients of each of the two seeds
    for name in ("perfedsde-0", "fedavg-0", "perfedsde-1", "fedavg-1"):
        apart, beside = (content(tmp_path / where / name) for where in ("apart", "beside"))
        assert sorted(apart) == sorted(beside)
        assert [file for file in apart if apart[file] != beside[file]] == ["config.toml"]  # which names the folder


def test_of_several_in_one_process_one_may_fail_or_go_on(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = METHODS["fedavg"].make
    absorb, command = kind.absorb, ("compare", tiny_file, "--methods", "fedavg,local", "--seeds", 2, "--side-by-side", 2)

    def fails(self: Any, state: Any, reports: Any) -> Any:
        if state.seed == 0 and state.round == 1:
            raise InvalidConfig("it cannot be")
        if state.seed == 1:
            raise ValueError("nor this")
        return absorb(self, state, reports)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "absorb", fails)
        outcome = fedloom_(*command)
    assert outcome.code == InvalidConfig.exit_code and outcome.err == "fedloom: 2 of 4 runs failed, first fedavg-0: it cannot be\n"
    assert "fedavg-1: failed: ValueError: nor this\n" in outcome.out and re.search(r"^local-1: \d", outcome.out, re.MULTILINE)
    again = fedloom_(*command)
    assert again.code == 0 and "\nfedavg-0: going on after round 1 of 2\n" in again.out and "local-0: finished before: " in again.out
    assert fedloom_("compare", tiny_file, "--methods", "fedavg", "--seeds", 2, "--jobs", 1, "run.folder=apart").code == 0
    for name in ("fedavg-0", "fedavg-1"):
        folders = (tmp_path / "apart" / name, tmp_path / "runs" / "compare-tiny" / name)
        first, second = (read_arrays(folder / "state" / "server.safetensors") for folder in folders)
        assert first[1] == second[1] and all(np.array_equal(array, second[0][part]) for part, array in first[0].items())


@pytest.mark.parametrize("how", ["keyboard", "SIGTERM"])
def test_leaving_stops_all_that_share_a_process(
    fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    before, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    train = Trainer._train_networks

    def interrupted(self: Trainer, jobs: Any) -> Any:
        if how == "keyboard":
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGTERM)
        return train(self, jobs)

    command = ("compare", tiny_file, "--methods", "fedavg,local", "--side-by-side", 2)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_networks", interrupted)
        outcome = fedloom_(*command)
    assert outcome.code == (Interrupted.exit_code if how == "keyboard" else 143)
    assert signal.getsignal(signal.SIGTERM) is before and threading.active_count() == threads
    assert fedloom_(*command).code == 0  # the folders are free again


# -- results ----------------------------------------------------------------------------------------------


def test_a_finished_run_that_has_lost_its_split_is_named(orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path) -> None:
    orders({"local-0": {"split": None}})
    outcome = fedloom_("compare", tiny_file, "--methods", "fedavg,local")
    assert outcome.code == DamagedRun.exit_code and "Remove runs/compare-tiny/local-0, and the same command runs it again" in outcome.err


def test_clients_of_different_splits_are_not_compared(orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path) -> None:
    orders({"local-0": {"split": "another"}})
    outcome = fedloom_("compare", tiny_file, "--methods", "fedavg,local")
    assert outcome.code == DamagedRun.exit_code and "fedavg-0 and runs/compare-tiny/local-0 have different splits" in outcome.err


def test_runs_of_another_version_are_named(orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path) -> None:
    now = environment(torch.device("cpu"))
    orders({"fedavg-0": {"environment": now}, "local-0": {"environment": {**now, "commit": "abc"}}})
    outcome = fedloom_("compare", tiny_file, "--methods", "fedavg,local")
    assert re.findall("^.* was made by .*$", outcome.out, re.MULTILINE) == [f"local-0 was made by commit abc, this is {now['commit']}"]


# -- what is shown ----------------------------------------------------------------------------------------


def made(*accuracies: float, seconds: float = 10.0) -> dict[str, Any]:
    mean = sum(accuracies) / len(accuracies)
    clients = [{"name": f"client-{number}", "test_accuracy": accuracy} for number, accuracy in enumerate(accuracies)]
    cost = {"seconds": seconds, "bytes_up": 3_000_000}
    return {"accuracy": {"mean": mean, "std": 0.1}, "clients": clients, "cost": cost}


def shown(card: dict[str, Any], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(comparison_table(card))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_numbers_by_hand() -> None:
    results = {
        "perfedsde": {0: made(0.5, 0.7), 1: made(0.9, 0.9, seconds=20.0)},
        "fedavg": {1: made(0.6, 0.7), 0: made(0.6, 0.9)},
        "local": {0: made(0.4, 0.6)},
    }
    card = comparison_card(results)
    assert (card["compared_to"], card["seeds"]) == ("perfedsde", [0, 1])
    first, second, third = card["methods"]
    assert {name: value for name, value in first["accuracy"].items() if value is not None} == pytest.approx(
        {"mean": 0.75, "std_over_clients": 0.1, "std_over_seeds": 0.3 / 2**0.5}  # results of earlier versions know of no others
    )
    assert first["seconds"] == 15 and first["bytes_up"] == 3_000_000 and first["difference"] is None
    assert [run["seed"] for run in second["runs"]] == [0, 1]
    # +0.1, +0.2 at seed 0 and -0.3, -0.2 at seed 1: mean -0.05, variance 0.17 / 3, t(3) at 97.5 % is 3.18245.
    difference = second["difference"]
    reach = 3.182446 * (0.17 / 3 / 4) ** 0.5
    assert [difference[name] for name in ("pairs", "mean", "low", "high")] == pytest.approx([4, -0.05, -0.05 - reach, -0.05 + reach])
    assert difference["by_seed"] == pytest.approx({0: 0.15, 1: -0.25})
    assert (third["accuracy"]["std_over_seeds"], third["difference"]["pairs"]) == (None, 2)  # only where both ran
    table = shown(card)
    assert re.search(r"fedavg +70.0 ± 10.0 +7.1 +10 +3.0 +-5.0 \[-42.9, \+32.9\] ", table) and "…" not in table
    notes = comparison_notes(card)
    assert "the mean of 2 seeds" in notes and "(2–4 pairs)" in notes and "95% Student t interval" in notes


def test_what_a_source_says_for_one_method_alone_is_told(
    orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path, tmp_path: Path
) -> None:
    orders({})
    special = tmp_path / "special.toml"
    special.write_text(tiny_file.read_text() + "\n[when.local]\nrounds = 1\n[when.local.local]\nepochs = 2\n")
    told = fedloom_("compare", special, "--methods", "fedavg,local")
    assert told.code == 0 and "local ran with rounds=1, fedavg with 2" in told.out and "epochs" not in told.out
    plain = fedloom_("compare", special, "rounds=1", "run.folder=same", "--methods", "fedavg,local")
    assert plain.code == 0 and "ran with" not in plain.out
    card = json.loads(fedloom_("compare", special, "run.folder=third", "--methods", "fedavg,local", "--json").out)
    assert card["own_settings"] == [{"method": "local", "key": "rounds", "value": 1, "first": "fedavg", "usual": 2}]


def test_runs_of_an_older_plugin_file_are_named(tmp_path: Path) -> None:
    """Whoever works on a method changes its file and gives the same command again."""
    file = tmp_path / "mine.py"
    file.write_text("1")
    made = {"environment": {**environment(torch.device("cpu")), "plugins": plugin_digests([str(file), "package.module"])}}
    before = {"environment": environment(torch.device("cpu"))}  # by a version that kept no digests
    results: dict[str, Any] = {"mine": {0: made}, "fedavg": {0: before}}
    assert stale(results, [str(file)]) == []
    file.write_text("2")
    assert stale(results, [str(file)]) == ["mine-0 was made before mine.py changed. Remove its folder to make it again"]


def test_one_client_and_failures() -> None:
    card = comparison_card({"fedavg": {}, "perfedsde": {0: made(0.5)}, "local": {0: made(0.7)}})
    assert [method["difference"] for method in card["methods"]] == [None] * 3  # nothing to compare to
    assert "failed" in shown(card) and comparison_notes(card) == "Test accuracy in %, ± the spread over clients; seed 0."
    card = comparison_card({"perfedsde": {0: made(0.5)}, "local": {0: made(0.7)}})
    assert re.search(r"local .* \+20.0 +1 ", shown(card))


def test_a_terminal_has_a_line_for_each_run() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    with LiveRuns(console, ["fedavg-0", "local-0", "local-1"]) as view:
        view.begin("fedavg-0")
        view.news("fedavg-0", "round 3/12: [bold]6 clients")
        view.news("fedavg-0", "")  # nothing new
        view.end("local-0", "finished before")
    last = console.file.getvalue().split("fedavg-0")[-1]  # type: ignore[attr-defined]
    for words in ("round 3/12: [bold]6 clients", "local-0", "finished before", "local-1", "waiting"):
        assert words in last
