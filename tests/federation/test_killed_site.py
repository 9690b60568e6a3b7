"""A site that is killed again and again, at moments that nobody chose. What happened is printed (pytest -s)."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from fedloom.engine.run import Watcher
from support.federation import SITES, check_same, federation, lines, rehearsed

pytestmark = pytest.mark.xdist_group("flower")
KILLS, ROUNDS = 10, 24


@pytest.mark.network  # five minutes: after each kill Flower lets the site in again when two heartbeats of ten seconds are missing
@pytest.mark.timeout(600)
def test_ten_kills_change_no_bit(tmp_path: Path, nobody: Watcher) -> None:
    draw = random.Random(7)
    with federation(tmp_path, extra="[perfedsde]\niterations = 4") as made:
        made.file.write_text(made.file.read_text().replace("rounds = 3", f"rounds = {ROUNDS}"))
        server, others = made.serve(), [made.site(name) for name in SITES if name != "north"]
        for number in range(KILLS):
            north = made.site("north")
            if number % 5:  # or while it starts
                north.wait_for("north is connected to")
            time.sleep(draw.uniform(0, 2))
            north.kill()
            log = made.site_folder("north") / "left.jsonl"
            words = north.said().strip().splitlines() or ["nothing"]
            print(f"\nkill {number + 1}: it had said {words[-1]!r}; {len(lines(log)) if log.exists() else 0} reports had left")
        assert server.process.exitcode is None, "the federation was over before the last kill: there were too few rounds"
        for process in [made.site("north"), *others, server]:
            assert process.finish(200) == 0, process.said()
        check_same(made, rehearsed(made, nobody))
        left = lines(made.site_folder("north") / "left.jsonl")
        assert {line["round"] for line in left} == set(range(ROUNDS + 1))
        assert len({(line["round"], line["sha256"], line["instruction"]) for line in left}) == ROUNDS + 1  # a repeated report is the same
        print(f"{len(left)} reports left, {len(left) - ROUNDS - 1} of them for the second time; all else is as in the rehearsal")
