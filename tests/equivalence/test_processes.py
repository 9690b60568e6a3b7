"""Several processes give the same run as one, and say what goes wrong in them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedloom.assemble import new_run, resume_run
from fedloom.config import Settings
from fedloom.core.client_site import ClientMemory
from fedloom.core.errors import ClientFailed, InvalidConfig, InvalidData
from fedloom.core.hardware import Hardware
from fedloom.core.messages import TRAIN, Instruction
from fedloom.engine.processes import ProcessesLink, heard, worker_processes
from fedloom.engine.run import Watcher
from fedloom.methods.base import METHODS

Content = Callable[[Path], dict[str, Any]]
Tiny = Callable[..., Settings]
TWO = ("engine=processes", "processes.workers=2")

EVERY_METHOD = [pytest.param(name, 1, marks=pytest.mark.slow) for name in METHODS]


@pytest.mark.parametrize("method, together", [("perfedsde", 2), *EVERY_METHOD])  # together: clients that a worker serves at once
def test_processes_give_what_one_gives(method: str, together: int, tiny: Tiny, nobody: Watcher, content: Content, tmp_path: Path) -> None:
    wanted = (f"method={method}", "participants=3", "hardware.gmacs=[0.01, 1]", "run.folder=somewhere")
    stages = []
    watcher: Any = type("Watching", (), {**vars(nobody), "stage": staticmethod(lambda client, stage: stages.append((client, stage)))})
    new_run(tiny(*wanted, "inline.threads=1"), tmp_path / "inline", watcher)
    seen, stages[:] = sorted(stages), []
    new_run(tiny(*wanted, *TWO, f"processes.together={together}"), tmp_path / "processes", watcher)
    one, other = (content(tmp_path / engine) for engine in ("inline", "processes"))
    assert sorted(one) == sorted(other) and len([name for name in one if name.endswith("model.safetensors")]) == 3
    for name in one:
        if name != "config.toml":
            assert one[name] == other[name], name
    assert seen and sorted(stages) == seen  # a watcher sees the same as well
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_stopped_run_goes_on(tiny: Tiny, nobody: Watcher, content: Content, tmp_path: Path) -> None:
    def stop(round: int, entries: object) -> None:
        raise KeyboardInterrupt

    watcher: Any = type("Stopping", (), {**vars(nobody), "round_done": staticmethod(stop)})
    settings = tiny("method=perfedsde", "run.folder=somewhere", *TWO)
    with pytest.raises(KeyboardInterrupt):
        new_run(settings, tmp_path / "stopped", watcher)
    assert not multiprocessing.active_children()
    resume_run(tmp_path / "stopped", nobody)
    new_run(settings, tmp_path / "whole", nobody)
    assert content(tmp_path / "stopped") == content(tmp_path / "whole")


class Broken:
    """A method whose clients do not answer."""

    def at(self, client: str) -> Any:
        return self

    def answer(self, instruction: Instruction, site: Any) -> Any:
        if instruction.client == "refuses":
            raise InvalidConfig("not with me", key="mine")
        if instruction.client == "fails":
            raise ZeroDivisionError("no data")
        os._exit(1)


def begin(fails: str = "") -> Any:
    if fails:
        raise InvalidData(fails) if fails == "no data" else ZeroDivisionError(fails)
    return Broken(), str


class NoBooks:
    def before(self, instruction: Instruction) -> tuple[ClientMemory, Hardware]:
        return ClientMemory(), Hardware()


@pytest.mark.parametrize(
    "client, error, said",
    [
        ("refuses", InvalidConfig, "^not with me"),
        ("fails", ClientFailed, "^fails, round 0: ZeroDivisionError: no data"),
        ("dies", ClientFailed, r"^dies: a worker died\. Often memory ran out: set fewer processes.workers and continue with `fedloom "),
    ],
)
def test_what_goes_wrong_in_a_worker(client: str, error: type[Exception], said: str) -> None:
    with worker_processes(1, begin) as made:
        link = ProcessesLink([client], NoBooks(), made)  # type: ignore[arg-type]
        with pytest.raises(error, match=said) as raised:
            link.exchange([Instruction(client, 0, TRAIN, 0)])
    if client == "refuses":
        assert raised.value.facts == {"key": "mine"}  # type: ignore[attr-defined]
    if client == "fails":  # where in the worker, for --trace
        assert "in answer" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("fails, error", [("no data", InvalidData), ("no luck", ClientFailed)])
def test_a_worker_that_cannot_begin(fails: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=fails), worker_processes(2, partial(begin, fails)):
        raise AssertionError("no worker is ready")
    assert not multiprocessing.active_children()


class Slow:
    def at(self, client: str) -> Any:
        return self

    def answer(self, instruction: Instruction, site: Any) -> Any:
        while True:
            with site.clock("wait"):
                time.sleep(0.01)


def slowly() -> Any:
    return Slow(), str


def killed(begin: Any) -> None:
    """A run that ends without a word while its worker is in the middle of a visit."""
    with worker_processes(1, begin) as made:
        made[0].send([(Instruction("slow", 0, TRAIN, 0), {}, ClientMemory(), Hardware())])
        heard(made[0])  # the first stage
        print(multiprocessing.active_children()[0].pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_ends_with_the_run_and_in_silence() -> None:
    program = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import test_processes as t; t.killed(t.slowly)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    status, until = Path(f"/proc/{int(run.stdout)}/stat"), time.monotonic() + 10
    while (alive := status.exists() and status.read_text().split()[2] != "Z") and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive and run.stderr == ""
