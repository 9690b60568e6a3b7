"""Generation: unguided it draws as the space does, guided it tilts that by a gain, and the shipped one does both."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.seeds import rng
from fedloom.files import read_arrays
from fedloom.generator import generator as module
from fedloom.generator.denoiser import SIGMA_MAX, SIGMA_MIN
from fedloom.generator.features import FeatureExtractor, SmallFeatures
from fedloom.generator.files import load_generator, shipped
from fedloom.generator.generator import FAINT, Generator, noise_levels
from fedloom.generator.predictor import TASK, Predictor, PredictorSettings
from fedloom.generator.quality import marginals, sampler_quality
from fedloom.generator.tokens import Tokens
from fedloom.maths.samplers import SAMPLERS
from support.generator import CPU, Toy, assert_same_states, global_states, tiny_space, tiny_spaces, untrained

SPACES = dict(tiny_spaces())
SHIPPED = ("mobilenetv3", "darts", "nasvit")


def unguided(name: str, **changes: str) -> Generator:
    tokens = Tokens(tiny_space(name, **changes))
    return Generator(tokens, untrained(tokens))


def guided(name: str) -> Generator:
    """A predictor and features that nobody trained."""
    generator = unguided(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        predictor = Predictor(generator.tokens, SmallFeatures.size, PredictorSettings(width=8)).eval().requires_grad_(False)
        predictor.slopes.weight.normal_(std=0.1)  # untrained ones say nothing of tasks
        features = FeatureExtractor(SmallFeatures().eval().requires_grad_(False))
    return replace(generator, predictor=predictor, extractor=features)


@pytest.fixture(scope="module")
def ours() -> Generator:
    """The one that comes with Fedloom."""
    return load_generator(tiny_space("mobilenetv3"), "", "", CPU)


def images(count: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(rng("images", seed).integers(0, 256, (count, 1, 8, 8), dtype=np.uint8))


# -- levels and samplers --------------------------------------------------------------------
def test_levels_of_the_samplers() -> None:
    fast, paper = noise_levels("dpm"), noise_levels("sde")
    assert len(fast) == 13 and fast[0] == pytest.approx(SIGMA_MAX) and fast[-2] == pytest.approx(SIGMA_MIN) and fast[-1] == 0
    assert len(paper) == 1001 and paper[0] == pytest.approx(SIGMA_MAX) and paper[-1] == pytest.approx(SIGMA_MIN, rel=1e-3)
    assert noise_levels("dpm_sde", 5) == noise_levels("dpm", 5) and len(noise_levels("pc", 5)) == 6


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_draws_valid_architectures(sampler: str) -> None:
    generator = replace(unguided("mobilenetv3"), sampler=sampler, steps=4)
    drawn = generator.draw(20, rng(0))
    for architecture in drawn:
        generator.tokens.space.check(architecture)
    assert len(drawn) == 20 and len(set(drawn)) == 20


@pytest.mark.parametrize("name", [name for name, space in SPACES.items() if not Tokens(space).may_be_absent.any()])
def test_spaces_of_independent_genes_get_their_own_shares(name: str) -> None:
    """There the untrained network is exact. 300 samples: a share of 1/2 has a standard deviation of 0.03."""
    tokens = Tokens(SPACES[name])
    choices = Generator(tokens, untrained(tokens)).draw_choices(300, rng("shares"))
    expected = tokens.space.sample_many(rng("expected"), 20_000)
    assert np.abs(marginals(tokens, choices) - marginals(tokens, expected)).max() < 0.13


# -- guidance ---------------------------------------------------------------------------------
@pytest.mark.parametrize("operations", ["s2", "full"])
@pytest.mark.parametrize("strength", [1.0, 4.0])
@pytest.mark.parametrize(("sampler", "bound"), [("dpm", 0.02), ("dpm_sde", 0.02)])
def test_a_linear_gain_tilts_the_shares_of_every_gene(operations: str, strength: float, sampler: str, bound: float) -> None:
    """p(a) exp(strength * gain(a)), in closed form: genes are independent, so choice k has a share in proportion to exp(strength w_k).

    All 28 genes have the same weights, so 250 architectures are 7,000 draws.
    """
    generator = replace(unguided("darts", operations=operations), sampler=sampler)
    weights = torch.linspace(0, 1, generator.tokens.symbols)
    expected = torch.softmax(strength * weights, 0).numpy()
    choices = generator.draw_choices(250, rng("tilt"), lambda shares, sigma: (shares * weights).sum((1, 2)), strength)
    shares = np.bincount(choices.flatten(), minlength=len(weights)) / choices.size
    assert 0.5 * np.abs(shares - expected).sum() < bound
    untilted = np.full(len(weights), 1 / len(weights))
    assert 0.5 * np.abs(shares - untilted).sum() > 3 * bound / 2  # which is far from no tilt


def test_a_gain_of_one_gene_leaves_the_others_alone() -> None:
    generator = replace(unguided("darts", operations="s2"), sampler="dpm_sde")
    choices = generator.draw_choices(400, rng("one"), lambda shares, sigma: shares[:, 5, 1], 2.0)
    assert choices[:, 5].mean() == pytest.approx(np.exp(2) / (1 + np.exp(2)), abs=0.06)
    others = np.delete(choices, 5, axis=1)
    assert others.mean() == pytest.approx(0.5, abs=0.02) and np.abs(others.mean(0) - 0.5).max() < 0.1


def test_the_gain_sees_shares_and_the_level() -> None:
    generator, seen = unguided("darts"), []

    def gain(shares: Tensor, sigma: Tensor) -> Tensor:
        assert shares.shape == (6, 28, 8) and sigma.shape == (6,)
        assert torch.allclose(shares.sum(-1), torch.ones(6, 28))
        seen.append(float(sigma[0]))
        return shares[:, 0, 0]

    generator.draw_choices(6, rng(0), gain, 1.0)
    assert seen == pytest.approx([SIGMA_MAX, *noise_levels("dpm")[:-1]])
    seen.clear()
    generator.draw_choices(6, rng(0), gain, 0.0)
    assert seen == []  # no strength, no gradients


# -- draws --------------------------------------------------------------------------------------
def test_the_count_is_exact_whatever_fits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 7)
    generator = replace(unguided("mobilenetv3"), steps=2)
    for count in (1, 7, 8, 20):
        drawn = generator.draw(count, rng(0))
        assert len(drawn) == count
    assert len(set(drawn)) == 20  # no part is drawn twice


def test_none_are_an_empty_list() -> None:
    generator, numbers = guided("mobilenetv3"), TASK + 2 * SmallFeatures.size
    assert generator.draw(0, rng(0)) == generator.draw(0, rng(0), torch.zeros(numbers)) == []
    assert generator.draw_choices(0, rng(0)).shape == (0, len(generator.tokens.space.genes))


def test_the_generator_of_random_numbers_decides_everything() -> None:
    generator = replace(guided("mobilenetv3"), sampler="dpm_sde", steps=3)
    task = generator.task(images(10), torch.arange(10) % 2)
    before = global_states()
    first = generator.draw(9, rng(1), task)
    assert_same_states(before, global_states())
    assert first == generator.draw(9, rng(1), task) != generator.draw(9, rng(2), task)


def test_tasks_and_strengths_matter_and_no_strength_is_no_guidance() -> None:
    generator = replace(guided("mobilenetv3"), strength=30.0)
    one, other = (generator.task(images(10, seed), torch.arange(10) % 2) for seed in (0, 1))
    assert one is not None and other is not None

    def draw(*given: object) -> list[object]:
        return [*generator.draw(12, rng(0), *given)]  # type: ignore[arg-type]

    assert draw(one) == draw(one, 30.0) != draw(one, 5.0)
    assert draw(one, 0.0) == draw() != draw(one)
    assert draw(50 * one) != draw(-50 * one)
    without = replace(generator, predictor=None)
    assert not without.guided and [*without.draw(12, rng(0), one)] == draw()


def test_a_gain_is_in_units_of_its_own_spread_unless_that_is_faint() -> None:
    """So a strength means the same for every task; but what hardly varies is not blown up to the size of the others."""
    generator = guided("mobilenetv3")
    tokens, predictor = generator.tokens, generator.predictor
    assert predictor is not None and generator.guide(None) is None
    task = torch.randn(predictor.numbers, generator=torch.Generator().manual_seed(0))
    certain = (tokens.random, torch.full((256,), SIGMA_MIN))
    spread = float(predictor.gain(*certain, task).std())
    for wanted, expected in ((20 * FAINT, 1.0), (FAINT, 1.0), (0.1 * FAINT, 0.1)):
        for part in (predictor.architecture.write, predictor.slopes):
            part.weight.mul_(wanted / spread)
        spread, gain = wanted, generator.guide(task)
        assert gain is not None and float(gain(*certain).std()) == pytest.approx(expected, rel=1e-3)


def test_only_a_guided_generator_has_tasks() -> None:
    generator = guided("darts")
    assert generator.guided and not unguided("darts").guided
    assert unguided("darts").task(images(4), torch.tensor([0, 0, 1, 1])) is None
    task = generator.task(images(4), torch.tensor([0, 0, 1, 1]))
    assert task is not None and task.shape == (TASK + 2 * SmallFeatures.size,) and not task.requires_grad


# -- tasks ----------------------------------------------------------------------------------------
def test_a_task_is_a_set_of_classes(ours: Generator) -> None:
    """Neither the order of images nor the names of classes play a part; what a class looks like and how often it occurs do."""
    pictures, labels = images(60), torch.arange(60) % 3

    def task(pictures: Tensor, labels: Tensor) -> Tensor:
        result = ours.task(pictures, labels)
        assert result is not None
        return result

    vector = task(pictures, labels)
    order = torch.from_numpy(rng("order").permutation(60))
    assert torch.allclose(vector, task(pictures[order], labels[order]), atol=1e-4)
    assert torch.allclose(vector, task(pictures, (labels + 1) % 3 * 7), atol=1e-4)
    assert not torch.allclose(vector, task(images(60, 9), labels), atol=1e-3)
    assert not torch.allclose(vector, task(pictures[labels < 2], labels[labels < 2]), atol=1e-3)
    oftener = torch.cat([torch.arange(60), torch.arange(0, 60, 3)])
    assert not torch.allclose(vector, task(pictures[oftener], labels[oftener]), atol=1e-3)


def test_the_first_twenty_images_of_a_class_are_looked_at(ours: Generator) -> None:
    pictures, labels = images(50), torch.arange(50) % 2
    vector, changed = ours.task(pictures, labels), pictures.clone()
    changed[40:] = 255 - changed[40:]
    again = ours.task(changed, labels)
    changed[39] = 255 - changed[39]
    other = ours.task(changed, labels)
    assert vector is not None and again is not None and other is not None
    assert torch.equal(vector, again) and not torch.equal(vector, other)


# -- the shipped one ------------------------------------------------------------------------------
def test_the_shipped_generator_draws_as_its_space_does(ours: Generator) -> None:
    """400 architectures that the space itself draws are 0.03 away on average, and 0.09 in the worst gene."""
    choices = ours.draw_choices(400, rng("shipped"))
    expected = ours.tokens.space.sample_many(rng("expected"), 50_000)
    apart = 0.5 * np.abs(marginals(ours.tokens, choices) - marginals(ours.tokens, expected)).sum(1)
    assert apart.mean() < 0.045 and apart.max() < 0.12


def test_the_shipped_network_knows_which_genes_go_together(ours: Generator) -> None:
    """Whether a block is absent can be seen from the depth of its stage and from the other genes of the block."""
    tokens = ours.tokens
    symbols = tokens.encode(tokens.space.sample_many(rng("depths"), 200))
    clean = tokens.one_hot(symbols)
    noisy = clean + 1.5 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0)) * tokens.mask
    alone = untrained(tokens)
    alone.prior.copy_(ours.denoiser.prior)
    of_both = [
        float(F.cross_entropy(network.logits(noisy, torch.tensor(1.5))[:, tokens.may_be_absent].flatten(0, 1), absent.flatten()))
        for network in (ours.denoiser, alone)
        for absent in [symbols[:, tokens.may_be_absent]]
    ]
    assert of_both[0] < 0.85 * of_both[1]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_predictors_guide(name: str) -> None:
    """Guided samples have a higher predicted gain than unguided ones, and more so with more strength."""
    generator = load_generator(tiny_space(name), "", "", CPU)
    assert isinstance(generator, Generator) and generator.guided and generator.strength == 16
    task = generator.task(images(60), torch.arange(60) % 3)

    def mean_gain(strength: float) -> float:
        drawn = generator.draw(60, rng("guided"), task, strength)
        assert generator.predictor is not None and task is not None
        return float(generator.predictor.gain(*generator.certain(np.array([a.choices for a in drawn])), task).mean())

    none, some, strong = mean_gain(0.0), mean_gain(2.0), mean_gain(20.0)
    assert none < some < strong


def test_shipped_files_are_small() -> None:
    folder = shipped("mobilenetv3").parent
    files = [path for path in folder.iterdir() if path.name != "README.md"]
    sizes = {path.stem: path.stat().st_size for path in files}
    assert sizes and all(size + sizes["features"] <= 5_000_000 for name, size in sizes.items() if name != "features")  # of any space
    assert {path.suffix for path in files} == {".safetensors"}  # nothing that could be executed


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_describe_themselves(name: str) -> None:
    card = read_arrays(shipped(name))[1]["card"]
    assert card["validity"] == 1 and card["uniqueness_in_500"] >= 0.95 and card["data"] == "tinyimagenet"
    assert card["marginals_total_variation"]["largest"] <= 0.02 and card["marginals_total_variation"]["drawn"] == 20_000
    assert card["architectures"] >= 10_000 and card["tasks"] >= 200 and card["held_out_tasks"] > 0
    assert set(card["rank_correlation"]) == {"seen_tasks", "held_out_tasks", "held_out_tasks_others_data"}
    assert card["seconds"].keys() - {"features"} == {"denoiser", "supernet", "labels", "predictor"} and card["device"]


def test_model_cards_say_what_the_files_say() -> None:
    text = (shipped("mobilenetv3").parent / "README.md").read_text()
    cards = []
    for name in SHIPPED:
        cards.append(read_arrays(shipped(name))[1]["card"])
        generator = load_generator(tiny_space(name), "", "", CPU)
        assert isinstance(generator, Generator) and generator.predictor
        denoiser, predictor = (sum(p.numel() for p in part.parameters()) for part in (generator.denoiser, generator.predictor))
        assert re.search(rf"`{name}.safetensors` \| denoiser \({denoiser:,}\).*\| {denoiser + predictor:,} \|", text)

    def row(form: str, value: Callable[[dict[str, Any]], float]) -> str:
        return " | " + " | ".join(form.format(value(card)) for card in cards) + " |"

    assert "largest total variation" + row("{:.4f}", lambda card: card["marginals_total_variation"]["largest"]) in text
    ranks = {"seen_tasks": "known classes", "held_out_tasks": "held-out classes", "held_out_tasks_others_data": "data of another task"}
    for key, words in ranks.items():
        assert words + row("{:.3f}", lambda card, key=key: card["rank_correlation"][key]) in text  # type: ignore[misc]
    assert "held-out tasks" + row("{:.3f}", lambda card: card["level_correlation_held_out"]) in text


def test_loading_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    before = global_states()
    generator = load_generator(tiny_space("mobilenetv3", width=0.3), "", "", CPU)  # of any scale
    assert_same_states(before, global_states())
    assert generator.guided and not any(parameter.requires_grad for parameter in generator.denoiser.parameters())
    assert generator.predictor is not None and not generator.predictor.training  # no dropout


# -- quality -----------------------------------------------------------------------------------------
def test_quality_by_hand() -> None:
    """A gene with three choices; the training architectures know one of them twice, and the third not at all."""
    tokens = Tokens(Toy(3))
    generator = Generator(tokens, untrained(tokens))
    training = np.array([[0], [0], [1], [1]])
    quality = sampler_quality(generator, training, 0, drawn=3000)
    assert quality["validity"] == 1 and quality["uniqueness_in_500"] == 3 / 500
    assert quality["novelty"] == pytest.approx(1 / 3, abs=0.05)  # the third choice
    apart = quality["marginals_total_variation"]
    assert apart["largest"] == apart["mean"] == pytest.approx(1 / 3, abs=0.05) and apart["drawn"] == 3000
