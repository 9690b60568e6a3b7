"""Budgets by tier: no client's network or training exceeds its own, and a weak one receives and returns only its part of the supernet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.boundary import release
from fedloom.core.errors import ClientFailed, InvalidConfig
from fedloom.core.messages import payload_bytes
from fedloom.methods.base import METHODS
from fedloom.methods.fixed import FixedNetwork
from fedloom.spaces.budget import Bounded
from fedloom.testing import Played
from fedloom.testing.methods import differences
from fedloom.training.fleet import Fleet, Tier
from fedloom.training.local import Trainer
from support.untrained import fake_generator

Tiny = Callable[..., Settings]
TIERS = "budget.tiers=[0,1,2]"
MACS = "budget.macs=[400e3,600e3,0]"  # the smallest needs 231,168, the largest 1,635,840
SIZES = "budget.supernet=[60e3,0,0]"  # of 171,786


@pytest.fixture(autouse=True)
def untrained() -> Iterator[None]:
    with fake_generator():
        yield


def limit_of(client: str) -> float:
    """Of the client's macs, from the settings and not from its space."""
    return {"client-000": 400e3, "client-001": 600e3, "client-002": np.inf}[client]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Architecture]:
    """Every architecture that any training step moved."""
    seen: list[Architecture] = []
    for name in ("_train_networks", "_train_supernets"):
        known = getattr(Trainer, name)

        def noted(self: Trainer, jobs: Any, *rest: Any, known: Any = known) -> Any:
            found = known(self, jobs, *rest)
            seen.extend(architecture for one in found for architecture in one.steps)
            return found

        monkeypatch.setattr(Trainer, name, noted)
    return seen


ALIKE = [name for name in METHODS if issubclass(METHODS[name].make, FixedNetwork) and name != "fedavg"]  # one network for all
CASES = [
    pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ())
    for name in METHODS
    if name not in ("spider", "fednas", "fedoras", "fedtp")  # the first refuse budgets; the last has a space of its own, with other costs
]


@pytest.mark.parametrize("name", CASES)
def test_no_clients_network_or_training_exceeds_its_budget(name: str, tiny: Tiny, trained: list[Architecture]) -> None:
    changes = ["heterofl.architecture=smallest", "heterofl.widths=[1,1,1]"] if name == "heterofl" else []
    played = Played(tiny(f"method={name}", TIERS, MACS, "participants=3", "rounds=2", *changes))
    cost = played.tools.supernet.space.cost
    while not played.method.finished(played.state):
        instructions, answers = played.method.plan(played.state, played.federation.names), []
        for instruction in instructions:
            trained.clear()
            answers.append(played.answer(instruction))
            release(answers[-1].report, instruction, played.method.uploads)
            assert trained and max(cost(one).macs for one in trained) <= limit_of(instruction.client)
        played.absorb(instructions, answers)
    for client in played.federation.names:
        trained.clear()
        model = played.farewell(client).model
        assert model and cost(Architecture.parse(model.architecture)).macs <= limit_of(client)
        assert all(cost(one).macs <= limit_of(client) for one in trained)


def test_a_weak_client_gets_and_returns_its_part_and_all_numbers_are_the_same(tiny: Tiny) -> None:
    """As if everybody received the whole supernet and searched within the same limits."""
    settings = tiny(TIERS, MACS, SIZES, "participants=3", "rounds=2")
    cut, whole = Played(settings), Played(settings)
    fleet = whole.tools.fleet
    assert fleet
    tiers = tuple(Uncut(**{name: getattr(tier, name) for name in Tier.__dataclass_fields__}) for tier in fleet.tiers)
    whole.method = replace(whole.method, tools=replace(whole.tools, fleet=Fleet(tiers, fleet.tier_of), _of={}, _cut={}))
    whole.state = whole.method.start(settings.seed)
    weak, strong = "client-000", "client-002"
    while not cut.method.finished(cut.state):
        cut.round(), whole.round()
        assert not differences(cut.state, whole.state)
    for client in cut.federation.names:
        assert not differences(cut.farewell(client).model, whole.farewell(client).model)
    down = {message.client: payload_bytes(message) for message in cut.instructions}
    up = {answer.report.client: payload_bytes(answer.report) for answer in cut.answers if answer.report.arrays}
    assert down[weak] <= 4 * 60e3 < down[strong] / 2 and up[weak] < up[strong] / 2
    assert {payload_bytes(message) for message in whole.instructions} == {down[strong]}


def test_training_outside_of_what_was_received_is_not_reported(tiny: Tiny) -> None:
    played = Played(tiny(TIERS, MACS, SIZES))
    own = played.tools.of("client-000")
    own.check_reach([own.space.named["smallest"]])
    with pytest.raises(ClientFailed, match="outside the part of the supernet"):
        own.check_reach([own.space.named["smallest"], own.space.named["largest"]])
    played.tools.of("client-002").check_reach([own.space.named["largest"]])


class Uncut(Tier):
    """The same limits, and the whole supernet."""

    @property
    def reach(self) -> None:
        return None


def test_tiers_are_as_given_or_spread_and_strangers_get_what_everybody_can_have(tiny: Tiny) -> None:
    played = Played(tiny("budget.tiers=[2,2,0]", MACS, "budget.parameters=[0,60e3,0]"))
    fleet = played.tools.fleet
    assert fleet and fleet.tier_of == {"client-000": 2, "client-001": 2, "client-002": 0}
    assert played.tools.space_of("client-000") == fleet.tiers[2].space != played.tools.space_of("client-002")
    assert not isinstance(fleet.tiers[2].space, Bounded)  # no limit
    stranger = played.tools.space_of("somebody")
    assert isinstance(stranger, Bounded)
    said = {str(limit) for limit in stranger.limits}
    assert {"budget.macs[0] (400,000)", "budget.macs[1] (600,000)", "budget.parameters[1] (60,000)"} <= said
    spread = Played(tiny(MACS)).tools.fleet
    assert spread and sorted(spread.tier_of.values()) == [0, 1, 2]
    assert Played(tiny("budget.macs=450e3")).tools.fleet is None  # one for all is no fleet


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["budget.macs=[300e3,0]", "hardware.gmacs=[1,2,3]"], "budget.macs has 2 entries where there are 3 tiers"),
        (["budget.macs=[]"], "budget.macs has 0 entries"),
        ([MACS, "budget.tiers=[0,1]"], "budget.tiers must have 3 numbers below 3"),
        ([MACS, "budget.tiers=[0,1,3]"], "budget.tiers must have 3 numbers below 3"),
        (["budget.macs=[1,2,3]"], r"budget.macs\[0\] \(1\) is too little"),
        (["method=fedavg", "fedavg.architecture=largest", MACS], r"budget.macs\[0\]"),
        (["method=local", "local.architecture=largest", MACS], r"budget.macs\[0\]"),
        (["method=heterofl", "heterofl.widths=[1,1,1]", MACS], r"budget.macs\[0\]"),
        (["method=spider", "budget.macs=[0,0,1e9]"], "cannot keep a budget"),
        (["method=fednas", "budget.macs=[0,0,1e9]"], "cannot keep a budget"),
        (["method=fedoras", "budget.macs=[0,0,1e9]"], "has limits of its own"),
        (["method=hapfnas", "hapfnas.macs=[1e9]", MACS], "Set one of them"),
        ([MACS, "privacy.secure=true", "participants=3"], "privacy.secure adds up .* parts of different shapes"),
        ([MACS, "privacy.noise=1", "privacy.clip=1", "perfedsde.averaging=fedavg"], "privacy.noise counts on .* parts of different shapes"),
    ],
)
def test_what_cannot_be_kept_is_refused(changes: list[str], words: str, tiny: Tiny) -> None:
    with pytest.raises(InvalidConfig, match=words):
        Played(tiny(*changes))


def test_a_method_that_ignores_budgets_is_caught_at_the_end(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(tiny("method=fedavg", TIERS, MACS))
    played.state = replace(played.state, architecture=played.tools.space.named["largest"].id)
    weights = played.tools.initial_network(0, played.tools.space.named["largest"])
    played.state = replace(played.state, weights=weights)
    with pytest.raises(ClientFailed, match=r"client-000: its network needs .* budget.macs\[0\] \(400,000\) is its limit"):
        played.farewell("client-000")
    assert played.farewell("client-002").model
