"""What a client's data are as one vector: Set Transformers (Lee et al., ICML 2019) over the images of a class, then over the classes.

As in MetaD2A and DiffusionNAG (An et al., ICLR 2024): features of up to 20 images per class pass two self-attention blocks and a
pooling by attention to one prototype per class; the same kind of encoder over the prototypes gives the task vector. The order of images
and of classes plays no part. One addition of ours: the logarithm of a class's share of the data is added to its prototype, so that the
number of classes and an imbalance of labels can be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PER_CLASS = 20  # images


# -- a task's images by class -----------------------------------------------------------
@dataclass(frozen=True)
class Grouped:
    """Features of a task's images by class. A leading axis of tasks where several are stacked."""

    features: Tensor  # (classes, images, F), zero where no image is
    class_mask: Tensor  # (classes,) bool
    image_mask: Tensor  # (classes, images) bool
    log_shares: Tensor  # (classes,) logarithm of the share of all images that are of this class


def grouped_features(extractor: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, per_class: int = PER_CLASS) -> Grouped:
    """Features of the first ``per_class`` images of each class that occurs; only these are looked at.

    images: (n, c, h, w); labels: (n,).
    """
    known = labels.cpu().numpy()
    members = [np.flatnonzero(known == label) for label in np.unique(known)]
    picked = [own[:per_class] for own in members]
    needed = np.sort(np.concatenate(picked))
    features = extractor(images[torch.from_numpy(needed).to(images.device)])
    grouped = features.new_zeros(len(picked), max(map(len, picked)), features.shape[1])
    image_mask = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=features.device)
    for row, own in enumerate(picked):
        grouped[row, : len(own)] = features[np.searchsorted(needed, own).tolist()]
        image_mask[row, : len(own)] = True
    log_shares = [float(np.log(len(own) / len(known))) for own in members]
    return Grouped(grouped, image_mask.any(1), image_mask, features.new_tensor(log_shares))


# -- Set Transformer ----------------------------------------------------------------------
def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    """Multi-head attention of sets: softmax(Q K^T / sqrt(width per head)) V per head, the heads side by side.

    query: (sets, m, width); key, value: (sets, n, width); mask: (sets, n) bool, the elements that exist. A set without any is
    answered as if all existed: its result means nothing and must not be used, but stays finite.
    """
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))  # (sets, heads, elements, width per head)
    seen = None if mask is None else (mask | ~mask.any(1, keepdim=True))[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)


class AttentionBlock(nn.Module):
    """MAB(X, Y) of Lee et al.: H = LN(X + attention(X, Y, Y)), LN(H + feed-forward(H)); SAB(X) is MAB(X, X)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: (sets, m, width); y: (sets, n, width); mask: (sets, n) bool of y."""
        attended = self.output(attend(self.query(x), self.key(y), self.value(y), self.heads, mask))
        hidden: Tensor = self.first_norm(x + attended)
        return self.second_norm(hidden + self.feed(hidden))


class SetEncoder(nn.Module):
    """One vector for a set: two SAB, pooling by attention to one learned seed (PMA), a linear layer."""

    def __init__(self, size: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Linear(size, width)
        self.blocks = nn.ModuleList([AttentionBlock(width, heads), AttentionBlock(width, heads)])
        self.seed = nn.Parameter(0.1 * torch.randn(1, 1, width))  # a large one would drown what the set says
        self.feed = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.pool = AttentionBlock(width, heads)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: (sets, n, size); mask: (sets, n) bool -> (sets, width)."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, x, mask)
        pooled = self.pool(self.seed.expand(len(x), 1, -1), self.feed(x), mask)[:, 0]
        return self.output(pooled)


class TaskEncoder(nn.Module):
    """The task vector of grouped features."""

    def __init__(self, features: int, width: int = 56, heads: int = 4) -> None:
        super().__init__()
        self.of_class = SetEncoder(features, width, heads)
        self.share = nn.Linear(1, width, bias=False)
        self.of_task = SetEncoder(width, width, heads)

    def forward(
        self, grouped: Tensor, class_mask: Tensor | None = None, image_mask: Tensor | None = None, log_shares: Tensor | None = None
    ) -> Tensor:
        """grouped: (tasks, classes, images, F) -> (tasks, width).

        class_mask: (tasks, classes) bool; image_mask: (tasks, classes, images) bool; without them everything exists.
        log_shares: (tasks, classes); without them the classes of a task are equally frequent.
        """
        tasks, classes = grouped.shape[:2]
        if class_mask is None:
            class_mask = grouped.new_ones(tasks, classes, dtype=torch.bool)
        if log_shares is None:
            log_shares = -class_mask.sum(1, keepdim=True).to(grouped.dtype).log().expand(tasks, classes)
        images = None if image_mask is None else image_mask.flatten(0, 1)
        prototypes = self.of_class(grouped.flatten(0, 1), images).unflatten(0, (tasks, classes))
        return self.of_task(prototypes + self.share(log_shares[..., None]), class_mask)

    def encode(self, task: Grouped) -> Tensor:
        """Of stacked tasks, or (width,) of one."""
        parts = (task.features, task.class_mask, task.image_mask, task.log_shares)
        return self(*(part[None] for part in parts))[0] if task.features.ndim == 3 else self(*parts)
