"""How good a generator is: does the sampler draw what it was trained on, does the predictor rank architectures it has not seen?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fedloom.core.errors import InvalidArchitecture
from fedloom.core.seeds import rng
from fedloom.generator.generator import AnyGenerator
from fedloom.generator.predictor import Predictor
from fedloom.generator.task_encoder import Grouped
from fedloom.generator.tokens import Tokens
from fedloom.maths.ranking import spearman

DRAWN = 20_000  # unguided architectures that marginals are measured on
BATCH = 500  # architectures among which repeats are counted


def marginals(tokens: Tokens, choices: np.ndarray) -> np.ndarray:
    """(rows, symbols) share of each symbol."""
    symbols = tokens.encode(choices).numpy()
    return np.stack([(symbols == symbol).mean(0) for symbol in range(tokens.symbols)], 1)


def sampler_quality(generator: AnyGenerator, training: np.ndarray, seed: int, drawn: int = DRAWN) -> dict[str, Any]:
    """Of unguided samples."""
    return sample_quality(generator.tokens, generator.draw_choices(drawn, rng(seed, "quality")), training)


def sample_quality(tokens: Tokens, choices: np.ndarray, training: np.ndarray) -> dict[str, Any]:
    """Validity, uniqueness, novelty and marginals of samples (n, genes) against the training architectures (m, genes)."""
    apart = 0.5 * np.abs(marginals(tokens, choices) - marginals(tokens, training)).sum(1)  # (rows,)
    known = {row.tobytes() for row in training.astype(tokens.space.compact)}
    return {
        "validity": float(np.mean([_is_valid(tokens, row) for row in choices])),
        "uniqueness_in_500": unique_share(choices[:BATCH]),
        "novelty": float(np.mean([row.tobytes() not in known for row in choices.astype(tokens.space.compact)])),
        "marginals_total_variation": {"largest": float(apart.max()), "mean": float(apart.mean()), "drawn": len(choices)},
    }


def unique_share(choices: np.ndarray) -> float:
    return len(np.unique(choices, axis=0)) / len(choices)


def _is_valid(tokens: Tokens, row: np.ndarray) -> bool:
    try:
        tokens.space.check(tokens.architectures(row[None])[0])
    except InvalidArchitecture:
        return False
    return True


@torch.no_grad()
def predictor_quality(
    generator: AnyGenerator,
    choices: np.ndarray,
    accuracies: torch.Tensor,
    show: Callable[[Sequence[int], torch.Generator], Grouped],
    shown: int,
) -> dict[str, Any]:
    """Rank correlations with true accuracies of unseen architectures (a, tasks), on seen and held-out tasks; nan is unknown. A mean over
    tasks, of those whose architectures and predictions both differ; None if there is no such task.

    ``others_data``: with the data of another task, half of all tasks away, which tells how much the data matter.
    """
    predictor = generator.predictor
    assert predictor is not None
    seen_by_predictor, sigma = generator.certain(choices)
    draw = torch.Generator(generator.device).manual_seed(0)
    numbers = list(range(accuracies.shape[1]))
    vectors = torch.cat([predictor.task(show(numbers[i : i + 64], draw)) for i in range(0, len(numbers), 64)])
    true = accuracies.cpu().numpy()

    def correlations(tasks: Sequence[int], shift: int) -> float | None:
        found = []
        for place, task in enumerate(tasks):
            known, vector = np.isfinite(true[:, task]), vectors[tasks[(place + shift) % len(tasks)]]
            found.append(spearman(predictor.gain(seen_by_predictor, sigma, vector).cpu().numpy()[known], true[known, task]))
        measured = [value for value in found if value is not None]
        return float(np.mean(measured)) if measured else None

    seen, held_out = numbers[:shown], numbers[shown:]
    found: dict[str, Any] = {
        "rank_correlation": {
            "seen_tasks": correlations(seen[:200], 0),
            "held_out_tasks": correlations(held_out, 0),
            "held_out_tasks_others_data": correlations(held_out, max(1, len(held_out) // 2)),
        },
        "spread_of_accuracy": float(predictor.spread),
    }
    if isinstance(predictor, Predictor):  # the papers' does not know level and gain apart
        known = [task for task in held_out if np.isfinite(true[:, task]).any()]
        levels = [float(np.nanmean(true[:, task])) for task in known]
        found["level_correlation_held_out"] = spearman(predictor.level(vectors[known]).cpu().numpy(), levels)
    return found
