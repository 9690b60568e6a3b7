"""The predictor: accuracy as level and gain, learned from a table in which the data decide what is good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.core.seeds import rng
from fedloom.generator.denoiser import SIGMA_MAX, SIGMA_MIN
from fedloom.generator.predictor import TASK, Predictor, PredictorSettings, behind_noise, falling_rate, levels, train_predictor
from fedloom.generator.task_encoder import Grouped
from fedloom.generator.tokens import Tokens
from support.generator import Toy, assert_same_states, global_states, untrained

FEATURES = 4
SETTINGS = PredictorSettings(steps=150, tasks=4, architectures=16, rate=5e-3, width=16, dropout=0.0)


@dataclass(frozen=True)
class World:
    """Bright tasks like a large choice of the first gene and are easy, dark ones the opposite. The second gene has no effect."""

    tokens: Tokens
    symbols: Tensor  # (architectures, rows)
    accuracies: Tensor  # (architectures, tasks)
    bright: Tensor  # (tasks,) +1 or -1

    def show(self, numbers: Sequence[int], draw: torch.Generator) -> Grouped:
        noise = torch.randn(len(numbers), 2, 3, FEATURES, generator=draw)
        features = self.bright[list(numbers), None, None, None] + 0.3 * noise
        there = torch.ones(features.shape[:3], dtype=torch.bool)
        return Grouped(features, there[:, :, 0], there, torch.full(features.shape[:2], 0.5).log())

    def train(self, seed: int = 0, settings: PredictorSettings = SETTINGS) -> Predictor:
        denoiser = untrained(self.tokens)
        return train_predictor(
            self.tokens, denoiser, self.symbols, self.accuracies, self.show, FEATURES, settings, seed, lambda step, loss: None
        )


def make_world() -> World:
    space = Toy(3, 2)
    tokens = Tokens(space)
    choices = space.sample_many(rng("world"), 60)
    bright = torch.tensor([1.0, -1.0] * 5)
    effect = torch.from_numpy(choices[:, :1] - 1.0).float()  # -1, 0, 1
    return World(tokens, tokens.encode(choices), 0.5 + 0.2 * bright + 0.05 * bright * effect, bright)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world()


@pytest.fixture(scope="module")
def predictor(world: World) -> Predictor:
    return world.train()


def certain(tokens: Tokens, choices: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    shares = tokens.shares(tokens.encode(np.array(choices)))
    return shares, torch.full((len(shares),), SIGMA_MIN)


def test_it_learns_what_the_data_decide(world: World, predictor: Predictor) -> None:
    bright, dark = predictor.task(world.show([0, 1], torch.Generator().manual_seed(9)))  # images it has not seen
    shares, sigma = certain(world.tokens, [(0, 0), (1, 0), (2, 0)])
    assert predictor.accuracy(shares, sigma, bright).tolist() == pytest.approx([0.65, 0.7, 0.75], abs=0.02)
    assert predictor.accuracy(shares, sigma, dark).tolist() == pytest.approx([0.35, 0.3, 0.25], abs=0.02)
    assert predictor.level(torch.stack([bright, dark])).tolist() == pytest.approx([0.7, 0.3], abs=0.03)
    assert not predictor.training and not any(parameter.requires_grad for parameter in predictor.parameters())


def test_images_unlike_any_other_count_as_the_farthest_it_knows(world: World, predictor: Predictor) -> None:
    """Slopes are linear: ten times as far would be ten times the slope."""
    shown = world.show([0], torch.Generator().manual_seed(9))
    near, far, farther = (predictor.task(replace(shown, features=times * shown.features))[0, TASK:] for times in (0.5, 10, 1000))
    assert float(near.norm()) < float(predictor.farthest) == pytest.approx(float(far.norm())) == pytest.approx(float(farther.norm()))
    assert torch.nn.functional.cosine_similarity(far, farther, dim=0) > 0.99


def test_much_noise_leaves_little_to_say(world: World, predictor: Predictor) -> None:
    bright = predictor.task(world.show([0], torch.Generator().manual_seed(9)))[0]
    shares, sigma = certain(world.tokens, [(0, 0), (2, 0)])
    clear = predictor.gain(shares, sigma, bright)
    clean, level = world.tokens.one_hot(shares.argmax(-1)).repeat(200, 1, 1), torch.full((400,), SIGMA_MAX)
    noisy = behind_noise(untrained(world.tokens), clean, level, torch.Generator().manual_seed(0))
    unsure = predictor.gain(noisy, level, bright).view(200, 2).mean(0)
    assert float(unsure[1] - unsure[0]) < 0.5 * float(clear[1] - clear[0])


def test_accuracy_is_level_and_gain(world: World, predictor: Predictor) -> None:
    task = predictor.task(world.show([0, 1], torch.Generator().manual_seed(3)))
    shares, sigma = certain(world.tokens, [(0, 0), (2, 1)])
    expected = predictor.level(task) + predictor.spread * predictor.gain(shares, sigma, task)
    assert torch.equal(predictor.accuracy(shares, sigma, task), expected)
    one = predictor.gain(shares, sigma, task[1])  # one task for all architectures
    assert torch.allclose(one[1], predictor.gain(shares, sigma, task)[1], atol=1e-5) and one.shape == (2,)
    assert task.shape == (2, predictor.numbers) == (2, TASK + 2 * FEATURES)


def test_the_spread_is_that_of_the_labels(world: World, predictor: Predictor) -> None:
    assert float(predictor.spread) == pytest.approx(float(world.accuracies.std(0).mean()), rel=1e-5)


def test_training_repeats_bit_for_bit_and_leaves_global_states_alone(world: World) -> None:
    few = PredictorSettings(steps=3, tasks=2, architectures=4, width=8, dropout=0.5)
    before = global_states()
    first = world.train(1, few).state_dict()
    assert_same_states(before, global_states())
    torch.rand(1)
    again, other = world.train(1, few).state_dict(), world.train(2, few).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_labels_without_any_difference_do_no_harm() -> None:
    world = make_world()
    flat = World(world.tokens, world.symbols, torch.full_like(world.accuracies, 0.5), world.bright)
    predictor = flat.train(settings=PredictorSettings(steps=3, tasks=2, architectures=4, width=8))
    assert all(parameter.isfinite().all() for parameter in predictor.parameters()) and float(predictor.spread) == 0


def test_noise_behind_which_the_denoiser_looks(world: World) -> None:
    clean = world.tokens.one_hot(world.symbols)
    draw = torch.Generator().manual_seed(0)
    little = behind_noise(untrained(world.tokens), clean, torch.full((len(clean),), 0.05), draw)
    assert torch.allclose(little, clean.gt(0).float(), atol=1e-3)
    much = behind_noise(untrained(world.tokens), clean, torch.full((len(clean),), 100.0), draw)
    assert torch.allclose(much, world.tokens.mask / world.tokens.mask.sum(1, keepdim=True), atol=0.1)


def test_levels_lie_in_the_range_a_quarter_at_its_lower_end() -> None:
    drawn = levels(4000, torch.Generator().manual_seed(0), torch.device("cpu"))
    assert float(drawn.min()) == pytest.approx(SIGMA_MIN) and SIGMA_MIN < float(drawn.median()) < float(drawn.max()) < SIGMA_MAX
    assert float((drawn <= SIGMA_MIN * 1.0001).float().mean()) == pytest.approx(0.25, abs=0.03)


def test_the_rate_rises_and_falls_by_hand() -> None:
    assert falling_rate(0, 1000, 2.0) == pytest.approx(0.02) and falling_rate(500, 1000, 2.0) == pytest.approx(1.0)
    assert falling_rate(999, 1000, 2.0) == pytest.approx(0, abs=1e-4)
