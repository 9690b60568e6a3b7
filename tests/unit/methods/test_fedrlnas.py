"""FedRLNAS: one policy, its rewards and its phases, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import TRAIN, Instruction, Report
from fedloom.testing import Played

Tiny = Callable[..., Settings]


def play(tiny: Tiny, *more: str) -> Played:
    return Played(tiny("method=fedrlnas", "rounds=4", "participants=3", "fedrlnas.warmup=0", *more))


def reported(instruction: Instruction, accuracy: float, change: float = 0.0) -> Report:
    update = {name: np.full_like(array, change) for name, array in instruction.arrays["weights"].items()}
    return Report(instruction.client, instruction.round, {"update": update}, {"accuracy": accuracy, "examples": 10})


def architecture_of(instruction: Instruction) -> Architecture:
    return Architecture.parse(str(instruction.facts["architecture"]))


def after(played: Played, accuracies: list[float], change: float = 0.0) -> Any:
    """The state after a round in which these were reported; the next one of ``played``."""
    instructions = played.method.plan(played.state, played.federation.names)
    reports = [reported(one, accuracy, change) for one, accuracy in zip(instructions, accuracies, strict=True)]
    played.state = played.method.absorb(played.state, reports)
    return [architecture_of(one) for one in instructions]


def test_the_policy_moves_by_the_mean_gradient_of_rewards(tiny: Tiny) -> None:
    """A first step of Adam is the rate times the sign of the gradient; the baseline is at 0.5 between chance and the mean."""
    played = play(tiny, "fedrlnas.rate=0.1", "fedrlnas.follow=0.5")
    space = played.tools.space
    tried = after(played, [0.9, 0.1, 0.5])
    baseline = 0.5 * 0.1 + 0.5 * 0.5
    assert float(played.state.policy["baseline"]) == pytest.approx(baseline)
    gradient = np.zeros((len(space.genes), int(space.sizes.max())))
    for architecture, accuracy in zip(tried, (0.9, 0.1, 0.5), strict=True):
        active = space.active(architecture.choices)
        for gene, choice in enumerate(architecture.choices):
            for other in range(int(space.sizes[gene])):
                if active[gene]:
                    gradient[gene, other] += (accuracy - baseline) * ((other == choice) - 1 / space.sizes[gene]) / 3
    assert np.abs(gradient[np.abs(gradient) > 1e-9]).min() > 1e-4
    logits = played.state.policy["table"][0]
    assert logits == pytest.approx(0.1 * np.sign(np.where(np.abs(gradient) > 1e-9, gradient, 0.0)), abs=1e-4)
    assert played.state.policy["table"][1] == pytest.approx(0.5 * gradient) and played.state.steps == 1


def test_all_clients_draw_from_one_policy_and_end_with_its_most_likely_architecture(tiny: Tiny) -> None:
    played = play(tiny, "fedrlnas.rate=50")
    tried = after(played, [1.0, 0.0, 0.0])
    assert len(set(tried)) == 3
    client = played.federation.names[-1]
    logits, space = played.state.policy["table"][0], played.tools.space
    best = space.canonical(np.array([row[: space.sizes[gene]].argmax() for gene, row in enumerate(logits)]))
    assert architecture_of(played.method.farewell(played.state, client)) == best
    assert architecture_of(played.method.instruct(played.state, client, TRAIN)) == best  # so sure is it now


def test_the_phases(tiny: Tiny) -> None:
    played = play(tiny, "rounds=8", "fedrlnas.warmup=0.25")  # two rounds warm up, two search, four train what was found
    found = []
    for _ in range(8):
        before = played.state.policy["table"]
        tried = after(played, [0.9, 0.1, 0.3])
        found.append((not np.array_equal(before, played.state.policy["table"]), len(set(tried)) == 1))
    assert found == [(False, False)] * 2 + [(True, False)] * 2 + [(False, True)] * 4


@pytest.mark.parametrize("scratch", ["true", "false"])
def test_what_was_found_is_trained_from_scratch_if_asked(tiny: Tiny, scratch: str) -> None:
    played = play(tiny, f"fedrlnas.scratch={scratch}")
    first = played.state.weights
    for _ in range(2):
        after(played, [0.5, 0.5, 0.5], change=7.0)
    moved = max(float(np.abs(array - first[name]).max()) for name, array in played.state.weights.items())
    assert (moved < 6) == (scratch == "true") and moved > 0
    kept = played.state.weights
    after(played, [0.5, 0.5, 0.5])
    assert all(np.array_equal(array, kept[name]) for name, array in played.state.weights.items())  # once


def test_phases_must_leave_a_round_to_search(tiny: Tiny) -> None:
    with pytest.raises(InvalidConfig, match=r"leave none of 4 rounds to search\. Lower one"):
        play(tiny, "fedrlnas.warmup=0.5", "fedrlnas.retrain=0.5")
    with pytest.raises(InvalidConfig, match=r"averaging\.last reaches back.*at most 2"):
        play(tiny, "fedrlnas.scratch=true", "averaging.last=3")


def test_the_reward_is_the_accuracy_on_validation_images_after_training(tiny: Tiny) -> None:
    played = play(tiny)
    instruction = played.method.plan(played.state, played.federation.names)[0]
    site = played.site(instruction.client)
    answer = played.method.answer(instruction, site)
    assert answer.diary.evaluated_architectures == 1 and site.work.scored_macs > 0
    assert answer.report.facts["accuracy"] == pytest.approx(answer.diary.validation_accuracy)
    assert set(answer.report.facts) == {"accuracy", "examples"} and len(site.data.validation) > 0
