"""Twenty kills, two processes that stand still and a full disk, all in one federation, which finishes by itself as if nothing had happened.

Processes that end are started again as the documented systemd unit does it, and nobody else helps. What happened is printed (pytest -s).
Another seed: FEDLOOM_SEED=8 pytest -s -m network tests/federation/test_everything_at_once.py
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedloom.core.errors import DamagedRun
from fedloom.engine.run import Watcher
from fedloom.files import read_arrays
from support.disk import SmallDisk, small_disk
from support.federation import SITES, Federation, Running, check_same, federation, lines, rehearsed

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("flower")]
KILLS = 20
STOPPED = 90.0  # seconds
FULL = 20.0  # seconds, at least: until somebody has noticed
ROUNDS = 90
LONGEST = 1500.0  # seconds until all must be over
AGAIN = 1.0  # seconds until a process that ended is started again
MEMBERS = ("server", *SITES)
PAGE = Path(__file__).parents[2] / "docs/how-to/federation.md"


def final_codes() -> set[int]:
    """With which the documented units do not start a member again."""
    listed = set(re.findall(r"RestartPreventExitStatus=([\d ]+)", PAGE.read_text()))
    (codes,) = listed
    return {int(code) for code in codes.split()}


@dataclass
class Watched:
    """The members of a federation, each kept running by what would be systemd."""

    made: Federation
    say: Callable[[str], None]
    final: set[int] = field(default_factory=final_codes)
    running: dict[str, Running] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)  # who is to be started again -> since when
    stopped: dict[str, float] = field(default_factory=dict)  # who stands still -> until when
    over: set[str] = field(default_factory=set)
    starts: Counter[str] = field(default_factory=Counter)

    def look(self) -> None:
        """Start what has not begun, or has ended for no good reason; wake who stood still for long enough."""
        now = time.monotonic()
        for name in [name for name, until in self.stopped.items() if now >= until]:
            del self.stopped[name]
            os.kill(self.running[name].process.pid, signal.SIGCONT)
            self.say(f"{name} goes on")
        for name in MEMBERS:
            if name in self.over:
                continue
            if name in self.running and (code := self.running[name].process.exitcode) is not None:
                last = self.running.pop(name).said().strip().splitlines()[-1:]
                if code == 0:
                    self.over.add(name)
                    self.say(f"{name} is at its end")
                    continue
                assert code not in self.final, f"{name} ended for good with code {code}: {last}"
                assert code < 0, f"{name} ended with code {code}: {last}"  # nothing but a kill ends anybody
                self.ended[name] = now
            if name not in self.running and now - self.ended.get(name, -AGAIN) >= AGAIN:
                self.running[name] = self.made.serve() if name == "server" else self.made.site(name)
                self.starts[name] += 1

    def kill(self, name: str) -> None:
        words = self.running[name].said().strip().splitlines() or ["nothing"]
        self.running[name].kill()
        self.say(f"{name} is killed, in round {finished_rounds(self.made) + 1}; it said last: {words[-1][-90:]}")

    def stop(self, name: str, seconds: float) -> None:
        os.kill(self.running[name].process.pid, signal.SIGSTOP)
        self.stopped[name] = time.monotonic() + seconds
        self.say(f"{name} stands still for {seconds:g} s, in round {finished_rounds(self.made) + 1}")

    def awake(self) -> list[str]:
        return [name for name in self.running if name not in self.stopped and self.running[name].process.exitcode is None]

    def said(self, text: str) -> list[str]:
        """Who said it, ever."""
        return [name for name in MEMBERS if text in (self.made.folder / f"{name}.log").read_text()]


def finished_rounds(made: Federation) -> int:
    try:
        return int(read_arrays(made.folder / "server-run/state/server.safetensors")[1]["round"])
    except DamagedRun:  # it is not there yet
        return 0


def test_a_federation_goes_through_all_of_it(tmp_path: Path, nobody: Watcher) -> None:
    seed, began = int(os.environ.get("FEDLOOM_SEED", "7")), time.monotonic()
    draw = random.Random(seed)

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    say(f"seed {seed}")
    cheap = '[perfedsde]\ngenerator = "random"\nsurrogate = "none"'
    with small_disk(tmp_path / "disk", 64 << 20) as disk, federation(tmp_path / "all", extra=cheap) as made:
        made.file.write_text(made.file.read_text().replace("rounds = 3", f"rounds = {ROUNDS}"))
        for name in SITES:
            file = made.folder / f"{name}.toml"
            file.write_text(file.read_text().replace("wait = 60", "wait = 0"))
        if disk:
            move_to(disk, made)
        else:
            say("this user may not mount a small disk: none gets full")
        watched = Watched(made, say)
        trouble(draw, watched, disk)
        assert "server" not in watched.over, "the federation was over before the last trouble: there were too few rounds"
        say("nothing more happens to anybody")
        while watched.over != set(MEMBERS):
            assert time.monotonic() - began < LONGEST, {name: one.said()[-2000:] for name, one in watched.running.items()}
            watched.look()
            time.sleep(0.1)
        seconds = time.monotonic() - began
        check_same(made, rehearsed(made, nobody))
        check_reports(made, say)
        starts = ", ".join(f"{name} {count}" for name, count in sorted(watched.starts.items()))
        say(f"over after {seconds:.0f} s and {ROUNDS} rounds; starts: {starts}. All is bit-equal to the rehearsal")


def move_to(disk: SmallDisk, made: Federation) -> None:
    """All that members keep lies on this disk; what they say does not."""
    for name in ("server-run", *(f"at-{site}" for site in SITES)):
        (disk.folder / name).mkdir()
        (made.folder / name).symlink_to(disk.folder / name)


def trouble(draw: random.Random, watched: Watched, disk: SmallDisk | None) -> None:
    """All of it in a random order, at moments that nobody chose. While somebody stands still, or the disk is full, the rest goes on."""
    events = ["kill"] * KILLS + ["server stands still", "a site stands still"] + ["full disk"] * bool(disk)
    draw.shuffle(events)
    full_since = 0.0  # 0: it is not full

    def go_on(seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        nonlocal full_since
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            watched.look()
            if disk and full_since:
                disk.fill()  # what others have removed, too
                if time.monotonic() - full_since > FULL and (who := watched.said("waits: No space left on device")):
                    disk.free()
                    full_since = 0.0
                    watched.say(f"there is room on the disk again; {', '.join(who)} had noticed")
            time.sleep(0.02)

    for number, event in enumerate(events):
        if number and draw.random() < 0.7:  # the others come while things are still in disorder
            goal = finished_rounds(watched.made) + draw.randint(1, 3)
            go_on(40, lambda goal=goal: finished_rounds(watched.made) >= goal)  # type: ignore[misc]
        go_on(draw.uniform(0, 2))
        go_on(60, lambda event=event: bool(candidates(event, watched)))  # type: ignore[misc]
        name = draw.choice(candidates(event, watched))
        if event == "kill":
            watched.kill(name)
        elif event == "full disk":
            assert disk
            disk.fill()
            full_since = time.monotonic()
            watched.say(f"the disk is full, in round {finished_rounds(watched.made) + 1}")
        else:
            watched.stop(name, STOPPED)
    go_on(2 * STOPPED, lambda: not watched.stopped and not full_since)
    assert not watched.stopped and not full_since, "nobody noticed that the disk was full"


def candidates(event: str, watched: Watched) -> list[str]:
    """To whom it may happen now."""
    fitting = {"server stands still": ("server",), "a site stands still": SITES}.get(event, MEMBERS)
    return [name for name in watched.awake() if name in fitting]


def check_reports(made: Federation, say: Callable[[str], None]) -> None:
    """A report that left twice was the same, and every round has one."""
    for name in SITES:
        left = lines(made.site_folder(name) / "left.jsonl")
        assert {line["round"] for line in left} == set(range(ROUNDS + 1))
        assert len({(line["round"], line["sha256"], line["instruction"]) for line in left}) == ROUNDS + 1
        say(f"{name}: {len(left)} reports left, {len(left) - ROUNDS - 1} of them once more")
