"""``fedloom pretrain … model=paper``: the papers' generator is trained, kept, loaded and drawn from like the fast one, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.assemble import pretraining
from fedloom.config import Settings
from fedloom.core.errors import InvalidConfig, InvalidData, UnusableFolder
from fedloom.core.seeds import rng
from fedloom.data.readers import DataSettings, read
from fedloom.files import read_arrays, write_arrays
from fedloom.generator.files import load_generator
from fedloom.generator.generator import AnyGenerator, Generator
from fedloom.generator.paper.generator import PaperGenerator
from fedloom.maths.samplers import SAMPLERS
from fedloom.spaces.base import SearchSpace
from fedloom.testing import Played
from support.checks import Fedloom, check_refused

TINY = """model=paper data.name=digits mobilenetv3.width=0.05 denoiser.architectures=200 features.epochs=1 features.batch=512
    proxy.image_size=8 proxy.reserved=20 proxy.tasks=6 proxy.held_out_tasks=3 proxy.task_sizes=[2,3] supernet.epochs=1 supernet.batch=512
    labels.architectures=16 labels.images=4 proxy.conditions=["plain","closer"] labels.calibration=16
    paper.layers=1 paper.width=16 paper.heads=2 paper.feed=16
    paper.graph_layers=1 paper.graph_width=16 paper.batch=32 paper.score_steps=5 paper.predictor_steps=5 paper.sampling_steps=3"""
CPU = torch.device("cpu")
STAGES = {"paper_score", "features", "supernet", "labels", "paper_predictor"}


def train(folder: Path, *changes: str) -> tuple[AnyGenerator, dict[str, str]]:
    """The generator, and the last remark of every stage."""
    remarks: dict[str, str] = {}
    plan = pretraining.plan("mobilenetv3", [*TINY.split(), *changes])
    return pretraining.pretrain(plan, folder, "cpu", lambda stage, done, total, remark: remarks.update({stage: remark})), remarks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("paper")
    train(place)
    return place


def loaded(folder: Path, sampler: str = "", steps: int = 0) -> AnyGenerator:
    return load_generator(space(), str(folder / "paper_generator.safetensors"), "", CPU, sampler, steps)


def space() -> SearchSpace:
    return pretraining.plan("mobilenetv3", TINY.split()).supernet(pretraining.ANY_IMAGE).space


def digits_task(generator: AnyGenerator) -> torch.Tensor:
    pool = read(DataSettings(name="digits")).train
    task = generator.task(torch.from_numpy(pool.images[:200]), torch.from_numpy(pool.labels[:200]))
    assert task is not None
    return task


def test_every_stage_leaves_a_file_and_is_not_repeated(folder: Path) -> None:
    assert (folder / "paper_card.json").is_file()
    assert {f"{stage}.safetensors" for stage in STAGES} == {p.name for p in folder.glob("*.safetensors")} - {"paper_generator.safetensors"}
    again, remarks = train(folder)
    assert {stage for stage, remark in remarks.items() if remark == "found"} == STAGES
    assert again.facts["card"]["model"] == "paper"
    _, remarks = train(folder, "paper.strength=7", "paper.sampling_steps=2")  # nothing that training depends on
    assert {stage for stage, remark in remarks.items() if remark == "found"} == STAGES
    train(folder)


@pytest.mark.parametrize(("change", "stage"), [("paper.layers=2", "paper_score"), ("paper.graph_layers=2", "paper_predictor")])
def test_a_stage_made_with_other_settings_is_refused(change: str, stage: str, folder: Path) -> None:
    with pytest.raises(UnusableFolder, match=f"{stage}.*{change.partition('=')[0].partition('.')[2]} differ"):
        train(folder, change)


def test_the_file_says_which_model_it_is_and_gives_the_same_generator(folder: Path) -> None:
    trained, _ = train(folder)
    back = loaded(folder)
    assert isinstance(back, PaperGenerator) and back.guided and back.facts["model"] == "paper"
    assert (back.sampler, back.steps, back.strength, back.device) == ("sde", 0, 1000.0, CPU)
    task = digits_task(back)
    assert torch.equal(task, digits_task(trained))
    for given in (None, task):
        assert back.draw(5, rng(0), given) == trained.draw(5, rng(0), given)


@pytest.mark.parametrize("sampler", ["", *SAMPLERS])
@pytest.mark.parametrize("model", [Generator, PaperGenerator])
def test_every_sampler_draws_valid_architectures_guided_and_unguided(sampler: str, model: type[AnyGenerator], folder: Path) -> None:
    generator = loaded(folder, sampler, 3) if model is PaperGenerator else load_generator(space(), "", "", CPU, sampler, 3)
    assert isinstance(generator, model) and generator.guided and generator.sampler == (sampler or model.sampler)
    assert len(generator.levels()) == 4
    task = digits_task(generator)
    for condition in (None, task):
        drawn = generator.draw(8, rng(1), condition)
        assert drawn == generator.draw(8, rng(1), condition) and len(set(drawn)) > 1
        for architecture in drawn:
            generator.tokens.space.check(architecture)
            assert generator.tokens.space.canonical(architecture.choices) == architecture
    assert generator.draw(8, rng(1), task, 0.0) == generator.draw(8, rng(1))  # no strength, no guidance
    assert generator.draw(8, rng(1), task, 10 * generator.strength) != generator.draw(8, rng(1))


def test_guidance_of_the_paper_follows_a_gain(folder: Path) -> None:
    """Towards choice 2 of the first gene, which a third of random architectures have."""
    generator = loaded(folder, steps=100)
    share = [np.mean(generator.draw_choices(100, rng(2), lambda x, sigma: x[:, 0, 2], k)[:, 0] == 2) for k in (-100.0, 0.0, 100.0)]
    assert share[0] < 0.05 < share[1] < 0.8 and share[2] > 0.95


def test_without_a_predictor_it_is_unguided(tmp_path: Path) -> None:
    train(tmp_path, "guided=false")
    generator = loaded(tmp_path)
    assert not generator.guided and generator.task(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(2)) is None
    assert len(generator.draw(3, rng(0))) == 3


def test_own_features_are_those_beside_the_generator(folder: Path, tmp_path: Path) -> None:
    lonely = tmp_path / "paper_generator.safetensors"
    lonely.write_bytes((folder / "paper_generator.safetensors").read_bytes())
    with pytest.raises(InvalidConfig, match="features that neither lie beside it nor come with Fedloom"):
        load_generator(space(), str(lonely), "", CPU)
    named = load_generator(space(), str(lonely), str(folder / "features.safetensors"), CPU)
    assert torch.equal(digits_task(named), digits_task(loaded(folder)))


def test_unknown_names_are_refused(folder: Path, tmp_path: Path, fedloom_: Fedloom, tiny: Callable[..., Settings]) -> None:
    check_refused(fedloom_("pretrain", "mobilenetv3", "model=papers"), InvalidConfig, "model must be one of fast, paper")
    check_refused(fedloom_("generate", "mobilenetv3", "--sampler", "dpmm"), InvalidConfig, "no sampler named 'dpmm'", "Did you mean 'dpm'")
    with pytest.raises(InvalidConfig, match="no sampler named 'euler'"):
        Played(tiny("perfedsde.sampler=euler"))
    arrays, facts = read_arrays(folder / "paper_generator.safetensors")
    write_arrays(tmp_path / "paper_generator.safetensors", arrays, {**facts, "model": "oracle"})
    with pytest.raises(InvalidData, match=r"generator named 'oracle', which this version does not know\. Known: fast, paper"):
        loaded(tmp_path)


@pytest.mark.parametrize("change", ["paper.heads=3", "paper.graph_width=15", "paper.sigma_min=0", "paper.sigma_max=0.1"])
def test_numbers_that_do_not_fit_together_are_refused(change: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=change.partition("=")[0]):
        train(tmp_path, "guided=false", change)


def test_generate_takes_sampler_and_steps(fedloom_: Fedloom) -> None:
    def drawn(*options: Any) -> str:
        outcome = fedloom_("generate", "mobilenetv3", "--count", 2, *options)
        assert outcome.code == 0
        return outcome.out

    assert drawn() == drawn("--sampler", "dpm", "--steps", 12) != drawn("--sampler", "sde", "--steps", 4)
    generator = replace(load_generator(space(), "", "", CPU), sampler="sde", steps=4)
    assert drawn("--sampler", "sde", "--steps", 4).split() == [a.id for a in generator.draw(2, rng(0, "generate"))]
