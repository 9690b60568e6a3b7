"""The papers' generator: what its networks see and compute, and that training moves samples towards the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedloom.generator.paper.predictor import DirectedConvolution, PaperPredictor, guided
from fedloom.generator.paper.score import PaperScoreNetwork, PaperSettings, sees
from fedloom.generator.paper.training import train_predictor, train_score
from fedloom.generator.task_encoder import Grouped
from fedloom.maths.samplers import SAMPLERS
from fedloom.maths.sde import ve_levels

SMALL = PaperSettings(layers=1, width=16, heads=4, feed=16, graph_layers=2, graph_width=16, dropout=0.0, warmup=20, average=0.98, batch=128)
CPU = torch.device("cpu")
CHAIN = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()  # 0 -> 1 -> 2 -> 3
PLACES = [(1, 1), (1, 2), (2, 1), (2, 2)]
ALL = torch.ones(4, 3, dtype=torch.bool)


def silent(step: int, loss: float) -> None:
    return None


def normal(*shape: int, seed: int = 0) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(*shape, generator=generator)


# -------------------------------------------------------------------------------------- score network


def test_parameters_at_the_size_of_the_paper() -> None:
    """20 blocks x 9 operations, 3.99 million; of these 3.56 million in the head. By hand: see the parts."""
    mask = torch.ones(20, 9, dtype=torch.bool)
    network = PaperScoreNetwork(mask, torch.diag(torch.ones(19), 1).bool(), [(i // 4 + 1, i % 4 + 1) for i in range(20)])
    layer = 4 * (64 * 64 + 64) + (64 * 128 + 128) + (128 * 64 + 64) + 2 * 128 + 128  # attention, feed-forward, norms
    level = (64 * 256 + 256) + (256 * 64 + 64)
    head = (768 * 1536 + 1536) + (1536 * 1536 + 1536) + (1536 * 9 + 9)
    own = 20 * 64  # a vector per token, which the paper's has not
    assert sum(p.numel() for p in network.parameters()) == 12 * layer + level + head + (9 * 64 + 64) + own == 3_994_057
    assert sum(p.numel() for p in network.head.parameters()) == head == 3_555_849


def test_closure_follows_paths_of_any_length() -> None:
    torch.testing.assert_close(sees(CHAIN, "direct"), CHAIN | torch.eye(4, dtype=torch.bool))
    torch.testing.assert_close(sees(CHAIN, "closure"), torch.ones(4, 4).triu().bool())
    assert sees(CHAIN, "full").all()
    assert sees(torch.zeros(1, 1, dtype=torch.bool), "closure").all()


@pytest.mark.parametrize(
    ("attention", "layers", "touched"),
    [("direct", 1, {1, 2}), ("direct", 2, {0, 1, 2}), ("closure", 1, {0, 1, 2}), ("full", 1, {0, 1, 2, 3})],
)
def test_a_change_is_felt_by_the_tokens_that_see_it_only(attention: str, layers: int, touched: set[int]) -> None:
    torch.manual_seed(0)
    network = PaperScoreNetwork(ALL, CHAIN, PLACES, replace(SMALL, attention=attention, layers=layers)).eval()
    x, sigma = normal(2, 4, 3)(), torch.tensor([0.5, 2.0])
    other = x.clone()
    other[:, 2] += 1
    same = torch.isclose(network(x, sigma), network(other, sigma), rtol=0, atol=1e-7).all(-1).all(0)
    assert {token for token in range(4) if not same[token]} == touched


def test_symbols_that_a_token_has_not_are_neither_read_nor_predicted() -> None:
    torch.manual_seed(0)
    mask = ALL.clone()
    mask[1, 2] = False
    network = PaperScoreNetwork(mask, CHAIN, PLACES, SMALL).eval()
    x = normal(2, 4, 3)()
    other = x.clone()
    other[:, 1, 2] = 7
    assert torch.equal(network.denoise(x, 0.5)[:, mask], network.denoise(other, 0.5)[:, mask])
    assert network.denoise(other, 0.5)[:, ~mask].abs().max() < 1e-6


def test_tokens_of_one_place_share_its_code_whatever_the_stage() -> None:
    network = PaperScoreNetwork(ALL, CHAIN, PLACES, SMALL)
    assert torch.equal(network.position[0], network.position[2]) and not torch.equal(network.position[0], network.position[1])
    half = torch.exp(-math.log(10_000) * torch.arange(8) / 7)  # frequencies 1 … 1 / 10,000
    torch.testing.assert_close(network.position[1], torch.cat([torch.sin(2 * half), torch.cos(2 * half)]))


# ------------------------------------------------------------------------------------------ predictor


def test_the_directed_convolution_by_hand() -> None:
    """0 -> 1 and 0 -> 2; one number per node, weights 2 forwards and -1 backwards."""
    follows = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 0]]).bool()
    layer = DirectedConvolution(follows, 1, 1)
    nn.init.constant_(layer.along.weight, 2.0)
    nn.init.constant_(layer.against.weight, -1.0)
    x = torch.tensor([[[3.0], [-6.0], [9.0]]])
    # forwards: mean(3, -6, 9) = 2, -6, 9, times 2, without negatives: 4, 0, 18
    # backwards: 3, mean(3, -6) = -1.5, mean(3, 9) = 6, times -1, without negatives: 0, 1.5, 0
    torch.testing.assert_close(layer(x), torch.tensor([[[2.0], [0.75], [9.0]]]))


def test_guidance_adds_the_gradient_of_the_prediction() -> None:
    torch.manual_seed(0)
    predictor = PaperPredictor(ALL, CHAIN, SMALL).double().eval()
    x, task, sigma, step = normal(2, 4, 3)().double(), normal(56)().double(), torch.full((2,), 0.2).double(), 1e-6
    moved = guided(lambda x, sigma: 0.5 * x, lambda x, sigma: predictor(x, sigma, task), strength=3.0)(x, 0.2)
    above, below = x.clone(), x.clone()
    above[1, 2, 0] += step
    below[1, 2, 0] -= step
    slope = (predictor(above, sigma, task) - predictor(below, sigma, task))[1] / (2 * step)
    assert slope.abs() > 1e-6
    assert moved[1, 2, 0].item() == pytest.approx((0.5 * x[1, 2, 0] + 3.0 * 0.04 * slope).item(), abs=1e-9)


# ------------------------------------------------------------------------------------------- training

MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()
SHARES = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.2, 0.8, 0.0]])  # of the symbols, by token


def architectures(count: int = 4000) -> Tensor:
    symbols = torch.multinomial(SHARES, count, replacement=True, generator=torch.Generator().manual_seed(0)).T
    return torch.where(symbols[..., None] == torch.arange(3), 1.0, -1.0) * MASK


def distance(network: PaperScoreNetwork) -> float:
    """Largest total variation, over tokens, between the symbols of samples and of the data."""
    noise = normal(1000, 3, 3, seed=1)
    with torch.no_grad():
        x = SAMPLERS["dpm"].make(network.denoise, network.start(noise()), ve_levels(0.1, 5.0, 15), noise)
    symbols = x.masked_fill(~MASK, -torch.inf).argmax(-1)
    shares = torch.stack([(symbols == symbol).float().mean(0) for symbol in range(3)], 1)
    return ((shares - SHARES).abs().sum(1) / 2).max().item()


def test_training_moves_samples_towards_the_data() -> None:
    settings = replace(SMALL, layers=2, score_rate=4e-3, score_steps=400)
    losses: list[tuple[int, float]] = []
    arguments = (MASK, CHAIN[:3, :3], PLACES[:3], architectures())
    before = train_score(*arguments, replace(settings, score_steps=1), 0, CPU, silent)
    after = train_score(*arguments, settings, 0, CPU, lambda step, loss: losses.append((step, loss)))
    assert distance(before) > 0.3
    assert distance(after) < 0.2
    assert [step for step, _ in losses] == [100, 200, 300, 400] and losses[-1][1] < losses[0][1]
    torch.testing.assert_close(after.data_mean[0], 2 * SHARES[0] - 1, atol=0.05, rtol=0)
    assert not any(parameter.requires_grad for parameter in after.parameters()) and not after.training


def test_the_same_seed_trains_the_same_network_and_leaves_the_global_generator_alone() -> None:
    settings = replace(SMALL, dropout=0.1, score_steps=3)
    state = torch.get_rng_state()
    arguments = (MASK, CHAIN[:3, :3], PLACES[:3], architectures(100), settings)
    one, same, other = (train_score(*arguments, seed, CPU, silent).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["read.weight"], other["read.weight"])


def show(numbers: Sequence[int], draw: torch.Generator) -> Grouped:
    """Tasks 0 and 1: two images of one class each, (+1, +1) or (-1, -1) and a little noise."""
    signs = torch.tensor([1.0 if number == 0 else -1.0 for number in numbers])
    features = signs[:, None, None, None] + 0.1 * torch.randn(len(numbers), 1, 2, 2, generator=draw)
    ones = torch.ones(len(numbers), 1, 2, dtype=torch.bool)
    return Grouped(features, ones[..., 0], ones, torch.zeros(len(numbers), 1))


def test_the_predictor_learns_what_depends_on_the_task_and_guides_to_it() -> None:
    """In task 0 symbol 0 of token 1 is good, in task 1 it is bad; accuracies 0.5 +- 0.1."""
    data = architectures()
    good = torch.stack([data[:, 1, 0], -data[:, 1, 0]], 1)  # (architectures, tasks)
    settings = replace(SMALL, predictor_steps=150, predictor_rate=5e-3, batch=64)
    predictor = train_predictor(MASK, CHAIN[:3, :3], data, 0.5 + 0.1 * good, show, 2, settings, 0, CPU, silent)
    assert predictor.mean.item() == pytest.approx(0.5, abs=1e-6) and predictor.spread.item() == pytest.approx(0.1, abs=1e-6)
    vectors = predictor.task(show([0, 1], torch.Generator().manual_seed(1)))
    sigma = torch.full((len(data),), 0.1)
    for task in (0, 1):
        predicted = predictor.accuracy(data, sigma, vectors[task])
        assert torch.corrcoef(torch.stack([predicted, good[:, task]]))[0, 1] > 0.9
        assert (predicted - 0.5 - 0.1 * good[:, task]).abs().mean() < 0.05
    noisy = data + normal(*data.shape)()
    gains = [lambda x, sigma, vector=vector: predictor.gain(x, sigma, vector) for vector in vectors]
    towards, away = (guided(lambda x, sigma: x, gain, strength=1.0)(noisy, 1.0) - noisy for gain in gains)
    assert towards[:, 1, 0].mean() > 0 > away[:, 1, 0].mean()
    assert not any(parameter.requires_grad for parameter in predictor.parameters())
