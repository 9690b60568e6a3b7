"""FedorAS: limits of tiers, per-operation averaging, the search and the last stage, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.hardware import Hardware
from fedloom.core.messages import TRAIN, Instruction, Report
from fedloom.testing import Played

Tiny = Callable[..., Settings]
TIERS = ("hardware.gmacs=[1, 10]", "fedoras.limits=[0.3, 1]")
STAGES = ("rounds=4", "fedoras.supernet=0.25", "fedoras.search=0.5", "fedoras.population=6")  # one, two, one


def play(tiny: Tiny, *more: str) -> Played:
    return Played(tiny("method=fedoras", *STAGES, "participants=3", *more))


def told(instruction: Instruction, tier: int | None, **arrays: dict[str, np.ndarray]) -> Report:
    facts = {"examples": 10, **({} if tier is None else {"tier": tier})}
    return Report(instruction.client, instruction.round, {"update": {}, "coverage": {}, "accuracies": {}, **arrays}, facts)


def test_steps_of_a_tier_keep_its_limit_and_their_images_are_counted(tiny: Tiny) -> None:
    played = play(tiny, *TIERS, "split.size=40", "training.batch=4", "training.epochs=2")
    method, tools = played.method, played.tools
    instruction = method.plan(played.state, played.federation.names)[0]
    assert instruction.facts["tier"] == 0  # the lowest limit: nobody knows yet
    answer = method.answer(instruction, replace(played.site(instruction.client), hardware=Hardware(tier=1)))
    assert answer.report.facts["tier"] == 1
    macs = {name: tools.space.cost(tools.space.named[name]).macs for name in ("smallest", "largest")}
    limit = macs["smallest"] + 0.3 * (macs["largest"] - macs["smallest"])
    assert tools.space.cost(Architecture.parse(answer.diary.architecture)).macs <= limit
    seen = 2 * 4 * (len(played.federation.data_of(instruction.client).train) // 4)
    coverage = answer.report.arrays["coverage"]
    assert {int(array.max()) for name, array in coverage.items() if name.startswith("stem.")} == {seen}  # in all of them
    assert any(0 < array.max() < seen for array in coverage.values())


def test_an_entry_is_averaged_by_the_images_that_trained_it(tiny: Tiny) -> None:
    played = play(tiny)
    one, other, _ = played.method.plan(played.state, played.federation.names)

    def report(instruction: Instruction, change: float, images: int) -> Report:
        update = {name: np.full_like(array, change) for name, array in instruction.arrays["weights"].items()}
        coverage = {name: np.full_like(array, images, dtype=np.int32) for name, array in instruction.arrays["weights"].items()}
        coverage["stem.norm.bias"][:2] = (0, images * (change == 1.0))
        return told(instruction, None, update=update, coverage=coverage)

    after = played.method.absorb(played.state, [report(one, 1.0, 30), report(other, 5.0, 10)])
    moved = {name: after.weights[name] - before for name, before in played.state.weights.items()}
    assert moved["stem.conv.weight"] == pytest.approx((30 * 1 + 10 * 5) / 40, abs=1e-5)
    assert moved["stem.norm.bias"][0] == 0 and moved["stem.norm.bias"][1] == pytest.approx(1.0, abs=1e-5)


def test_each_tier_evolves_by_the_mean_of_its_participants(tiny: Tiny) -> None:
    played = play(tiny, *TIERS)
    names, method = played.federation.names, played.method
    state = replace(played.state, round=1, tiers={names[0]: np.array(0), names[1]: np.array(1), names[2]: np.array(1)})
    instructions = [method.instruct(state, client, TRAIN) for client in names]
    for instruction, tier in zip(instructions, "011", strict=True):
        assert np.array_equal(instruction.arrays["candidates"]["choices"], state.choices[tier])
    scores = [[0.1, 0.2, 0.9, 0.3, 0.4, 0.0], [0.0, 0.8, 0.1, 0.2, 0.3, 0.4], [0.6, 0.0, 0.9, 0.2, 0.7, 0.4]]
    reports = [
        told(instruction, tier, accuracies={"accuracy": np.array(row)})
        for instruction, tier, row in zip(instructions, (0, 1, 1), scores, strict=True)
    ]
    after = method.absorb(state, reports)
    assert np.array_equal(after.choices["0"][:3], state.choices["0"][[2, 4, 3]])
    assert np.array_equal(after.choices["1"][:3], state.choices["1"][[2, 4, 1]])  # means 0.3 0.4 0.5 0.2 0.5 0.4
    assert all(np.array_equal(after.weights[name], array) for name, array in state.weights.items())
    for tier, rows in after.choices.items():
        children = [method.tools.space.canonical(row) for row in rows]
        assert len(set(children)) == len(children) > 3 and all(method.within(int(tier)).fits(child) for child in children)
    assert method.farewell(after, names[1]).facts["architecture"] == method.tools.space.canonical(state.choices["1"][2]).id
    nobody = method.absorb(state, reports[:1])
    assert np.array_equal(nobody.choices["1"], state.choices["1"])  # nobody of this tier reported


def test_candidates_are_scored_with_the_weights_of_the_supernet(tiny: Tiny) -> None:
    played = play(tiny)
    state = replace(played.state, round=1)
    instruction = played.method.plan(state, played.federation.names)[0]
    site = played.site(instruction.client)
    answer = played.method.answer(instruction, site)
    tools = played.tools
    candidates = [tools.space.canonical(row) for row in instruction.arrays["candidates"]["choices"]]
    expected = tools.scorer.score_subnets(tools.tensors(state.weights), candidates, site.data.validation, site.data.train)
    assert answer.report.arrays["accuracies"]["accuracy"].tolist() == [one.score.accuracy for one in expected]
    assert answer.report.arrays["update"] == {} and answer.diary.evaluated_architectures == 6 and site.work.scored_macs > 0


def test_the_last_stage_trains_the_best_of_each_tier(tiny: Tiny) -> None:
    played = play(tiny)
    before = [played.state.choices]
    for _ in range(3):
        played.round()
        before.append(played.state.choices)
    assert before[0] is not before[-1] and any(not np.array_equal(before[0][tier], before[-1][tier]) for tier in before[0])
    answers = played.round()
    for instruction, answer in zip(played.instructions[-3:], answers, strict=True):
        own = played.tools.space.canonical(before[-1][str(played.method.tier(played.state, instruction.client))][0])
        assert Architecture.parse(str(instruction.facts["architecture"])) == own
        assert set(answer.report.arrays["update"]) == set(played.tools.supernet.regions(own)) and not answer.report.arrays["coverage"]


def test_refusals(tiny: Tiny) -> None:
    with pytest.raises(InvalidConfig, match=r"fedoras has limits of its own.*Remove budget"):
        play(tiny, "budget.parameters=1e9")
    with pytest.raises(InvalidConfig, match=r"fedoras\.limits is empty"):
        play(tiny, "fedoras.limits=[]")
    with pytest.raises(InvalidConfig, match=r"fedoras\.limits has 1 numbers for 2 tiers"):
        tiny("method=fedoras", "hardware.gmacs=[1, 2]", "fedoras.limits=[1]")
