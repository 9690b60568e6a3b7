"""The attacks of docs/explain/privacy.md: the table is what the record says, and their parts do what they say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attack_archive
import attacks
import numpy as np
import pytest
import torch

from fedloom.assemble.builder import build
from fedloom.config import Settings
from fedloom.core.messages import Instruction, Report
from fedloom.core.privacy import PrivacySettings
from fedloom.data.readers import read
from fedloom.engine.sums import Sums

ROOT = Path(__file__).parents[3]
RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "attacks.json").read_text())


def test_the_page_has_the_table_of_the_record() -> None:
    page = (ROOT / "docs" / "explain" / "privacy.md").read_text()
    assert attacks.table(RECORD) in page, "print it with benchmarks/attacks.py --table benchmarks/results/attacks.json"
    epsilon = RECORD["privacy"]["epsilon"]
    assert f"epsilon {epsilon['others']:.0f} against others and {epsilon['server']:.0f} against a server" in " ".join(page.split())
    plain, noise = (100 * np.mean(RECORD["accuracy"][name]) for name in ("plain", "noise"))
    assert f"falls from {plain:.0f} % to {noise:.0f} %" in " ".join(page.split())


@pytest.mark.parametrize(
    ("attack", "open_", "hidden"),
    [
        ("population", ["plain"], ["a secret of the client's"]),
        (
            "archive",
            ["plain"],
            ["sums", "sums, all rounds", "sums, least 3", "sums, least 3, all rounds", "noise", "noise, sums"],
        ),
        ("labels", ["plain", "sums, all rounds"], ["sums", "noise", "noise, sums", "noise, sums, all rounds"]),
        ("member", ["plain"], ["sums", "noise", "noise, sums"]),
    ],
)
def test_what_the_page_claims_holds_in_the_record(attack: str, open_: list[str], hidden: list[str]) -> None:
    found = RECORD["attacks"][attack]
    assert all(found[protection]["low"] > 0 for protection in open_)
    assert all(found[protection]["low"] <= 0 for protection in hidden)  # not above chance


def visit(client: str, number: int, update: list[float], coverage: list[bool]) -> attacks.Visit:
    arrays = {"update": {"w": np.array(update, np.float32)}, "coverage": {"w": np.array(coverage)}}
    return attacks.Visit(client, number, Instruction(client, number, "train", 0), Report(client, number, arrays, {"examples": 7}))


def test_sums_are_those_that_secure_sums_give_the_server() -> None:
    visits = [visit("a", 0, [1, 2, 0], [True, True, False]), visit("b", 0, [3, 0, 0], [True, False, False])]
    visits += [visit("c", 0, [5, 6, 9], [True, True, True])]
    updates, counts = attacks.summed(visits, least=2)
    assert counts is not None and counts["w"].tolist() == [3, 2, 0] and updates["w"].tolist() == [9, 8, 0]
    sums = Sums(PrivacySettings(secure=True, least=2, range=16.0), 3, parts=True)
    (mean,) = sums.without_masks([visit.report for visit in visits])
    np.testing.assert_allclose(mean.arrays["update"]["w"] * np.maximum(counts["w"], 1), updates["w"], atol=1e-5)
    everything, _ = attacks.summed(visits)
    assert everything["w"].tolist() == [9, 8, 9]


def test_sums_of_many_rounds_can_be_solved_for_each_client() -> None:
    own = {"a": 1.0, "b": 10.0, "c": 100.0}
    rounds = ["ab", "bc", "ac", "ab", "bc", "ac"] * 5
    visits = [visit(client, number, [own[client]] * 3, [True] * 3) for number, clients in enumerate(rounds) for client in clients]
    found = attacks.solved(visits, lambda some: attacks.summed(some)[0]["w"])
    assert {client: value[0] for client, value in found.items()} == pytest.approx(own, rel=0.05, abs=0.3)


def test_guesses_are_compared_with_others_of_the_round_and_with_those_outside() -> None:
    visits = [visit(client, number, [0.0], [True]) for number, clients in enumerate(["abc", "bcd"]) for client in clients]
    made = attacks.Run(None, None, None, visits, [], 0.0, {})  # type: ignore[arg-type]
    guesses = {(0, "a"): np.array(0)}
    values = {"a": 1.0, "b": 0.4, "c": 0.2, "d": 0.1}
    (row,) = attacks.compared(made, guesses, lambda guess, about: values[about.client])
    assert row == pytest.approx({"success": 1.0, "chance": 0.3, "outside": 0.1})


def test_a_server_reads_an_archive_from_the_entries_that_were_trained(
    tiny: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attack_archive, "POOL", 60)
    monkeypatch.setattr(attack_archive, "ARCHIVES", 120)
    settings = tiny("method=perfedsde")
    method: Any = build(settings, read(settings.data), torch.device("cpu")).method
    draw = np.random.default_rng(0)
    reader = attack_archive.ArchiveReader.of(method, draw, 3)
    own, other = ([], [])  # type: tuple[list[float], list[float]]
    archives = [Counter(method.tools.space.sample(draw) for _ in range(4)) for _ in range(6)]
    for number, archive in enumerate(archives):
        coverage = {name: count.numpy() > 0 for name, count in method.tools.supernet.coverage(archive).items()}
        zeros = {name: np.zeros(shape, np.float32) for name, shape in method.tools.supernet.shapes.items()}
        guess = reader.guess(reader.trained(Report("a", 0, {"update": zeros, "coverage": coverage}), 0.0))
        own.append(reader.score(guess, archive))
        other.append(reader.score(guess, archives[number - 1]))
    assert np.mean(own) > 0.7 and np.mean(own) > np.mean(other) + 0.1


def test_noise_is_told_from_training_by_its_energy() -> None:
    reader = attack_archive.ArchiveReader(["w"], np.repeat([0, 1], 500), np.array([500, 500]), [], None, np.array([]), [], [])
    noise = np.random.default_rng(0).normal(size=1000)
    trained = np.concatenate([np.zeros(500), np.full(500, 1.5)])
    assert reader.energy({"w": 0.1 * (noise + trained)}, 0.1).tolist() == [False, True]
    assert reader.energy({"w": 0.1 * (noise + 0.01 * trained)}, 0.1).tolist() == [False, False]
