"""The Set Transformer of tasks: attention by hand, shapes, and images grouped by class."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from fedloom.generator.features import SmallFeatures, frozen_extractor
from fedloom.generator.task_encoder import AttentionBlock, Grouped, SetEncoder, TaskEncoder, attend, grouped_features


# -- attention ------------------------------------------------------------------------------
def test_attention_of_one_head_by_hand() -> None:
    scale = math.sqrt(2)  # of two dimensions
    query = torch.tensor([[[scale * math.log(3), 0.0]]])
    key = torch.tensor([[[1.0, 5.0], [0.0, 7.0], [1.0, 9.0]]])
    value = torch.tensor([[[8.0, 0.0], [0.0, 8.0], [100.0, 100.0]]])
    # Without the third, weights are 3 : 1.
    mask = torch.tensor([[True, True, False]])
    assert attend(query, key, value, 1, mask).flatten().tolist() == pytest.approx([6, 2])
    # All three: 3 : 1 : 3.
    assert attend(query, key, value, 1).flatten().tolist() == pytest.approx([324 / 7, 308 / 7])


def test_heads_attend_on_their_own() -> None:
    query = torch.tensor([[[math.log(3), 0.0]]])  # two heads of one dimension
    key = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]])
    value = torch.tensor([[[4.0, 4.0], [0.0, 0.0]]])
    assert attend(query, key, value, 2).flatten().tolist() == pytest.approx([3, 2])


def test_a_set_of_nothing_stays_finite_and_spoils_no_gradient() -> None:
    x = torch.ones(2, 3, 4, requires_grad=True)
    result = attend(x, x, x, 2, torch.tensor([[True, False, False], [False, False, False]]))
    result[0].sum().backward()
    assert result.isfinite().all() and x.grad is not None and x.grad.isfinite().all()


def test_an_attention_block_by_hand() -> None:
    block = AttentionBlock(2, 1)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
        for layer in (block.value, block.output):  # queries and keys are zero: every element weighs the same
            layer.weight.copy_(torch.eye(2))
        for norm in (block.first_norm, block.second_norm):
            norm.weight.fill_(1)
            norm.eps = 0
        block.feed[0].weight.copy_(torch.eye(2))
        block.feed[2].weight.copy_(torch.tensor([[0.0, 0.0], [4.0, 0.0]]))
        x, y = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[4.0, 1.0], [2.0, 1.0]]])
        # x + mean of y = (4, 1), normalised (1, -1); feed-forward (0, 4 relu(1)), sum (1, 3), normalised (-1, 1)
        assert block(x, y).flatten().tolist() == pytest.approx([-1, 1])
        block.feed[2].weight.zero_()
        assert block(x, y).flatten().tolist() == pytest.approx([1, -1])


def test_shapes() -> None:
    encoder = SetEncoder(5, 8, 2)
    assert encoder(torch.randn(3, 4, 5)).shape == (3, 8)
    task = TaskEncoder(5)
    assert task(torch.randn(2, 3, 4, 5)).shape == (2, 56)
    assert task.of_class.pool.heads == 4


def test_imbalance_and_the_number_of_classes_can_be_seen() -> None:
    torch.manual_seed(0)
    encoder = TaskEncoder(5)
    grouped = torch.randn(1, 2, 3, 5)
    even, uneven = (encoder(grouped, log_shares=torch.tensor([shares]).log()) for shares in ((0.5, 0.5), (0.9, 0.1)))
    assert torch.allclose(encoder(grouped), even) and not torch.allclose(even, uneven, atol=1e-3)
    twice = encoder(grouped.repeat(1, 2, 1, 1))  # the same classes again: a set of more, and nothing else
    assert not torch.allclose(encoder(grouped), twice, atol=1e-3)


def test_the_vector_carries_the_features() -> None:
    """A linear readout learns the first feature's mean over a task, in a few steps."""
    torch.manual_seed(0)
    encoder, readout = TaskEncoder(8), torch.nn.Linear(56, 1)
    optimiser = torch.optim.Adam([*encoder.parameters(), *readout.parameters()], 1e-3)
    losses = []
    for _ in range(50):
        grouped = torch.randn(32, 1, 1, 8) + 0.1 * torch.randn(32, 3, 2, 8)
        loss = ((readout(encoder(grouped))[:, 0] - grouped[..., 0].mean((1, 2))) ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.2 * np.mean(losses[:3])


# -- grouping -------------------------------------------------------------------------------
def test_images_are_grouped_by_class() -> None:
    features = torch.arange(12.0).reshape(6, 2)
    grouped = grouped_features(torch.clone, features, torch.tensor([7, 2, 7, 7, 7, 2]), per_class=3)
    assert grouped.features.shape == (2, 3, 2)
    assert grouped.features[0].tolist() == [[2, 3], [10, 11], [0, 0]]  # label 2, then padding
    assert grouped.features[1].tolist() == [[0, 1], [4, 5], [6, 7]]  # label 7, three of four
    assert grouped.image_mask.tolist() == [[True, True, False], [True, True, True]] and grouped.class_mask.tolist() == [True, True]
    assert grouped.log_shares.exp().tolist() == pytest.approx([2 / 6, 4 / 6])


def test_only_the_picked_images_are_looked_at() -> None:
    torch.manual_seed(0)
    extractor = frozen_extractor(SmallFeatures(), SmallFeatures().state_dict(), "here")
    images = torch.randint(0, 256, (30, 1, 8, 8), dtype=torch.uint8)
    labels = torch.arange(30) % 3
    lean, whole = grouped_features(extractor, images, labels, 4), grouped_features(torch.clone, extractor(images), labels, 4)
    assert torch.allclose(lean.features, whole.features, atol=1e-6) and torch.equal(lean.log_shares, whole.log_shares)
    seen: list[int] = []
    frozen = extractor.network.features
    extractor.network.features = lambda chunk: seen.append(len(chunk)) or frozen(chunk)  # type: ignore[method-assign,func-returns-value]
    grouped_features(extractor, images, labels, 4)
    assert sum(seen) == 12


def test_one_task_is_its_row_of_a_batch() -> None:
    torch.manual_seed(0)
    encoder = TaskEncoder(4).eval()
    tasks = [grouped_features(torch.clone, torch.randn(n, 4), torch.arange(n) % 3, 5) for n in (13, 14, 15)]
    batch = encoder.encode(Grouped(*(torch.stack([getattr(task, item.name) for task in tasks]) for item in fields(Grouped))))
    assert batch.shape == (3, 56)
    for task, row in zip(tasks, batch, strict=True):
        assert torch.allclose(encoder.encode(task), row, atol=1e-5)
