"""Secure sums between real processes end with what one process ends with, also when members are killed; with plain ones they agree.

pytest -m network tests/equivalence/test_flower_secure.py
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from fedloom.core.privacy import COVERAGE, UPDATE
from fedloom.engine.run import Watcher
from fedloom.federation.site.sums import STATE
from fedloom.federation.wire.sums import KEYS, MASKED, OPEN
from fedloom.files import read_arrays
from support.federation import SITES, Federation, check_same, end, federation, finished_rounds, lines, rehearsed, wait_until

pytestmark = [pytest.mark.xdist_group("flower"), pytest.mark.network]
SECURE = "[privacy]\nsecure = true\n"
FIVE = (*SITES, "south", "centre")


def sums_of(made: Federation, name: str, round: int) -> list[str]:
    """What a site has sent in a round, by the names of the fields."""
    log = made.site_folder(name) / "left.jsonl"
    return [next(iter(line["fields"]), "") for line in (lines(log) if log.exists() else []) if line["round"] == round]


@pytest.mark.parametrize("method", ["perfedsde", "fedavg", "spider", "perfedrlnas"])
def test_processes_give_what_a_rehearsal_gives(method: str, tmp_path: Path, nobody: Watcher) -> None:
    with federation(tmp_path, method, extra=SECURE) as made:
        end([made.serve(), *map(made.site, SITES)])
        check_same(made, rehearsed(made, nobody))
        first, counted = "accuracy" if method == "perfedrlnas" else "", method in ("perfedsde", "perfedrlnas")
        fields = [first, "card", "shares", *([COVERAGE, "opened"] if counted else []), UPDATE, "opened"]
        for name in SITES:
            assert [sums_of(made, name, round) for round in range(3)] == [fields] * 3
            text = (made.site_folder(name) / "statement.txt").read_text()
            assert "masked; the server can read the sum over sites only" in text
            assert (made.site_folder(name) / STATE).stat().st_mode & 0o077 == 0
        entries = [line for line in lines(made.folder / "server-run" / "ledger.jsonl") if not line["final"]]
        assert len(entries) == 9 and all(UPDATE in line["uploads"] and "examples" not in line["uploads"] for line in entries)


def test_secure_and_plain_federations_agree_within_quantisation(tmp_path: Path, nobody: Watcher) -> None:
    """Weights by examples are those of the plain one; after three rounds of training roundings have grown."""
    ends = {}
    for name, extra in (("plain", ""), ("secure", SECURE + "examples = 100\n")):
        folder = tmp_path / name
        folder.mkdir()
        with federation(folder, "fedavg", extra=extra) as made:
            end([made.serve(), *map(made.site, SITES)])
            arrays, _ = read_arrays(folder / "server-run/state/server.safetensors")
            accuracies = [json.loads((made.site_folder(site) / "result.json").read_text())["test_accuracy"] for site in SITES]
            ends[name] = arrays, accuracies
    (plain, before), (secure, after) = ends["plain"], ends["secure"]
    assert max(float(np.abs(plain[name] - secure[name]).max()) for name in plain) < 1e-4
    assert np.abs(np.array(before) - after).max() <= 0.1  # one of ten test images


@pytest.mark.parametrize("moment", ["card", COVERAGE, UPDATE])
def test_a_killed_server_goes_on_to_the_same_end(moment: str, tmp_path: Path, nobody: Watcher) -> None:
    with federation(tmp_path, extra=SECURE) as made:
        server, sites = made.serve(), [made.site(name) for name in SITES]
        wait_until(lambda: moment in sums_of(made, "north", 1), f"north sends its {moment} in round 2")
        server.kill()
        again = made.serve()
        end([*sites, again])
        assert finished_rounds(made) == 3
        check_same(made, rehearsed(made, nobody))


def test_a_site_that_is_killed_in_a_sum_comes_back_to_it(tmp_path: Path, nobody: Watcher) -> None:
    with federation(tmp_path, extra=SECURE) as made:
        server, sites = made.serve(), {name: made.site(name) for name in SITES}
        wait_until(lambda: COVERAGE in sums_of(made, "west", 1), "west sends its counts in round 2")
        sites["west"].kill()
        end([made.site("west"), sites["north"], sites["east"], server])
        check_same(made, rehearsed(made, nobody))


@pytest.mark.parametrize("action", [KEYS, MASKED, OPEN])
def test_one_of_five_is_killed_for_good(action: str, tmp_path: Path) -> None:
    """The rounds end, with four; nothing of the fifth is ever opened that it did not send to the end."""
    with federation(tmp_path, round="minimum = 4\npatience = 2", extra=SECURE, sites=FIVE) as made:
        server, sites = made.serve(), {name: made.site(name) for name in FIVE}

        def sent() -> bool:
            log = made.site_folder("centre") / "left.jsonl"
            return log.exists() and any(line["action"] == action and line["round"] == 1 for line in lines(log))

        wait_until(sent, f"centre answers {action}")
        os.kill(sites["centre"].process.pid, signal.SIGKILL)
        wait_until(lambda: finished_rounds(made) == 3, "all rounds end", 120)
        assert "ends without an average" not in server.said()
        for name in FIVE[:-1]:
            assert sites[name].finish() == 0
