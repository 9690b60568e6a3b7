"""Rounds with `privacy.secure`: the same average as without it, within quantisation, and nothing of what only a few clients trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedloom.assemble import new_run, resume_run
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import Arrays
from fedloom.core.privacy import COVERAGE, UPDATE, PrivacySettings
from fedloom.engine.run import Watcher
from fedloom.engine.sums import Sums
from fedloom.files import read_arrays
from fedloom.testing import Played
from support.federation import lines

Tiny = Callable[..., Settings]
FOUR = ("clients=4", "participants=4")


def weights(folder: Path) -> Arrays:
    arrays, _ = read_arrays(folder / "state" / "server.safetensors")
    return {name: array for name, array in arrays.items() if name.startswith("weights/")}


def both(tiny: Tiny, nobody: Watcher, place: Path, *overrides: str) -> tuple[Arrays, Arrays]:
    """The server's weights after the last round, without and with secure sums."""
    for name, more in (("plain", []), ("secure", ["privacy.secure=true"])):
        new_run(tiny(*FOUR, *overrides, *more), place / name, nobody)
    return weights(place / "plain"), weights(place / "secure")


def farthest(one: Arrays, other: Arrays) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize(
    "method", ["fedavg", pytest.param("fedrep", marks=pytest.mark.slow), pytest.param("spider", marks=pytest.mark.slow)]
)
def test_secure_and_plain_runs_give_the_same_average(method: str, tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    """Weighted by examples, which the plain run does too. Half a step of fixed point, once a round, and float32's own rounding."""
    plain, secure = both(tiny, nobody, tmp_path, f"method={method}", "privacy.examples=100", "rounds=1")
    step = Sums(PrivacySettings(secure=True), 4, parts=False).fixed.step
    largest = max(float(np.abs(array).max()) for array in plain.values())
    assert 0 < farthest(plain, secure) <= 100 / 8 * step / 2 + largest * 2**-23  # clients have 8 images, and the bound is 100


def test_what_enough_clients_trained_is_averaged_and_the_rest_stays(tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    settings = ("method=perfedsde", "perfedsde.averaging=coverage_equal", "perfedsde.generator=random", "rounds=1")
    plain, secure = both(tiny, nobody, tmp_path, *settings, "privacy.least=3")
    played = Played(tiny(*FOUR, *settings))
    before = {f"weights/{name}": array for name, array in played.state.weights.items()}
    counts: dict[str, np.ndarray] = {}
    for answer in played.round():
        for name, array in answer.report.arrays[COVERAGE].items():
            counts[f"weights/{name}"] = counts.get(f"weights/{name}", 0) + np.broadcast_to(array > 0, before[f"weights/{name}"].shape)
    few = {name: count < 3 for name, count in counts.items()}
    assert any(own.any() for own in few.values()) and any((~own).any() for own in few.values())
    hidden = 0
    for name, own in few.items():
        assert np.array_equal(secure[name][own], before[name][own]), "of what one or two trained nothing is seen"
        assert np.abs(secure[name] - plain[name])[~own].max(initial=0) <= 1e-6
        hidden += int((plain[name][own] != before[name][own]).sum())
    assert hidden, "or the plain run would not have moved them either"
    check_ledger(tmp_path / "secure", sum(array.size for array in before.values()))


def check_ledger(folder: Path, entries: int) -> None:
    """It says what leaves: a byte and four bytes an entry, whatever a client trained."""
    rounds = [line for line in lines(folder / "ledger.jsonl") if not line["final"]]
    assert rounds and all(line["upload_bytes"] == {COVERAGE: entries, UPDATE: 4 * entries} for line in rounds)
    assert all(line["bytes_up"] == 5 * entries and line["uploads"] == [COVERAGE, UPDATE] for line in rounds)


def test_a_run_that_was_stopped_goes_on_to_the_same_end(tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    class Crash(BaseException):
        pass

    def crash(round: int, entries: object) -> None:
        raise Crash

    settings = tiny(*FOUR, "method=fedavg", "privacy.secure=true")
    new_run(settings, tmp_path / "whole", nobody)
    stops = type("Stops", (), {**vars(nobody), "round_done": staticmethod(crash)})
    with pytest.raises(Crash):
        new_run(settings, tmp_path / "stopped", stops())
    resume_run(tmp_path / "stopped", nobody)
    assert farthest(weights(tmp_path / "whole"), weights(tmp_path / "stopped")) == 0


@pytest.mark.parametrize(
    "method", ["perfedrlnas", pytest.param("fedrlnas", marks=pytest.mark.slow), pytest.param("heterofl", marks=pytest.mark.slow)]
)
def test_updates_of_subnets_are_summed_in_their_places(method: str, tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    """With two clients that train an entry as the fewest it is the plain average wherever two or more did. What the server learns from
    besides, accuracies and times, it still reads."""
    plain, secure = both(tiny, nobody, tmp_path, f"method={method}", "privacy.least=2", "rounds=1")
    played = Played(tiny(*FOUR, f"method={method}", "rounds=1"))
    before, method_ = played.state, played.method
    counts: dict[str, np.ndarray] = {name: np.zeros(array.shape, int) for name, array in before.weights.items()}
    for instruction in method_.plan(before, played.federation.names):
        for name, region in played.tools.supernet.regions(Architecture.parse(str(instruction.facts["architecture"]))).items():
            counts[name][region] += 1
    assert any((count >= 2).any() for count in counts.values())
    assert any((count == 1).any() for count in counts.values()) or method == "heterofl"  # whose slices lie in each other
    for name, count in counts.items():
        one, other, start = plain[f"weights/{name}"], secure[f"weights/{name}"], before.weights[name]
        assert np.abs(one - other)[count >= 2].max(initial=0) <= 1e-6
        assert np.array_equal(other[count < 2], start[count < 2])
    facts = [set(line["uploads"]) for line in lines(tmp_path / "secure" / "ledger.jsonl") if not line["final"]]
    assert facts == [set(method_.uploads) - {"examples"} | {"coverage"}] * 4


def test_a_round_with_too_few_reports_moves_nothing(tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    played = Played(tiny(*FOUR, "method=fedavg"))
    reports = [answer.report for answer in played.round()]
    sums = Sums(PrivacySettings(secure=True, least=3), 4, parts=False)
    assert sums.without_masks(reports[:2]) == [] and len(sums.without_masks(reports[:3])) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["method=fedavg", "fedavg.averaging=median"],
            "fedavg.averaging=median compares or weighs single updates, and secure sums hide them",
        ),
        (["method=perfedsde", "perfedsde.averaging=clipped"], "Set perfedsde.averaging=coverage_equal, or privacy.secure=false"),
        (["method=perfedsde", "perfedsde.averaging=coverage_effort"], "compares or weighs single updates"),
        (["method=perfedsde", "perfedsde.averaging=fedavg"], "so that a sum could show what one client changed"),
        (["method=heterofl", "heterofl.averaging=fedavg"], "Set heterofl.averaging=coverage_equal, or privacy.secure=false"),
        (
            ["method=heterofl", "heterofl.averaging=fedavg", "privacy.noise=1", "privacy.clip=1"],
            "the server of heterofl computes something else",
        ),
        (["method=scaffold"], "The server of scaffold needs every client's own report, and secure sums hide them"),
        (["method=perfedrlnas", "perfedrlnas.averaging=median"], "Set perfedrlnas.averaging=coverage_equal, or privacy.secure=false"),
        (["method=hapfnas", "split.server=0.02"], "The server of hapfnas needs every client's own report"),
        (["method=perfedsde", "privacy.examples=10"], "known numbers of examples then say who it was"),
        (["method=fedavg", "privacy.examples=10", "privacy.noise=1", "privacy.clip=1"], "with privacy.noise all count the same"),
        (["method=fedavg", "privacy.least=5"], "participants is 4, and a sum needs 5 (privacy.least)"),
    ],
)
def test_what_sums_cannot_do_is_refused_in_one_sentence(
    overrides: list[str], words: str, tiny: Tiny, nobody: Watcher, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        new_run(tiny(*FOUR, "privacy.secure=true", *overrides), tmp_path / "run", nobody)
    assert words in str(refused.value) and not (tmp_path / "run").exists()
    assert "\n" not in str(refused.value)


def test_a_method_that_sends_nothing_has_nothing_to_hide(tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    new_run(tiny(*FOUR, "method=local", "privacy.secure=true"), tmp_path / "run", nobody)
