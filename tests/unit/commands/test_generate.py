"""Generators that `fedloom pretrain` made, in use: their files, `fedloom generate`, federations; refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.core.seeds import rng
from fedloom.data.readers import DataSettings, read
from fedloom.files import read_arrays
from fedloom.generator import files as shelf
from fedloom.generator import pretrain as module
from fedloom.generator.features import ResNet18
from fedloom.generator.files import load_generator
from fedloom.generator.generator import STRENGTH, AnyGenerator
from support.checks import Fedloom, check_refused, flip_last_byte
from support.generator import CPU, tiny_space
from support.pretrain import Told, pretrain


# -- in use -------------------------------------------------------------------------------------
def test_a_file_holds_the_generator_that_was_trained(made: tuple[Path, AnyGenerator, Told]) -> None:
    """Its own image features too, which are not those that come with Fedloom."""
    place, generator, _ = made
    again = load_generator(tiny_space("mobilenetv3"), str(place / "generator.safetensors"), "", CPU)
    pool = read(DataSettings(name="digits")).train
    tasks = [one.task(torch.from_numpy(pool.images), torch.from_numpy(pool.labels)) for one in (generator, again)]
    assert tasks[0] is not None and tasks[1] is not None and torch.equal(tasks[0], tasks[1])
    assert again.strength == generator.strength
    draws = [one.draw(20, rng(0), task) for one, task in zip((generator, again), tasks, strict=True)]
    assert draws[0] == draws[1]


def test_features_must_be_those_it_was_trained_with(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    file = str(shutil.copy(folder / "generator.safetensors", elsewhere))
    space, own = tiny_space("mobilenetv3"), str(folder / "features.safetensors")
    with pytest.raises(InvalidConfig, match="neither lie beside it nor come with Fedloom"):
        load_generator(space, file, "", CPU)
    assert load_generator(space, file, own, CPU).guided
    with pytest.raises(InvalidConfig, match="was trained with other image features than those of"):
        load_generator(space, file, str(shelf.shipped("features")), CPU)
    torch.save(ResNet18().state_dict(), tmp_path / "resnet18.pth")
    with pytest.raises(InvalidConfig, match=r"was trained with image features of small, but .*resnet18.pth holds resnet18"):
        load_generator(space, file, str(tmp_path / "resnet18.pth"), CPU)


def ids(out: str) -> list[str]:
    return [line for line in out.splitlines() if line]


def test_generate(fedloom_: Fedloom, folder: Path) -> None:
    file = ("--file", folder / "generator.safetensors")
    space = tiny_space("mobilenetv3")
    drawn = ids(fedloom_("generate", "mobilenetv3", *file, "--count", 7).out)
    assert len(drawn) == 7
    for text in drawn:
        space.check(Architecture.parse(text))
    assert ids(fedloom_("generate", "mobilenetv3", *file, "--count", 7).out) == drawn
    assert ids(fedloom_("generate", "mobilenetv3", *file, "--count", 7, "--seed", 1).out) != drawn
    assert len(ids(fedloom_("generate", "mobilenetv3", "mobilenetv3.width=0.5", "--count", 2).out)) == 2  # the shipped one
    sampled = ids(fedloom_("generate", "mobilenetv3", *file, "--count", 7, "--sampler", "dpm_sde", "--steps", 3).out)
    assert len(sampled) == 7 and sampled != drawn


def test_generate_for_data(fedloom_: Fedloom, folder: Path) -> None:
    call = ("generate", "mobilenetv3", "--file", folder / "generator.safetensors", "--count", 4, "--json")
    free, weak, strong = (
        json.loads(fedloom_(*call, *more).out) for more in ((), ("--data", "digits"), ("--data", "digits", "--strength", 500))
    )
    assert free["data"] is None and free["strength"] is None and free["space"] == "mobilenetv3" and len(free["architectures"]) == 4
    assert weak["data"] == "digits" and weak["strength"] == STRENGTH and strong["strength"] == 500
    assert strong["architectures"] != free["architectures"]
    none = json.loads(fedloom_(*call, "--data", "digits", "--strength", 0).out)
    assert none["architectures"] == free["architectures"]


@pytest.mark.parametrize("kind", ["guided", "unguided"])
def test_a_federation_uses_it(fedloom_: Fedloom, folder: Path, tiny_file: Path, kind: str) -> None:
    if kind == "unguided":
        shutil.rmtree(folder)
        pretrain(folder, "guided=false")
    options = ("perfedsde.generator=diffusion", f"perfedsde.generator_file={folder}/generator.safetensors", "run.folder=run", "rounds=1")
    outcome = fedloom_("run", tiny_file, *options)
    assert outcome.code == 0, outcome.err
    notes = [json.loads(line)["notes"] for line in Path("run/ledger.jsonl").read_text().splitlines()]
    guided = [note["guided"] for note in notes if "guided" in note]
    assert guided and set(guided) == {1.0 if kind == "guided" else 0.0}


# -- refusals -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["darst"], InvalidConfig, ("Did you mean 'darts'?",)),
        (["mobilenetv3", "widht=1"], InvalidConfig, ("'widht=1' is not a setting of mobilenetv3",)),
        (["mobilenetv3", "darts.operations=s2"], InvalidConfig, ("not a setting of mobilenetv3",)),
        (["mobilenetv3", "mobilenetv3.widht=1"], InvalidConfig, ("Did you mean 'width'?",)),
        (["mobilenetv3", "--file", "missing.safetensors"], InvalidConfig, ("no generator file missing.safetensors", "fedloom pretrain")),
        (["mobilenetv3", "--data", "digits", "--features", "missing.pth"], InvalidData, ("missing.pth cannot be read",)),
        (["mobilenetv3", "--features", "missing.pth"], InvalidConfig, ("--features needs images that guide", "--data")),
        (["mobilenetv3", "--strength", "2"], InvalidConfig, ("--strength needs images that guide", "--data")),
        (["mobilenetv3", "--data", "digits", "--strength", "nan"], InvalidConfig, ("--strength nan is not between 0 and 10000",)),
        (["mobilenetv3", "--data", "digits", "--strength", "1e39"], InvalidConfig, ("--strength 1e+39 is not between",)),
        (["mobilenetv3", "--data", "nowhere"], InvalidData, ("nowhere",)),
        (["mobilenetv3", "--data", "sites"], InvalidData, ("sites is neither a folder of class folders nor a data set",)),
        (["mobilenetv3", "--data", "cifar10"], InvalidData, ("cifar10 is not at data/cifar-10-batches-py",)),
        (["mobilenetv3", "--sampler", "dmp"], InvalidConfig, ("no sampler named 'dmp'", "Did you mean 'dpm'?")),
    ],
)
def test_generate_refuses(fedloom_: Fedloom, arguments: list[str], kind: Any, words: tuple[str, ...]) -> None:
    check_refused(fedloom_("generate", *arguments), kind, *words)


def test_generate_refuses_other_spaces_and_variants(fedloom_: Fedloom, unguided_darts: Path, folder: Path) -> None:
    assert fedloom_("generate", "darts", "--file", unguided_darts).code == 0
    variant = fedloom_("generate", "darts", "darts.operations=s2", "--file", unguided_darts)
    check_refused(
        variant, InvalidConfig, unguided_darts, "but this darts has other genes, choices or another order", "fedloom pretrain darts"
    )
    other = fedloom_("generate", "darts", "--file", folder / "generator.safetensors")
    check_refused(other, InvalidConfig, "is a generator for mobilenetv3 with 45 genes", "but this darts has other genes")


def test_data_cannot_guide_without_a_predictor(fedloom_: Fedloom, unguided_darts: Path) -> None:
    outcome = fedloom_("generate", "darts", "--file", unguided_darts, "--data", "digits")
    check_refused(outcome, InvalidConfig, "has no predictor, so data cannot guide it", "--data")


def test_a_space_without_a_shipped_generator(fedloom_: Fedloom, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shelf, "shipped", lambda name: tmp_path / f"{name}.safetensors")
    check_refused(fedloom_("generate", "darts"), InvalidConfig, "No generator for darts comes with Fedloom", "fedloom pretrain darts")


def test_generate_refuses_files_that_are_no_generators(fedloom_: Fedloom, folder: Path) -> None:
    file = folder / "generator.safetensors"
    whole = file.read_bytes()

    def refused(*words: str) -> None:
        check_refused(fedloom_("generate", "mobilenetv3", "--file", file), InvalidData, file, *words)

    flip_last_byte(file)
    refused("damaged")
    file.write_bytes(whole[:1000])
    refused("damaged")
    file.write_text("hello")
    refused("damaged")
    shutil.copy(folder / "features.safetensors", file)
    refused("is fedloom.features/1, not fedloom.generator/1")
    shutil.copy(folder / "denoiser.safetensors", file)
    refused("not fedloom.generator/1")


def test_a_description_that_does_not_fit_is_refused(folder: Path) -> None:
    """Whole by its digest, but written by something else."""
    file = folder / "generator.safetensors"
    arrays, facts = read_arrays(file)
    space = tiny_space("mobilenetv3")

    def refused(arrays: dict[str, Any], facts: dict[str, Any]) -> None:
        module.write_arrays(file, arrays, facts)
        with pytest.raises(InvalidData, match=r"generator.safetensors (does not fit its own description|holds a generator named)"):
            load_generator(space, str(file), "", CPU)

    refused(arrays, {**facts, "settings": {}})
    refused(arrays, {**facts, "settings": {**facts["settings"], "denoiser": {**facts["settings"]["denoiser"], "width": 16}}})
    refused(arrays, {**facts, "settings": {**facts["settings"], "denoiser": {"depth": 3}}})
    refused({name: array for name, array in arrays.items() if not name.startswith("predictor.")}, facts)
    refused(arrays, {**facts, "model": "other"})
    refused(arrays, {**facts, "strength": "much"})


def test_data_that_is_neither_a_folder_nor_a_data_set(fedloom_: Fedloom) -> None:
    check_refused(fedloom_("generate", "mobilenetv3", "--data", "nowhere"), InvalidData, "--data nowhere", "cifar10")
