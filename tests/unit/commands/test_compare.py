"""`fedloom compare` with a process for each run: how they go side by side, fail, are stopped, and share a machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedloom import comparing
from fedloom.assemble.environment import share_gpu
from fedloom.core.errors import DamagedRun, Interrupted
from support.checks import Fedloom


def test_runs_go_side_by_side(orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path, tmp_path: Path) -> None:
    orders({"fedavg-0": {"wait_for": ["local-0"]}, "local-0": {"wait_for": ["fedavg-0"]}})
    assert fedloom_("compare", tiny_file, "--methods", "fedavg,local", "--jobs", 2).code == 0


def test_no_more_than_asked_for(orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path, tmp_path: Path) -> None:
    orders({"fedavg-0": {"sleep": 0.3}, "local-0": {"sleep": 0.3}})
    assert fedloom_("compare", tiny_file, "--methods", "fedavg,local", "--seeds", 2, "--jobs", 1, "run.folder=it").code == 0
    assert [path.read_text() for path in tmp_path.glob("it/*/alone")] == ["True"] * 4


def test_one_that_fails_does_not_stop_the_others(orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path) -> None:
    orders({"fedavg-0": {"exit": 5, "sleep": 0.5}, "perfedsde-0": {"exit": 10}})
    outcome = fedloom_("compare", tiny_file, "--methods", "fedavg,perfedsde,local", "--jobs", 1)
    assert outcome.code == 5
    assert outcome.err == "fedloom: 2 of 3 runs failed, first fedavg-0: it cannot be\n"
    assert "perfedsde-0: failed: it cannot be\n" in outcome.out and re.search(r"local +62.5 ± 12.5 ", outcome.out)
    outcome = fedloom_("compare", tiny_file, "--methods", "fedavg,local", "--json", "run.folder=b")
    card = json.loads(outcome.out)
    assert outcome.code == 5 and card["failed"] == [{"run": "fedavg-0", "exit_code": 5, "reason": "it cannot be"}]
    assert card["methods"][0]["accuracy"]["mean"] is None and card["methods"][1]["accuracy"]["mean"] == 0.625


def test_one_whose_result_cannot_be_read_does_not_stop_the_others(orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path) -> None:
    orders({"fedavg-0": {"result": '{"finished": true, "accuracy": NaN}'}, "local-0": {"sleep": 0.5}})
    outcome = fedloom_("compare", tiny_file, "--methods", "fedavg,local", "--jobs", 2, "run.folder=it")
    assert outcome.code == DamagedRun.exit_code and re.search(r"local +62.5 ± 12.5 ", outcome.out)
    assert outcome.err.startswith("fedloom: 1 of 2 runs failed, first fedavg-0: it left no result that can be read. Remove it/fedavg-0")


def test_all_fail(orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path) -> None:
    orders({"local-0": {"signal": int(signal.SIGKILL)}})
    outcome = fedloom_("compare", tiny_file, "--methods", "local")
    assert outcome.code == 137 and outcome.err == "fedloom: 1 of 1 runs failed, first local-0: killed by SIGKILL\n"
    assert "method" not in outcome.out


@pytest.mark.parametrize("how", ["keyboard", "SIGTERM"])
def test_leaving_stops_what_was_started(
    orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    orders({"fedavg-0": {"sleep": 60}, "local-0": {"sleep": 60}})
    before = signal.getsignal(signal.SIGTERM)  # other tests' libraries may have set it
    sleep, left = time.sleep, []

    def glance(seconds: float) -> None:
        if not left and len(list(tmp_path.rglob("alone"))) == 2:
            left.append(how)
            if how == "keyboard":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)
        sleep(seconds)

    monkeypatch.setattr(comparing.time, "sleep", glance)
    outcome = fedloom_("compare", tiny_file, "--methods", "fedavg,local", "--jobs", 2)
    assert outcome.code == (Interrupted.exit_code if how == "keyboard" else 143)
    assert outcome.err == "fedloom: stopped. The same command goes on from here\n"
    assert left == [how] and len(list(tmp_path.rglob("pid"))) == 2
    for path in tmp_path.rglob("pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_finished_in_time_is_shown_and_the_rest_goes_on(
    orders: Callable[..., None], fedloom_: Fedloom, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders({"local-0": {"sleep": 60}})
    now = time.monotonic

    def later() -> float:
        """An hour later once fedavg has its result and local has begun."""
        return now() + 3600 * all((tmp_path / "it" / file).exists() for file in ("fedavg-0/result.json", "local-0/pid"))

    command = ("compare", tiny_file, "--methods", "fedavg,local,perfedsde", "--jobs", 2, "--minutes", 30, "run.folder=it")
    with monkeypatch.context() as patch:
        patch.setattr(comparing.time, "monotonic", later)
        outcome = fedloom_(*command)
    assert outcome.code == Interrupted.exit_code
    assert re.search(r"fedavg +62.5 ± 12.5 ", outcome.out)
    assert "local-0: stopped after 30 minutes" in outcome.out and "The same command goes on with it" in outcome.out
    assert re.search(r"2 of 3 runs failed, first (local|perfedsde)-0: stopped after 30 minutes", outcome.err)
    for path in tmp_path.rglob("pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_threads_and_the_gpu_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "usable_cores", lambda: 7)
    for known, expected in (("", "3"), ("5", "5")):
        monkeypatch.setenv("OMP_NUM_THREADS", known) if known else monkeypatch.delenv("OMP_NUM_THREADS")
        said = '{"kind": "model", "done": 1, "rounds": 1, "clients": %s, "models": %s}'
        told = f"import os; print({said!r} % (os.environ['FEDLOOM_RUNS_AT_ONCE'], os.environ['OMP_NUM_THREADS']))"
        child = comparing.Child(comparing.PlannedRun("local", 0, tmp_path, (sys.executable, "-S", "-c", told)), jobs=2)
        child.process.wait(20)
        assert child.news() == f"personal model {expected} ()" and child.failure() is None
        assert '"clients": 2' in os.pread(child.output.fileno(), 1000, 0).decode()


@pytest.mark.parametrize(
    ("device", "runs", "workers", "share"), [("cuda", "6", 0, 0.95 / 6), ("cuda", "3", 2, 0.95 / 6), ("cuda", "", 1, 0.95)]
)
def test_runs_and_workers_keep_to_their_part_of_a_gpu(
    device: str, runs: str, workers: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOM_RUNS_AT_ONCE", runs) if runs else monkeypatch.delenv("FEDLOOM_RUNS_AT_ONCE", raising=False)
    taken: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", taken.append)
    share_gpu(torch.device("cpu"), workers)
    assert taken == []
    share_gpu(torch.device(device), workers)
    assert taken == [pytest.approx(share)]


def test_a_run_alone_may_take_the_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share: pytest.fail(f"took {share}"))
    share_gpu(torch.device("cuda"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_runs_end_with_a_comparison_that_is_killed(tmp_path: Path) -> None:
    """Nobody else would end them, and the same command could not go on with folders that they still use."""
    program = (
        "import os, signal, sys; from pathlib import Path; from fedloom import comparing; "
        "child = comparing.Child(comparing.PlannedRun('local', 0, Path(), (sys.executable, '-S', '-c', 'import time; time.sleep(9)')), 1); "
        "print(child.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    status, until = Path(f"/proc/{int(run.stdout)}/stat"), time.monotonic() + 10
    while (alive := status.exists() and status.read_text().split()[2] != "Z") and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive, run.stderr
