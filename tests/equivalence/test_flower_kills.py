"""Processes of a federation that end without notice, in the middle of a round, and come back. What happened is printed (pytest -s)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedloom.assemble import simulation as assemble
from fedloom.core.messages import TRAIN, Instruction, Report
from fedloom.engine.inline import InlineLink
from fedloom.engine.run import Watcher
from support.federation import (
    SITES,
    Federation,
    check_same,
    end,
    farthest,
    federation,
    finished_rounds,
    lines,
    rehearsed,
    wait_until,
)

pytestmark = pytest.mark.xdist_group("flower")


def tell(began: float) -> Callable[[str], None]:
    print()
    return lambda text: print(f"{time.monotonic() - began:5.1f} s  {text}")


def rounds_left(made: Federation, name: str) -> list[int]:
    """The rounds whose reports have left a site, first to last."""
    log = made.site_folder(name) / "left.jsonl"
    return [line["round"] for line in lines(log)] if log.exists() else []


def test_a_killed_server_goes_on_after_the_last_finished_round(tmp_path: Path, nobody: Watcher) -> None:
    """Sites that had answered the round already repeat it from the memory before it: all is as if nothing had happened. The server also
    finds what it carries from round to round."""
    say = tell(time.monotonic())
    with federation(tmp_path, extra="[averaging]\nmomentum = 0.5\nlast = 2") as made:
        server, sites = made.serve(), {name: made.site(name) for name in SITES}
        sites["west"].wait_for("west: round 2")
        os.kill(sites["west"].process.pid, signal.SIGSTOP)  # so that the round cannot end
        wait_until(lambda: all(rounds_left(made, name) == [0, 1] for name in ("north", "east")), "north and east answer round 2")
        assert rounds_left(made, "west") == [0]
        assert finished_rounds(made) == 1
        say("north and east have answered round 2, west is at work; the server is killed")
        server.kill()
        os.kill(sites["west"].process.pid, signal.SIGCONT)
        again = made.serve()
        say("the server is started again")
        again.wait_for("Listening")
        end([*sites.values(), again])
        assert finished_rounds(made) == 3
        for name in SITES:
            left = lines(made.site_folder(name) / "left.jsonl")
            repeated = [line["sha256"] for line in left if line["round"] == 1]
            assert [line["round"] for line in left] == [0, 1, 1, 2, 3] and len(set(repeated)) == 1
            say(f"{name} answered round 2 twice, with the same report ({repeated[0][:12]})")
        entries = lines(tmp_path / "server-run" / "ledger.jsonl")
        assert sorted((entry["round"], entry["client"]) for entry in entries) == [(r, name) for r in range(4) for name in sorted(SITES)]
        check_same(made, rehearsed(made, nobody))
        say("weights, architectures and memories are those of a federation in which nothing happened")


class Without(InlineLink):
    """North does not take part in the second round."""

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        return super().exchange([i for i in instructions if (i.client, i.round, i.action) != ("north", 1, TRAIN)])


@pytest.mark.network  # a minute: Flower takes a site for gone after two missed heartbeats of at least ten seconds
def test_a_killed_site_is_not_waited_for_and_comes_back(tmp_path: Path, nobody: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    say = tell(time.monotonic())
    with federation(tmp_path, round="minimum = 2\npatience = 10", extra="[perfedsde]\niterations = 4") as made:
        server, sites = made.serve(), {name: made.site(name) for name in SITES}
        sites["north"].wait_for("north: round 2")
        sites["north"].kill()
        assert rounds_left(made, "north") == [0]
        say("north is killed while it works on round 2")
        server.wait_for("north, round 2: the connection is lost")
        say("the server misses its heartbeats")
        server.wait_for("round 2 ends without north: not connected")
        wait_until(lambda: finished_rounds(made) == 2, "round 2 is over")
        say("round 2 ended with the others; north is started again")
        north = made.site("north")
        end([north, sites["east"], sites["west"], server])
        assert rounds_left(made, "north") == [0, 2, 3]
        assert "north: round 1" not in north.said() and "north: round 3" in north.said()
        assert "3 of 3 sites have their personal model" in server.said()
        for name in ("east", "west"):
            assert rounds_left(made, name) == [0, 1, 2, 3]
        entries = lines(tmp_path / "server-run" / "ledger.jsonl")
        assert [sum(entry["round"] == round for entry in entries) for round in range(4)] == [3, 2, 3, 3]
        say("north took part in round 3 and has its model")
        monkeypatch.setattr(assemble, "InlineLink", Without)
        here = rehearsed(made, nobody)
        check_same_but_for_old_memories(made, here)
        say("all is as if north had stayed away from round 2: it went on from its memory of round 1")


def check_same_but_for_old_memories(made: Federation, here: Path) -> None:
    """In one process nobody is asked for a round twice, so there it may keep less."""
    assert farthest(made.folder / "server-run/state/server.safetensors", here / "state/server.safetensors") == 0
    for name in SITES:
        there: Any = made.site_folder(name) / "clients" / name
        for file in ("model.safetensors", "memory-2.safetensors", "memory-3.safetensors"):
            assert farthest(there / file, here / "clients" / name / file) == 0, (name, file)
