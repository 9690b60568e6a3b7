"""Where the time of a run goes: the table by hand, the trace of runs, also of those that are stopped and resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedloom.core.result import LedgerEntry
from fedloom.engine import profile as module
from fedloom.engine.profile import Profile
from fedloom.report.terminal.profile import profile_lines, profile_table
from support.checks import Fedloom

ENTRY = LedgerEntry("a", 0, False, 0, 0, (), {}, "", None, None, 0, 0, 0.0, 0.0)
ANYTHING: Any = None


class Clock:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        patch.setattr(module.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def rows(profile: Profile) -> dict[str, list[str]]:
    """The table's numbers, and its head."""
    table = profile_table(profile)
    cells = [list(column.cells) for column in table.columns]
    found = {str(row[0]): [str(cell) for cell in row[1:]] for row in zip(*cells, strict=True)}
    return {"": [str(column.header) for column in table.columns[1:]], **found}


def watched(clock: Clock, seconds: list[float]) -> Profile:
    """A run whose rounds take these seconds, of which client a trains a half and b tests a quarter."""
    profile = Profile()
    profile.begin(len(seconds), 2, 0, 0)
    for number, spent in enumerate(seconds, 1):
        entries = []
        for client, stage, share in (("a", "train", 0.5), ("b", "test", 0.25)):
            profile.stage(client, stage)
            clock.now += share * spent
            profile.stage(client, "")
            entries.append(replace(ENTRY, client=client, seconds={stage: share * spent}))
            profile.participation(entries[-1])
        clock.now += 0.25 * spent
        profile.round_done(number, entries)
    return profile


def test_seconds_by_stage_and_round(clock: Clock) -> None:
    profile = watched(clock, [40.0, 4.0, 8.0, 4.0, 4.0, 4.0])
    clock.now += 6
    profile.participation(replace(ENTRY, final=True, seconds={"finetune": 5.0}))
    clock.now += 2
    profile.end(ANYTHING)
    assert rows(profile) == {
        "": ["round 1", "round 5", "round 6", "median of the others", "all rounds", "personal models"],
        "train": ["20.00", "2.00", "2.00", "2.00", "32.00", "0.000"],
        "test": ["10.00", "1.00", "1.00", "1.00", "16.00", "0.000"],
        "finetune": ["0.000"] * 5 + ["5.00"],
        "other": ["10.00", "1.00", "1.00", "1.00", "16.00", "3.00"],
        "by the clock": ["40.00", "4.00", "4.00", "4.00", "64.00", "8.00"],
    }


def test_a_run_of_one_round_or_none(clock: Clock) -> None:
    assert rows(watched(clock, [4.0]))[""] == ["round 1"]
    assert rows(watched(clock, [4.0, 4.0]))[""] == ["round 1", "round 2", "all rounds"]
    assert rows(watched(clock, [])) == {"": [], "other": [], "by the clock": []}
    assert not Profile().begun


def test_clients_side_by_side_have_no_rest(clock: Clock) -> None:
    profile = Profile()
    profile.begin(1, 2, 0, 0)
    clock.now += 3
    profile.round_done(1, [replace(ENTRY, seconds={"train": 2.5}), replace(ENTRY, client="b", seconds={"train": 2.5})])
    assert rows(profile)["other"] == ["–"] and "side by side" in profile_lines(profile, "it")[1]
    Console(file=open("/dev/null", "w")).print(profile_table(profile))  # noqa: SIM115


def test_the_trace_has_a_line_for_rounds_and_one_for_each_client(clock: Clock) -> None:
    profile = watched(clock, [4.0])
    profile.stage("a", "train")  # a kill comes before its end
    clock.now += 1
    trace = json.loads(profile.trace())
    lines = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert lines == {0: "rounds", 1: "a", 2: "b"}
    events = [(lines[e["tid"]], e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert events == [("a", "train", 0, 2_000_000), ("b", "test", 2_000_000, 1_000_000), ("rounds", "round 1", 0, 4_000_000)]


def test_nested_stages_lie_one_after_the_other(clock: Clock) -> None:
    profile = Profile()
    profile.begin(1, 1, 0, 0)
    for stage in ("outer", "inner", "outer", ""):
        profile.stage("a", stage)
        clock.now += 1
    events = [event for event in json.loads(profile.trace())["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"]) for event in events] == [("outer", 0), ("inner", 1_000_000), ("outer", 2_000_000)]


# -- the command --------------------------------------------------------------------------------
def check_trace(path: Path, rounds: list[str]) -> None:
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in events if event["tid"] == 0] == [*rounds, "personal models"]
    assert {"train", "finetune", "test"} <= {event["name"] for event in events}
    whole = max(event["ts"] + event["dur"] for event in events if event["tid"] == 0)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 and event["ts"] + event["dur"] <= whole for event in events)
    for client in {event["tid"] for event in events} - {0}:  # one thing at a time
        own = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["tid"] == client)
        assert all(before[1] <= after[0] + 1 for before, after in pairwise(own))


@pytest.mark.parametrize("together", [1, 3])
def test_run_with_a_profile(fedloom_: Fedloom, tiny_file: Path, together: int) -> None:
    ran = fedloom_("run", tiny_file, "method=fedavg", f"inline.together={together}", "run.folder=it", "--profile")
    assert ran.code == 0, ran.err
    for said in ("round 1", "round 2", "train", "finetune", "other", "by the clock", "it/trace.json"):
        assert said in ran.out
    assert "GPU memory" not in ran.out
    check_trace(Path("it/trace.json"), ["round 1", "round 2"])


def test_without_it_nothing_is_written(fedloom_: Fedloom, tiny_file: Path) -> None:
    assert "by the clock" not in fedloom_("run", tiny_file, "method=local", "clients=2", "run.folder=it").out
    assert not list(Path("it").glob("trace*"))
    again = fedloom_("resume", "it", "--profile")  # finished: there is nothing to measure
    assert again.code == 0 and "by the clock" not in again.out and not list(Path("it").glob("trace*"))


def test_a_stopped_run_leaves_a_trace_and_a_resume_its_own(fedloom_: Fedloom, tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = Profile.round_done

    def stop(self: Profile, round: int, entries: Any) -> None:
        done(self, round, entries)
        if round == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Profile, "round_done", stop)
    stopped = fedloom_("run", tiny_file, "method=fedavg", "rounds=3", "run.folder=it", "--profile")
    assert stopped.code == 130 and "fedloom resume it" in stopped.err and "by the clock" in stopped.out
    first = json.loads(Path("it/trace.json").read_text())
    assert [event["name"] for event in first["traceEvents"] if event["ph"] == "X" and event["tid"] == 0] == ["round 1", "round 2"]
    monkeypatch.setattr(Profile, "round_done", done)
    resumed = fedloom_("resume", "it", "--profile", "--events")
    assert resumed.code == 0 and all(json.loads(line) for line in resumed.out.splitlines())  # events alone
    assert "by the clock" in resumed.err and "it/trace-1.json" in resumed.err
    check_trace(Path("it/trace-1.json"), ["round 2", "round 3"])
    assert json.loads(Path("it/trace.json").read_text()) == first


def test_a_refused_run_leaves_no_trace(fedloom_: Fedloom, tiny_file: Path) -> None:
    assert fedloom_("run", tiny_file, "training.precision=half", "run.folder=it", "--profile").code == 3
    assert not Path("it").exists()
