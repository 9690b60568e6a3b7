"""FedMN: what a client chose, what of it leaves and how it is averaged. Gates and modules: tests/unit/training/test_objectives.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom.config import Settings
from fedloom.core.client_site import ClientMemory
from fedloom.testing import Played
from fedloom.training.objectives import Modules

STEPS = ("training.batch=100", "training.schedule=constant", "training.rate=0.1", "training.crop=0", "participants=3")


def play(tiny: Callable[..., Settings], *changes: str) -> Played:
    return Played(tiny("method=fedmn", *STEPS, *changes))


def test_the_pool_has_different_classifiers_on_one_body(tiny: Callable[..., Settings]) -> None:
    played, plainly = play(tiny), Played(tiny("method=fedavg", *STEPS))
    pool = {name for name in played.state.weights if name.startswith("module")}
    assert pool == {f"module{number}/classifier.{name}" for number in range(3) for name in ("weight", "bias")}
    assert {*played.state.weights} - pool == {name for name in plainly.state.weights if not name.startswith("classifier.")}
    first, second, _ = (played.state.weights[f"module{number}/classifier.weight"] for number in range(3))
    assert not np.allclose(first, second)


def test_only_chosen_modules_leave_and_their_mean_is_over_those_who_chose_them(tiny: Callable[..., Settings]) -> None:
    """Three clients with known gates: two take module 0, one of them module 1 as well, the third module 2."""
    played = play(tiny, "training.weight_decay=0.1")
    choices = {"client-000": [9, -9, -9], "client-001": [9, 9, -9], "client-002": [-5, -4, -3]}
    played.memories = {client: ClientMemory({"gates": np.array(gates, np.float32)}) for client, gates in choices.items()}
    choices["client-002"] = [-9, -9, 9]  # the highest, although it is below zero
    before, answers = played.state.weights, played.round()
    for answer in answers:
        for name, update in answer.report.arrays["update"].items():
            chosen = "/" not in name or choices[answer.report.client][int(name[6])] > 0
            assert bool(answer.report.arrays["coverage"][name].all()) == chosen, name
            assert "/" not in name or chosen == bool(np.abs(update).max() > 0), name
        assert set(answer.memory.arrays) == {"gates"}
    reports = {answer.report.client: answer.report for answer in answers}
    for number, clients in ((0, ["client-000", "client-001"]), (1, ["client-001"]), (2, ["client-002"])):
        name = f"module{number}/classifier.weight"
        updates, sizes = ([reports[own].arrays["update"][name] for own in clients], [reports[own].facts["examples"] for own in clients])
        assert played.state.weights[name] - before[name] == pytest.approx(np.average(updates, axis=0, weights=sizes), abs=1e-6)


def test_a_module_that_nobody_chose_stays(tiny: Callable[..., Settings]) -> None:
    played = play(tiny, "participants=1")
    gates = {"gates": np.array([1, 1, -1], np.float32)}
    played.memories = {client: ClientMemory(gates) for client in played.federation.names}
    before = played.state.weights["module2/classifier.weight"]
    played.round()
    assert np.array_equal(played.state.weights["module2/classifier.weight"], before)
    assert not np.array_equal(played.state.weights["module1/classifier.weight"], before)


def test_the_personal_network_is_folded(tiny: Callable[..., Settings]) -> None:
    """Without fine-tuning its classifier is the mean of the chosen modules; of all of them for a client that was never drawn."""
    played = play(tiny, "training.finetune_epochs=0")
    played.round()
    modules = [played.state.weights[f"module{number}/classifier.weight"] for number in range(3)]
    for memory, chosen in ((ClientMemory({"gates": np.array([-1, 1, 2], np.float32)}), [1, 2]), (ClientMemory(), [0, 1, 2])):
        answer = played.answer(played.method.farewell(played.state, "client-000"), memory)
        assert answer.model is not None and answer.memory == memory
        expected = np.mean([modules[number] for number in chosen], axis=0)
        assert answer.model.arrays["classifier.weight"] == pytest.approx(expected, abs=1e-6)
        assert not any(name.startswith(("module", "gates")) for name in answer.model.arrays)


def test_first_gates_follow_from_the_seed_and_later_ones_are_remembered(tiny: Callable[..., Settings]) -> None:
    played = play(tiny)
    (instruction, *_) = played.method.plan(played.state, played.federation.names)
    one, again = played.answer(instruction), played.answer(instruction)
    other = played.answer(replace(instruction, seed=instruction.seed + 1))
    assert np.array_equal(one.memory.arrays["gates"], again.memory.arrays["gates"])
    assert not np.array_equal(one.memory.arrays["gates"], other.memory.arrays["gates"])
    known = ClientMemory({"gates": np.array([50, -50, -50], np.float32)})
    assert played.answer(instruction, known).memory.arrays["gates"] == pytest.approx([50, -50, -50], abs=1)
    assert Modules.opened(torch.tensor([50.0, -50.0, -50.0])).tolist() == [1, 0, 0]
