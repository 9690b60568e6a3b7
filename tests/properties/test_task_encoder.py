"""A task vector depends on the sets of images and classes: not on their order, nor on padding, nor on other tasks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.generator.task_encoder import TaskEncoder

FEATURES = 6


@pytest.fixture(scope="module")
def encoder() -> TaskEncoder:
    torch.manual_seed(0)
    return TaskEncoder(FEATURES).eval()


@given(seed=st.integers(0, 10**6), classes=st.integers(1, 6), images=st.integers(1, 5))
@torch.no_grad()
def test_order_plays_no_part(encoder: TaskEncoder, seed: int, classes: int, images: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    grouped = torch.randn(1, classes, images, FEATURES, generator=draw)
    shares = torch.rand(1, classes, generator=draw).log_softmax(1)
    turned, order = torch.randperm(images, generator=draw), torch.randperm(classes, generator=draw)
    vector = encoder(grouped, log_shares=shares)
    assert torch.allclose(vector, encoder(grouped[:, :, turned], log_shares=shares), atol=1e-5)
    assert torch.allclose(vector, encoder(grouped[:, order], log_shares=shares[:, order]), atol=1e-5)


@given(
    seed=st.integers(0, 10**6), classes=st.integers(1, 4), images=st.integers(1, 4), more=st.tuples(st.integers(0, 3), st.integers(0, 3))
)
@torch.no_grad()
def test_padding_plays_no_part_whatever_it_holds(encoder: TaskEncoder, seed: int, classes: int, images: int, more: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(seed)
    grouped = torch.randn(1, classes, images, FEATURES, generator=draw)
    image_mask = torch.rand(1, classes, images, generator=draw) < 0.6
    image_mask[:, :, 0] = True  # a class that exists has an image
    shares = torch.rand(1, classes, generator=draw).log_softmax(1)

    def padded(tensor: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        fill[tuple(slice(size) for size in tensor.shape)] = tensor
        return fill

    rows, columns = classes + more[0], images + more[1]
    noise = padded(torch.where(image_mask[..., None], grouped, 50.0), 100 * torch.randn(1, rows, columns, FEATURES, generator=draw))
    wide_mask = padded(image_mask, torch.zeros(1, rows, columns, dtype=torch.bool))
    wide_shares = padded(shares, torch.zeros(1, rows))
    expected = encoder(grouped, None, image_mask, shares)
    assert torch.allclose(expected, encoder(noise, wide_mask.any(2), wide_mask, wide_shares), atol=1e-4)
    balanced = encoder(grouped, None, image_mask)
    assert torch.allclose(balanced, encoder(noise, wide_mask.any(2), wide_mask), atol=1e-4)


@given(seed=st.integers(0, 10**6), tasks=st.integers(2, 4))
@torch.no_grad()
def test_a_batch_is_its_tasks_one_by_one(encoder: TaskEncoder, seed: int, tasks: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    grouped = torch.randn(tasks, 3, 4, FEATURES, generator=draw)
    class_mask = torch.rand(tasks, 3, generator=draw) < 0.6
    class_mask[:, 0] = True
    image_mask = (torch.rand(tasks, 3, 4, generator=draw) < 0.6) & class_mask[..., None]
    image_mask[..., 0] |= class_mask
    together = encoder(grouped, class_mask, image_mask)
    alone = [encoder(grouped[i : i + 1], class_mask[i : i + 1], image_mask[i : i + 1])[0] for i in range(tasks)]
    assert torch.allclose(together, torch.stack(alone), atol=1e-5)
