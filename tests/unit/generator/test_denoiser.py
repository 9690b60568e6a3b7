"""The denoising network: Bayes' rule where genes are independent, better than that where they are not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.seeds import rng
from fedloom.generator.denoiser import SHARPEST, Denoiser, DenoiserSettings, expectation, sinusoid, train_denoiser
from fedloom.generator.tokens import Tokens
from support.generator import CPU, SMALL, Toy, assert_same_states, global_states, tiny_space, untrained

PRIOR = (0.5, 0.25, 0.25)
TRAINING = replace(SMALL, steps=120, batch=64, rate=1e-2, average=0.9)


def silent(step: int, loss: float) -> None:
    return None


def one_gene() -> Denoiser:
    denoiser = untrained(Tokens(Toy(3)))
    denoiser.prior.copy_(torch.tensor([PRIOR]).log())
    return denoiser


# -- Bayes' rule --------------------------------------------------------------------------
@pytest.mark.parametrize("sigma", [1.0, 0.5, 3.0])
def test_an_untrained_network_is_the_posterior_of_a_gene(sigma: float) -> None:
    x = (0.1, 0.6, -0.4)
    # The density of x around each symbol's table, (1, -1, -1) and its turns, times its share.
    tables = [[1.0 if column == symbol else -1.0 for column in range(3)] for symbol in range(3)]
    densities = [math.exp(-sum((a - b) ** 2 for a, b in zip(x, table, strict=True)) / (2 * sigma**2)) for table in tables]
    weights = [share * density for share, density in zip(PRIOR, densities, strict=True)]
    expected = [weight / sum(weights) for weight in weights]
    if sigma == 1:  # the same by hand: 0.5 e^0.2, 0.25 e^1.2, 0.25 e^-0.8
        assert expected == pytest.approx([0.61070 / 1.55306, 0.83003 / 1.55306, 0.11233 / 1.55306], abs=1e-4)
    logits = one_gene().logits(torch.tensor([[x]]), torch.tensor(sigma))
    assert logits.softmax(-1).flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_genes_and_levels_of_a_batch_do_not_mix() -> None:
    tokens = Tokens(Toy(2, 3, 2))
    denoiser = untrained(tokens)
    x = torch.from_numpy(rng("batch").normal(size=(3, 3, 4)).astype(np.float32))
    sigma = torch.tensor([0.5, 1.0, 2.0])
    logits = denoiser.logits(x, sigma)
    assert torch.equal(logits.isinf(), ~tokens.mask.expand(3, 3, 4))  # a symbol that a row has not is impossible
    expected = (2 * x / sigma[:, None, None] ** 2).clamp(-SHARPEST, SHARPEST)
    assert torch.allclose(logits[:, tokens.mask], expected[:, tokens.mask], atol=1e-5)


def test_little_noise_leaves_no_doubt_and_no_overflow() -> None:
    logits = one_gene().logits(torch.tensor([[[-1.0, -1.0, 1.0]]]), torch.tensor(1e-4))
    assert logits.isfinite().all() and logits.softmax(-1).flatten().tolist() == pytest.approx([0, 0, 1])


def test_the_expectation_by_hand() -> None:
    mask = torch.tensor([[True, True, True, False]])
    logits = torch.tensor([[[0.5, 0.25, 0.25, 0.0]]]).log()
    assert expectation(logits, mask).flatten().tolist() == pytest.approx([0, -0.5, -0.5, 0])


def test_sinusoids_by_hand() -> None:
    code = sinusoid(torch.tensor([0.0, 2.0]), 4)  # frequencies 1 and 1 / sqrt(1000)
    slow = 2 / math.sqrt(1000)
    assert code[0].tolist() == [0, 0, 1, 1]
    assert code[1].tolist() == pytest.approx([math.sin(2), math.sin(slow), math.cos(2), math.cos(slow)], abs=1e-6)


# -- the learned part ---------------------------------------------------------------------
def test_every_gene_is_read_and_written_at_its_own_place() -> None:
    tokens = Tokens(tiny_space("mobilenetv3"))
    denoiser = untrained(tokens)
    seen: list[Tensor] = []
    denoiser.read.register_forward_hook(lambda module, given, result: seen.append(given[0]))
    x = torch.arange(2 * len(tokens) * tokens.symbols, dtype=torch.float32).view(2, len(tokens), tokens.symbols)
    before = denoiser.logits(x, torch.tensor(1.0))
    blocks = seen[0].view(2, *tokens.slots.shape, tokens.symbols) * math.sqrt(2)  # noise of level 1 doubles the variance
    kernel, expansion = (blocks[:, tokens.blocks.index((2, 3)), slot] for slot in (0, 1))
    assert torch.allclose(kernel, x[:, 6]) and torch.allclose(expansion, x[:, 26])
    assert blocks[:, tokens.blocks.index((3, 0)), 1].eq(0).all()  # a depth shares its token with nothing
    denoiser.write.bias.copy_(torch.arange(8) / 8)  # kernels and depths are first in their tokens, expansions second
    added = denoiser.logits(x, torch.tensor(1.0)) - before
    for rows, expected in ((slice(20), (0.0, 0.125, 0.25)), (slice(20, 40), (0.5, 0.625, 0.75)), (slice(40, 45), (0.0, 0.125, 0.25))):
        assert torch.allclose(added[:, rows, :3], torch.tensor(expected), atol=1e-5)


def test_a_trained_network_sees_what_independence_misses() -> None:
    """A switch and the two genes that are absent with it: their tables tell about the switch, too, which is another token."""
    tokens, choices = Tokens(Toy(2, 3, 3)), Toy(2, 3, 3).sample_many(rng("toy"), 2000)
    denoiser = train_denoiser(tokens, choices, TRAINING, 0, CPU, silent)
    alone = untrained(tokens)
    alone.prior.copy_(denoiser.prior)
    symbols = tokens.encode(choices)
    clean = tokens.one_hot(symbols)
    noisy = clean + 1.5 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(1)) * tokens.mask

    def loss(network: Denoiser) -> float:
        return float(F.cross_entropy(network.logits(noisy, torch.tensor(1.5))[:, 0], symbols[:, 0]))

    assert loss(denoiser) < 0.9 * loss(alone)
    assert not denoiser.training and not any(parameter.requires_grad for parameter in denoiser.parameters())


def test_the_prior_is_the_share_of_each_symbol() -> None:
    tokens = Tokens(Toy(2, 3))
    choices = np.array([[0, 0], [1, 0], [1, 1], [1, 1]])
    denoiser = train_denoiser(tokens, choices, replace(TRAINING, steps=1), 0, CPU, silent)
    shares = denoiser.prior.exp()
    assert shares[0, :2].tolist() == pytest.approx([0.25, 0.75])
    assert shares[1].tolist() == pytest.approx([0.25, 0.5, 0, 0.25], abs=1e-5)  # the last: absent


def test_training_repeats_bit_for_bit_and_leaves_global_states_alone() -> None:
    tokens, choices = Tokens(Toy(2, 3)), Toy(2, 3).sample_many(rng("toy"), 100)
    told: list[tuple[int, float]] = []
    settings = replace(TRAINING, steps=5)

    def weights(seed: int) -> dict[str, Tensor]:
        return train_denoiser(tokens, choices, settings, seed, CPU, lambda step, loss: told.append((step, loss))).state_dict()

    before = global_states()
    first = weights(1)
    assert_same_states(before, global_states())
    torch.rand(1)  # nor do they matter
    again, other = weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert [step for step, _ in told] == [5, 5, 5] and told[0] == told[1] != told[2]


def test_progress_is_told_every_hundred_steps_and_at_the_end() -> None:
    tokens, told = Tokens(Toy(2)), []
    settings = DenoiserSettings(steps=101, batch=1, width=8, layers=1, heads=1)
    train_denoiser(tokens, np.array([[0], [1]]), settings, 0, CPU, lambda step, loss: told.append((step, loss)))
    assert [step for step, _ in told] == [100, 101] and all(math.isfinite(loss) for _, loss in told)
