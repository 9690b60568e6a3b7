"""A run that was stopped at any moment and resumed is the run that was never stopped."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedloom import files
from fedloom.assemble import new_run, resume_run
from fedloom.config import Settings
from fedloom.engine.run import Watcher
from fedloom.files import read_arrays
from fedloom.methods.base import METHODS
from fedloom.training.drift import CONTROL, remembered
from support.kills import Known, Participation, disk, listening
from support.perfedsde import ANCHORED

Content = Callable[[Path], dict[str, Any]]


class Crash(BaseException):
    """No part of the package expects it."""


@dataclass(frozen=True)
class Recorded:
    """A run that was never stopped, and a copy of its folder at every step of its writes."""

    settings: Settings
    folder: Path
    participations: list[Participation]
    steps: list[tuple[str, str]] = field(default_factory=list)  # what came next, and the file
    copies: list[Path] = field(default_factory=list)
    known: Known = field(default_factory=dict)


@pytest.fixture(scope="module")
def record(tiny: Callable[..., Settings], nobody: Watcher, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recorded]:
    known: dict[tuple[str, ...], Recorded] = {}

    def once(*overrides: str) -> Recorded:
        if overrides not in known:
            place = tmp_path_factory.mktemp("recorded")
            run = Recorded(tiny(*overrides), place / "run", [])

            def copy(what: str, name: str) -> None:
                run.steps.append((what, name))
                run.copies.append(Path(shutil.copytree(run.folder, place / f"step {len(run.steps)}")))

            with disk(run.folder, copy), listening(run.settings.method, run.known) as heard:
                new_run(run.settings, run.folder, nobody)
            run.participations.extend(heard)
            known[overrides] = run
        return known[overrides]

    return once


def go_on(folder: Path, settings: Settings, nobody: Watcher) -> None:
    """What a user does: resume; or run again where the kill came before there was a run."""
    if (folder / "config.toml").exists():
        resume_run(folder, nobody)
    else:
        new_run(settings, folder, nobody)


def still_to_do(run: Recorded, folder: Path) -> list[Participation]:
    """Read from the folder with no help from the engine: rounds from the saved one on, and clients without a final line."""
    state, ledger = folder / "state" / "server.safetensors", folder / "ledger.jsonl"
    round = read_arrays(state)[1]["round"] if state.exists() else 0
    whole_lines = [line for line in ledger.read_text().splitlines(keepends=True) if line.endswith("\n")] if ledger.exists() else []
    over = {entry["client"] for entry in map(json.loads, whole_lines) if entry["final"]}
    return [
        (client, number, action)
        for client, number, action in run.participations
        if (action == "train" and number >= round) or (action == "finish" and client not in over)
    ]


def check_steps(run: Recorded, numbers: Sequence[int], content: Content, nobody: Watcher) -> None:
    expected, computed = content(run.folder), len(run.known)
    for number in numbers:
        copy, where = run.copies[number], f"killed at step {number}, before {run.steps[number]}"
        todo = still_to_do(run, copy)
        with listening(run.settings.method, run.known) as heard, pytest.MonkeyPatch.context() as patch:
            patch.setattr(files.os, "fsync", lambda number: None)  # slow, and these kills leave the system alive
            go_on(copy, run.settings, nobody)
        assert heard == todo, where
        assert len(run.known) == computed, f"a client was asked what nobody was asked in the whole run, {where}"
        got = content(copy)
        assert sorted(got) == sorted(expected), where
        for name in expected:
            assert got[name] == expected[name], f"{name}, {where}"
        shutil.rmtree(copy)


# -- killed once, at every step --------------------------------------------------------------


def test_the_steps_are_all_there_are(record: Callable[..., Recorded], content: Content) -> None:
    """Or the tests below would miss a write: every file of the folder is seen to be written, and in every stage."""
    run = record()
    written = {name for what, name in run.steps if what in ("replace", "open ab")}
    assert set(content(run.folder)) <= written
    assert {what for what, _ in run.steps} == {"open xb", "other half xb", "replace", "open ab", "other half ab", "unlink"}
    first, last = content(run.copies[0]), content(run.folder)
    assert first == {} and last["result.json"]["finished"] is True
    clients = [f"client-00{number}" for number in range(3)]
    assert [(client, action) for client, _, action in run.participations[-3:]] == [(client, "finish") for client in clients]
    assert [(round, action) for _, round, action in run.participations[:-3]] == [(0, "train"), (0, "train"), (1, "train"), (1, "train")]


@pytest.mark.parametrize("part", range(3))
def test_perfedsde_killed_at_every_write(record: Callable[..., Recorded], content: Content, nobody: Watcher, part: int) -> None:
    """Before each write and in the middle of it: in turn with half of the new file written, and with all of it but not yet its name."""
    run = record("clients=2")
    numbers, files_begun = [], 0
    for number, (what, _) in enumerate(run.steps):
        files_begun += what == "open xb"
        if what not in ("other half xb", "replace") or (what == "replace") == files_begun % 2:
            numbers.append(number)
    assert len(numbers) > 40
    check_steps(run, numbers[part::3], content, nobody)


def test_perfedsde_killed_between_checkpoints(record: Callable[..., Recorded], content: Content, nobody: Watcher) -> None:
    """Three rounds, two of them to one checkpoint, clients that take part more than once in between."""
    run = record("run.checkpoint_every=2", "rounds=3", "clients=2")
    assert ("unlink", "clients/client-000/memory-0.safetensors") in run.steps
    check_steps(run, range(1, len(run.steps), 4), content, nobody)


TOGETHER = ("inline.together=3", "participants=2")


@pytest.mark.parametrize("method", [pytest.param(name, marks=[] if name == "perfedsde" else pytest.mark.slow) for name in METHODS])
def test_clients_that_answer_together_killed_at_some_steps(
    record: Callable[..., Recorded], content: Content, nobody: Watcher, method: str
) -> None:
    """A kill takes all that are under way together with it; what was written of them is found again or done again."""
    run = record(f"method={method}", *TOGETHER)
    check_steps(run, range(2, len(run.steps), 5), content, nobody)


def test_perfedsde_with_an_anchor_killed_at_some_steps(record: Callable[..., Recorded], content: Content, nobody: Watcher) -> None:
    """A warm-up round, and two in which scores are kept for the next participation."""
    run = record(*ANCHORED, "perfedsde.warmup=0.34", "rounds=3", "clients=2")
    memories = [read_arrays(path)[0] for path in sorted(run.folder.glob("clients/*/memory*.safetensors"))]
    assert memories and all({name for name in memory if not name.startswith(CONTROL)} == {"population", "scores"} for memory in memories)
    assert any(remembered(memory) for memory in memories)
    check_steps(run, range(1, len(run.steps), 5), content, nobody)


@pytest.mark.parametrize("source", ["evolution", pytest.param("random", marks=pytest.mark.slow)])
def test_perfedsde_with_other_candidates_killed_at_some_steps(
    record: Callable[..., Recorded], content: Content, nobody: Watcher, source: str
) -> None:
    run = record("clients=2", f"perfedsde.generator={source}", "perfedsde.surrogate=none")
    check_steps(run, range(3, len(run.steps), 9), content, nobody)


@pytest.mark.parametrize("method", ["fedavg", "local", pytest.param("hapfnas", marks=pytest.mark.slow)])
def test_other_methods_killed_at_some_steps(record: Callable[..., Recorded], content: Content, nobody: Watcher, method: str) -> None:
    run = record(f"method={method}", "run.checkpoint_every=2", "rounds=3")
    check_steps(run, range(2, len(run.steps), 7), content, nobody)


def test_what_a_server_carries_is_found_again(record: Callable[..., Recorded], content: Content, nobody: Watcher) -> None:
    run = record("method=fedavg", "rounds=3", "averaging.momentum=0.5", "averaging.last=2")
    assert content(run.folder) != content(record("method=fedavg", "rounds=3").folder)
    check_steps(run, range(2, len(run.steps), 7), content, nobody)


# -- stopped again and again ------------------------------------------------------------------


@pytest.mark.parametrize("together", [(), TOGETHER], ids=["in turn", "together"])
@pytest.mark.parametrize("method", ["perfedsde", "fedavg", "local"])
def test_stopped_again_and_again(
    method: str, together: tuple[str, ...], record: Callable[..., Recorded], content: Content, nobody: Watcher, tmp_path: Path
) -> None:
    """An exception instead of a kill, also in the middle of a resume; every attempt comes a little further before it."""
    run = record(*together) if method == "perfedsde" else record(f"method={method}", "run.checkpoint_every=2", "rounds=3", *together)
    folder, attempts = tmp_path / "run", 0

    def allow(steps: int) -> Callable[[str, str], None]:
        left = iter(range(steps))

        def crash_at_last(what: str, name: str) -> None:
            if next(left, None) is None:
                raise Crash

        return crash_at_last

    while True:
        attempts += 1
        try:
            with disk(folder, allow(2 * attempts)), listening(run.settings.method, run.known):
                go_on(folder, run.settings, nobody)
            break
        except Crash:
            assert attempts < 100
    assert attempts > 5
    assert content(folder) == content(run.folder)


def test_a_finished_run_gives_its_result_again(record: Callable[..., Recorded], content: Content, nobody: Watcher, tmp_path: Path) -> None:
    run = record()
    folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
    with listening("perfedsde") as heard:
        result = resume_run(folder, nobody)
    assert heard == [] and result.finished and content(folder) == content(run.folder)
    assert (folder / "result.json").read_bytes() == (run.folder / "result.json").read_bytes()  # its clocks too


# -- real kills ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_by_the_system(tiny_file: Path, content: Content, tmp_path: Path) -> None:
    """SIGKILL at eight random moments, then to the end. They come early: the machine may be faster than while ``total`` was measured."""
    command = [sys.executable, "-m", "fedloom.commands.app"]
    start = [str(tiny_file), "rounds=6", "clients=4", "split.size=40", "perfedsde.iterations=2"]

    def begin(*arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, *arguments], cwd=tmp_path, stdout=subprocess.DEVNULL)

    began = time.monotonic()
    whole = begin("run", *start, "run.folder=whole")
    while not (tmp_path / "whole" / "config.toml").exists():
        assert whole.poll() is None
        time.sleep(0.01)
    ready = time.monotonic() - began
    assert whole.wait(300) == 0
    total = time.monotonic() - began

    draw, killed = random.Random(4), 0
    folder = tmp_path / "stopped"
    for _ in range(8):
        arguments = ["resume", "stopped"] if (folder / "config.toml").exists() else ["run", *start, "run.folder=stopped"]
        process = begin(*arguments)
        try:
            process.wait(draw.uniform(ready * 0.9, ready + (total - ready) / 6))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
    assert killed >= 3
    assert begin("resume", "stopped").wait(300) == 0
    expected, got = content(tmp_path / "whole"), content(folder)
    for either in (expected, got):
        either["config.toml"] = either["config.toml"].replace(b'"stopped"', b'"whole"')
        del either["result.json"]["environment"]["commit"]  # of the last process, and somebody may be at work here
    got = {name: value for name, value in got.items() if not name.endswith(".part")}
    assert got == expected
