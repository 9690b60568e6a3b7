"""Losses of HAPFNAS (Yang and Liu, Entropy 2025): what a client learns from unbalanced labels, what a supernet learns from a teacher."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def balanced_softmax(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of logits + log n_c, with n_c the number of labels c in the batch, at least 1 (Ren et al., NeurIPS 2020).

    The counts take over what the batch's label frequencies would teach, so that the logits themselves learn balanced classes.
    logits: (n, classes), labels: (n,).
    """
    classes = torch.arange(logits.shape[1], device=labels.device)
    counts = (labels[:, None] == classes).sum(0).clamp_min(1)  # (classes,)
    return F.cross_entropy(logits + counts.to(logits.dtype).log(), labels, label_smoothing=label_smoothing)


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """-sum_c softmax(teacher)_c log softmax(logits)_c, mean over n; both (n, classes), temperature 1."""
    return F.cross_entropy(logits, teacher.softmax(1))


def ensemble(logits: Sequence[Tensor], examples: Sequence[float]) -> Tensor:
    """sum_i n_i z_i / sum_i n_i: members' logits z_i, each (n, classes), weighted by their numbers of examples."""
    shares = torch.tensor(examples, dtype=logits[0].dtype, device=logits[0].device) / sum(examples)
    return torch.einsum("i,inc->nc", shares, torch.stack(list(logits)))
