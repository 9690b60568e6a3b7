"""The eight rows of the paper's ablation (Tables 5 and C), each a preset: they mean what they say, and differ where they should."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.assemble import new_run
from fedloom.config import load, presets
from fedloom.engine.run import Watcher
from fedloom.generator.files import load_generator
from fedloom.spaces.base import SPACES, ImageShape
from fedloom.supernets.base import make_supernet
from fedloom.testing import Played
from support.perfedsde import overheard
from support.untrained import fake_generator

DIFFUSION, EVOLUTION = ("diffusion", "rbf"), ("evolution", "none")
ROWS = {  # (generator, surrogate), archive, averaging
    "ablation-full": (DIFFUSION, True, "coverage"),
    "ablation-no-averaging": (DIFFUSION, True, "fedavg"),
    "ablation-no-archive": (DIFFUSION, False, "coverage"),
    "ablation-no-diffusion": (EVOLUTION, True, "coverage"),
    "ablation-no-archive-diffusion": (EVOLUTION, False, "coverage"),
    "ablation-no-archive-averaging": (DIFFUSION, False, "fedavg"),
    "ablation-no-averaging-diffusion": (EVOLUTION, True, "fedavg"),
    "ablation-none": (EVOLUTION, False, "fedavg"),
}


def small(tiny_file: Path) -> list[str]:
    """The tiny federation as overrides, so that only what makes a row stays of its preset."""
    table = tomllib.loads(tiny_file.read_text())
    changes = [f"{key}={value}" for key, value in table.items() if not isinstance(value, dict)]
    inner = [
        (f"{name}.{key}", value) for name, own in table.items() if isinstance(own, dict) and name != "when" for key, value in own.items()
    ]
    return [*changes, *(f"{key}={str(value).lower()}" for key, value in inner), "clients=2", "perfedsde.iterations=2"]


@dataclass
class Result:
    """One round of a row."""

    population: list[str]  # the first client's first
    updates: list[bytes]
    fields: set[str]
    kept: list[bytes]
    notes: set[str]
    weights: bytes


@pytest.fixture(scope="module")
def results(tiny_file: Path) -> dict[str, Result]:
    found = {}
    with fake_generator():
        for name in [*ROWS, "cifar10-paper"]:
            played = Played(load(name, small(tiny_file)))
            with overheard(played.method) as secrets:
                answers = played.round()
            arrays = [[array.tobytes() for array in answer.report.arrays["update"].values()] for answer in answers]
            found[name] = Result(
                population=[one.architecture.id for one in secrets.scored[0]],
                updates=[b"".join(own) for own in arrays],
                fields={*answers[0].report.arrays, *answers[0].report.facts},
                kept=[answer.memory.arrays["population"].tobytes() for answer in answers],
                notes=set(answers[0].diary.notes),
                weights=b"".join(array.tobytes() for array in played.state.weights.values()),
            )
    return found


def test_there_are_these_rows() -> None:
    assert {name for name in presets() if name.startswith("ablation-")} == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_differs_from_the_paper_in_what_it_leaves_out(name: str) -> None:
    row, paper = load(name), load("cifar10-paper")
    (generator, surrogate), archive, averaging = ROWS[name]
    own = replace(paper.components["perfedsde"], generator=generator, surrogate=surrogate, archive=archive, averaging=averaging)
    assert row == replace(paper, components={**paper.components, "perfedsde": own})


@pytest.mark.parametrize(("name", "data", "alpha"), [("cifar10-paper", "cifar10", 0.3), ("cifar100-paper", "cifar100", 0.1)])
def test_the_papers_setting(name: str, data: str, alpha: float) -> None:
    settings, control = load(name), load("cifar10-control")
    own: Any = settings.components["perfedsde"]
    assert (settings.method, settings.space, settings.data.name) == ("perfedsde", "mobilenetv3", data)
    assert (settings.clients, settings.participants, settings.rounds) == (100, 5, 1500)
    assert (settings.split.rule, settings.split.alpha) == ("plato", alpha)
    assert (own.iterations, own.candidates, own.offspring, own.archive_size, own.population) == (5, 100, 10, 10, 0)
    assert settings.training == control.training and settings.components["mobilenetv3"] == control.components["mobilenetv3"]


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
@pytest.mark.parametrize(("name", "population"), [("darts", 3 * 28), ("nasvit", 3 * 23)])
def test_the_papers_setting_in_other_spaces(data: str, name: str, population: int) -> None:
    """The same but for the space, and the training that the control of that space has; a population is three times the genes that have
    a choice."""
    settings, paper = load(f"{data}-paper-{name}"), load(f"{data}-paper")
    own: Any = settings.components["perfedsde"]
    search = replace(paper.components["perfedsde"], population=own.population)
    training = load(f"{data}-control-{name}").training
    assert settings == replace(paper, space=name, training=training, components={**paper.components, "perfedsde": search})
    assert training != paper.training
    space = SPACES[name].make(settings.components[name], ImageShape(3, 32, 10))
    assert (own.population or 3 * len(space.genes)) == 3 * sum(len(gene.values) > 1 for gene in space.genes) == population
    assert settings.components[name] == type(settings.components[name])()  # at 32 pixels, as the defaults are


@pytest.mark.parametrize("preset", ["cifar10-paper", "cifar100-paper"])
@pytest.mark.parametrize("name", ["mobilenetv3", "darts", "nasvit"])
def test_the_papers_setting_takes_any_space(preset: str, name: str) -> None:
    """`space=…` is the twin with that space's name, but for its training and NASViT's population; the shipped generator of each is
    guided."""
    settings = load(preset, [f"space={name}"])
    twin = settings if name == "mobilenetv3" else load(f"{preset}-{name}", ["perfedsde.population=0"])
    assert settings.space == name and settings == replace(twin, training=settings.training)
    space = make_supernet(name, settings.components[name], ImageShape(3, 32, 100 if "100" in preset else 10)).space
    assert load_generator(space, "", "", torch.device("cpu")).guided


# -- what they do ------------------------------------------------------------------------


def pairs(part: int) -> Iterator[tuple[str, str]]:
    """Rows that differ in this part and in no other."""
    for one, other in combinations(ROWS, 2):
        if [index for index in range(3) if ROWS[one][index] != ROWS[other][index]] == [part]:
            yield one, other


def test_nothing_differs_before_the_first_difference(results: dict[str, Result]) -> None:
    """The same clients begin with the same random populations; the full row is the paper's preset."""
    assert len({tuple(result.population) for result in results.values()}) == 1
    assert results["ablation-full"] == results["cifar10-paper"]


def test_averaging_changes_the_server_and_no_client(results: dict[str, Result]) -> None:
    found = list(pairs(2))
    assert len(found) == 4
    for one, other in found:
        assert (results[one].updates, results[one].kept) == (results[other].updates, results[other].kept)
        assert results[one].weights != results[other].weights


@pytest.mark.parametrize("part", [0, 1], ids=["diffusion", "archive"])
def test_diffusion_and_archive_change_what_clients_train_and_keep(results: dict[str, Result], part: int) -> None:
    found = list(pairs(part))
    assert len(found) == 4
    for one, other in found:
        assert all(own != others for own, others in zip(results[one].updates, results[other].updates, strict=True))
        assert results[one].kept != results[other].kept


def test_all_eight_differ(results: dict[str, Result]) -> None:
    assert len({results[name].weights for name in ROWS}) == 8


def test_fields_and_notes_follow_the_row(results: dict[str, Result]) -> None:
    for name, (source, _, averaging) in ROWS.items():
        assert results[name].fields == {"update", "examples"} | ({"coverage"} if averaging == "coverage" else set())
        assert ("guided" in results[name].notes) == (source == DIFFUSION)
        assert "unique_share" in results[name].notes and (source == DIFFUSION or "rbf_rank_correlation" not in results[name].notes)


@pytest.mark.parametrize("name", ["ablation-full", "ablation-none"])  # all eight played a round above
def test_a_row_runs_from_start_to_end(name: str, tiny_file: Path, nobody: Watcher, tmp_path: Path) -> None:
    with fake_generator():
        result = new_run(load(name, [*small(tiny_file), "rounds=1", "clients=2", "perfedsde.iterations=1"]), tmp_path / "run", nobody)
    assert result.finished and len(result.clients) == 2
