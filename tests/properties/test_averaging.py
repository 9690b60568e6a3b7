"""Averaging: what holds for any updates, any coverage and any numbers of examples."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from fedloom.maths.averaging import AVERAGING, coverage, coverage_effort, coverage_equal, fedavg

COVERED = ("coverage", "coverage_equal", "coverage_effort")
TOLERANCE = 1e-5  # float32 results of updates up to 100


ROBUST = ("clipped", "median", "trimmed_mean")


@dataclass
class Round:
    """What the clients of a round sent, and by entry who trained it: (clients, *shape)."""

    updates: list[dict[str, Any]]
    counts: list[dict[str, Any]]
    examples: list[float]

    def trained(self, name: str) -> Any:
        return np.stack(
            [np.broadcast_to(count[name], update[name].shape) > 0 for update, count in zip(self.updates, self.counts, strict=True)]
        )

    def values(self, name: str) -> Any:
        return np.stack([update[name] for update in self.updates])

    def average(self, rule: str) -> dict[str, Any]:
        return AVERAGING[rule].make(self.updates, self.counts, self.examples)


@st.composite
def rounds(draw: st.DrawFn, least: int = 0) -> Round:
    """A round of one to five clients; ``least``: the fewest steps an entry was trained in."""
    clients = draw(st.integers(1, 5))
    shapes = draw(st.lists(stn.array_shapes(min_dims=1, max_dims=3, max_side=3), min_size=1, max_size=2))
    numbers = st.floats(-100, 100, width=32)
    updates: list[dict[str, Any]] = [{} for _ in range(clients)]
    counts: list[dict[str, Any]] = [{} for _ in range(clients)]
    for index, shape in enumerate(shapes):
        for client in range(clients):
            compact = tuple(size if draw(st.booleans()) else 1 for size in shape)
            updates[client][f"p{index}"] = draw(stn.arrays(np.float32, shape, elements=numbers))
            counts[client][f"p{index}"] = draw(stn.arrays(np.int32, compact, elements=st.integers(least, least + 3)))
    examples = draw(st.lists(st.integers(1, 1000).map(float), min_size=clients, max_size=clients))
    return Round(updates, counts, examples)


@pytest.mark.parametrize("rule", AVERAGING)
@settings(max_examples=25)
@given(data=st.data(), sent=rounds())
def test_the_order_of_clients_does_not_matter(rule: str, data: st.DataObject, sent: Round) -> None:
    order = data.draw(st.permutations(range(len(sent.updates))))
    turned = Round([sent.updates[i] for i in order], [sent.counts[i] for i in order], [sent.examples[i] for i in order])
    one, other = sent.average(rule), turned.average(rule)
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", AVERAGING)
@settings(max_examples=25)
@given(sent=rounds())
def test_equal_updates_give_that_update_where_anybody_trained(rule: str, sent: Round) -> None:
    sent.updates = [sent.updates[0]] * len(sent.updates)
    for name, mean in sent.average(rule).items():
        anybody = sent.trained(name).any(axis=0) | (rule == "fedavg")
        np.testing.assert_allclose(mean, np.where(anybody, sent.updates[0][name], 0), rtol=1e-6)


@given(sent=rounds(least=1))
def test_coverage_is_fedavg_when_all_trained_everything(sent: Round) -> None:
    plain = sent.average("fedavg")
    for name, mean in sent.average("coverage").items():
        np.testing.assert_allclose(mean, plain[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", COVERED)
@settings(max_examples=25)
@given(sent=rounds())
def test_entries_nobody_trained_are_exactly_zero(rule: str, sent: Round) -> None:
    for name, mean in sent.average(rule).items():
        assert (mean[~sent.trained(name).any(axis=0)] == 0).all()


@pytest.mark.parametrize("rule", AVERAGING)
@settings(max_examples=25)
@given(sent=rounds())
def test_a_mean_lies_between_the_updates_that_made_it(rule: str, sent: Round) -> None:
    for name, mean in sent.average(rule).items():
        took_part = sent.trained(name) | (rule == "fedavg")
        low = np.where(took_part, sent.values(name), np.inf).min(axis=0)
        high = np.where(took_part, sent.values(name), -np.inf).max(axis=0)
        if rule in ROBUST:  # an update may have been shortened
            low, high = np.minimum(low, 0), np.maximum(high, 0)
        anybody = took_part.any(axis=0)
        assert (mean[anybody] >= low[anybody] - TOLERANCE).all()
        assert (mean[anybody] <= high[anybody] + TOLERANCE).all()


@given(sent=rounds(), count=st.integers(1, 1000))
def test_equal_weights_make_the_rules_agree(sent: Round, count: int) -> None:
    alike = [float(count)] * len(sent.updates)
    once = [{name: (steps > 0).astype(np.int32) for name, steps in client.items()} for client in sent.counts]
    weighted, equal = coverage(sent.updates, sent.counts, alike), coverage_equal(sent.updates, sent.counts, sent.examples)
    effort = coverage_effort(sent.updates, once, sent.examples)
    by_examples = coverage(sent.updates, once, sent.examples)
    for name in weighted:
        np.testing.assert_allclose(weighted[name], equal[name], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(effort[name], by_examples[name], rtol=1e-6, atol=1e-6)


@given(sent=rounds())
def test_an_absent_client_changes_nothing_that_it_did_not_train(sent: Round) -> None:
    idle = {name: np.zeros_like(steps) for name, steps in sent.counts[0].items()}
    more = Round([*sent.updates, sent.updates[0]], [*sent.counts, idle], [*sent.examples, 500.0])
    for rule in COVERED:
        one, other = sent.average(rule), more.average(rule)
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("rule", AVERAGING)
@settings(max_examples=25)
@given(sent=rounds())
def test_inputs_are_unchanged_and_results_are_new(rule: str, sent: Round) -> None:
    before = copy.deepcopy(sent)
    mean = sent.average(rule)
    for old, new in ((before.updates, sent.updates), (before.counts, sent.counts)):
        assert all(np.array_equal(old[i][name], new[i][name]) for i in range(len(old)) for name in old[i])
    assert sent.examples == before.examples
    for name, array in mean.items():
        assert array.shape == sent.updates[0][name].shape and array.dtype == sent.updates[0][name].dtype
        assert not any(np.shares_memory(array, update[name]) for update in sent.updates)


@given(sent=rounds())
def test_fedavg_is_the_weighted_mean_of_numpy(sent: Round) -> None:
    for name, mean in fedavg(sent.updates, [], sent.examples).items():
        np.testing.assert_allclose(mean, np.average(sent.values(name).astype(float), axis=0, weights=sent.examples), rtol=1e-5, atol=1e-5)


@settings(max_examples=25)
@given(sent=rounds(), lie=st.floats(-1e6, 1e6, width=32))
@pytest.mark.parametrize("rule", ROBUST)
def test_one_of_three_or_more_cannot_move_a_robust_mean_further_than_an_honest_step(rule: str, sent: Round, lie: float) -> None:
    if len(sent.updates) < 3:
        return
    honest = max(np.sqrt(sum(float(np.square(array.astype(float)).sum()) for array in update.values())) for update in sent.updates[1:])
    sent.updates[0] = {name: np.full_like(array, lie) for name, array in sent.updates[0].items()}
    for mean in sent.average(rule).values():
        assert np.abs(mean).max(initial=0) <= honest * (1 + 1e-5) + TOLERANCE
