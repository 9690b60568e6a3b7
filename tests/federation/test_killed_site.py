"""A site that is killed again and again, at moments that nobody chose. What happened is printed (pytest -s)."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from fedloom.engine.run import Watcher
from support.federation import SITES, check_same, federation, lines, rehearsed

pytestmark = pytest.mark.xdist_group("flower")
KILLS, ROUNDS = 10, 30


@pytest.mark.network  # five minutes: after each kill Flower lets the site in again when two heartbeats of ten seconds are missing
@pytest.mark.timeout(600)
def test_ten_kills_change_no_bit(tmp_path: Path, nobody: Watcher) -> None:
    draw, per_report = random.Random(7), 1.0  # seconds
    with federation(tmp_path, extra='[perfedsde]\ngenerator = "random"\nsurrogate = "none"') as made:
        made.file.write_text(made.file.read_text().replace("rounds = 3", f"rounds = {ROUNDS}"))
        log = made.site_folder("north") / "left.jsonl"
        server, others = made.serve(), [made.site(name) for name in SITES if name != "north"]
        for number in range(KILLS):
            north, before = made.site("north"), left(log)
            if number:  # the first one comes while it starts
                north.wait_for("north is connected to")
                more, since = draw.randint(0, 2), time.monotonic()
                while left(log) < before + more and time.monotonic() < since + 20:
                    time.sleep(0.01)
                if more:
                    per_report = (time.monotonic() - since) / more
            time.sleep(draw.uniform(0, 2 * per_report))
            north.kill()
            words = north.said().strip().splitlines() or ["nothing"]
            print(f"\nkill {number + 1}: {left(log)} reports have left; it said last: {words[-1]}")
        assert server.process.exitcode is None, "the federation was over before the last kill: there were too few rounds"
        for process in [made.site("north"), *others, server]:
            assert process.finish(200) == 0, process.said()
        check_same(made, rehearsed(made, nobody))
        reports = lines(log)
        assert {line["round"] for line in reports} == set(range(ROUNDS + 1))
        assert len({(line["round"], line["sha256"], line["instruction"]) for line in reports}) == ROUNDS + 1  # a repeated one is the same
        print(f"{len(reports)} reports left, {len(reports) - ROUNDS - 1} of them for the second time; all else is as in the rehearsal")


def left(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0
