"""FedRep: first the head, then the body; heads stay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedloom.config import Settings
from fedloom.core.client_site import ClientMemory
from fedloom.core.seeds import rng
from fedloom.testing import Played
from fedloom.training.local import NetworkJob

HEAD = {"classifier.weight", "classifier.bias"}


@pytest.fixture
def played(tiny: Callable[..., Settings]) -> Played:
    return Played(tiny("method=fedrep", "fedrep.head_epochs=2", "training.schedule=constant", "training.rate=0.1"))


def test_the_head_is_trained_first_and_then_the_body_under_it(played: Played) -> None:
    instruction = played.method.plan(played.state, played.federation.names)[0]
    answer, tools, site = played.answer(instruction), played.tools, played.site(instruction.client)
    before = {**instruction.arrays["weights"], **instruction.arrays["head"]}
    network = tools.space.find(str(instruction.facts["architecture"]), rng(0))

    def trained(start: dict[str, np.ndarray], rates: list[float], purpose: str, part: str) -> dict[str, np.ndarray]:
        draw = rng(instruction.seed, purpose)
        job = NetworkJob(tools.own(start), network, site.data.train, rates, draw, part)  # type: ignore[arg-type]
        return tools.arrays(tools.trainer.train_networks([job])[0].weights)

    headed = trained(before, [0.1, 0.1], "head", "head")
    after = trained(headed, [0.1], "train", "body")
    assert all(np.array_equal(headed[name], before[name]) == (name not in HEAD) for name in before if headed[name].size)
    assert set(answer.memory.arrays) == HEAD == set(instruction.arrays["head"])
    assert all(np.array_equal(answer.memory.arrays[name], headed[name]) for name in HEAD)
    assert set(answer.report.arrays["update"]) == set(before) - HEAD
    for name, update in answer.report.arrays["update"].items():
        assert np.array_equal(update, after[name] - before[name]), name
    assert played.method.epochs(5) == 7


def test_the_body_is_the_mean_by_examples_and_the_head_is_nobodys(played: Played) -> None:
    before, answers = played.state, played.round()
    counts = [answer.report.facts["examples"] for answer in answers]
    assert len(answers) == 2 and set(before.weights).isdisjoint(HEAD)
    for name, weights in before.weights.items():
        mean = sum(count * answer.report.arrays["update"][name] for count, answer in zip(counts, answers, strict=True)) / sum(counts)
        assert played.state.weights[name] == pytest.approx(weights + mean, abs=1e-6), name
    assert all(np.array_equal(played.state.head[name], before.head[name]) for name in HEAD)
    first, second = (answer.memory.arrays["classifier.weight"] for answer in answers)
    assert not np.array_equal(first, second)


def test_a_client_goes_on_with_its_head_and_tunes_nothing_else_at_the_end(played: Played) -> None:
    (answer, *_) = played.round()
    instruction = played.method.farewell(played.state, answer.report.client)
    known, fresh = played.answer(instruction), played.answer(instruction, ClientMemory(dict(played.state.head)))
    assert known.model is not None and fresh.model is not None
    assert not np.array_equal(known.model.arrays["classifier.weight"], fresh.model.arrays["classifier.weight"])
    assert all(np.array_equal(known.model.arrays[name], array) for name, array in played.state.weights.items())
    assert known.memory == played.memories[answer.report.client] and not known.report.arrays
