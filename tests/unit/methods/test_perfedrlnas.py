"""PerFedRLNAS: who gets which subnet, what comes back, and how policies and the supernet move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.errors import InvalidConfig
from fedloom.core.hardware import Hardware
from fedloom.core.messages import TRAIN, Instruction, Report, payload_bytes
from fedloom.core.method import Answer
from fedloom.maths import policy
from fedloom.methods import perfedrlnas
from fedloom.spaces.budget import Bounded
from fedloom.testing import Played
from fedloom.training.local import Trainer
from fedloom.training.peak import MeasuredPeak

Tiny = Callable[..., Settings]
OWN = "method=perfedrlnas"


@pytest.fixture
def played(tiny: Tiny) -> Played:
    return Played(tiny(OWN))


def architecture_of(instruction: Instruction) -> Architecture:
    return Architecture.parse(str(instruction.facts["architecture"]))


def reported(instruction: Instruction, accuracy: float, change: float = 0.0, examples: int = 10, **facts: float) -> Report:
    """What a client would say whose training added ``change`` to every entry."""
    update = {name: np.full_like(array, change) for name, array in instruction.arrays["weights"].items()}
    told = {"accuracy": accuracy, "examples": examples, "seconds": 1.0, **facts}
    return Report(instruction.client, instruction.round, {"update": update}, told)


def sent_to(played: Played, state: Any, client: str) -> Instruction:
    instruction: Instruction = played.method.instruct(state, client, TRAIN)
    return instruction


# -- what travels -------------------------------------------------------------------------
@pytest.mark.parametrize("space", ["mobilenetv3", "darts", "nasvit"])
def test_only_a_subnet_travels_and_its_bytes_say_so(tiny: Tiny, space: str) -> None:
    played = Played(tiny(OWN, f"space={space}"))
    supernet, whole = played.method.tools.supernet, played.state.weights
    for instruction in played.method.plan(played.state, played.federation.names):
        architecture, sent = architecture_of(instruction), instruction.arrays["weights"]
        regions = supernet.regions(architecture)
        assert set(sent) == set(regions)
        assert all(np.array_equal(sent[name], whole[name][region]) for name, region in regions.items())
        entries = sum(array.size for array in sent.values())
        facts = len('{"architecture": ""}') + len(architecture.id)
        assert payload_bytes(instruction) == 4 * entries + facts < 4 * sum(array.size for array in whole.values())
        answer = played.answer(instruction)
        assert {name: array.shape for name, array in answer.report.arrays["update"].items()} == {n: a.shape for n, a in sent.items()}
        assert set(answer.report.facts) == {"accuracy", "examples", "seconds"}


def test_architectures_are_drawn_from_the_clients_own_policy(played: Played) -> None:
    method, state = played.method, played.state
    sizes = method.tools.space.sizes
    wanted = sizes - 1
    sure = np.stack([np.where(np.arange(sizes.max()) == wanted[:, None], 50.0, 0.0), *np.zeros((2, len(sizes), sizes.max()))])
    state = replace(state, policies={"client-001": sure})
    assert architecture_of(sent_to(played, state, "client-001")) == method.tools.space.canonical(wanted)
    others = {architecture_of(sent_to(played, replace(state, round=number), "client-000")) for number in range(20)}
    assert len(others) == 20  # nothing known: uniform, and another in every round
    assert architecture_of(method.farewell(state, "client-001")) == method.tools.space.canonical(wanted)


# -- aggregation ---------------------------------------------------------------------------
def test_entries_are_averaged_over_those_who_hold_them(played: Played) -> None:
    method, state = played.method, played.state
    first, second = (sent_to(played, state, client) for client in ("client-000", "client-001"))
    after = method.absorb(state, [reported(first, 0.5, 1.0, examples=30), reported(second, 0.5, 3.0, examples=10)])
    supernet = method.tools.supernet
    held = [supernet.regions(architecture_of(instruction)) for instruction in (first, second)]
    seen: set[float] = set()
    for name, before in state.weights.items():
        total, count = np.zeros(before.shape), np.zeros(before.shape)
        for regions, change in zip(held, (1.0, 3.0), strict=True):
            if name in regions:
                total[regions[name]] += change
                count[regions[name]] += 1
        expected = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
        assert after.weights[name] - before == pytest.approx(expected, abs=1e-5)
        assert np.array_equal(after.weights[name][count == 0], before[count == 0])  # bit for bit
        seen |= {float(value) for value in np.unique(expected)}
    assert seen == {0.0, 1.0, 2.0, 3.0}  # nobody, one, both, the other


def test_the_authors_code_adds_shares_of_updates(tiny: Tiny) -> None:
    played = Played(tiny(OWN, "perfedrlnas.averaging=fedavg"))
    first, second = (sent_to(played, played.state, client) for client in ("client-000", "client-001"))
    after = played.method.absorb(played.state, [reported(first, 0.5, 1.0, examples=30), reported(second, 0.5, 3.0, examples=10)])
    moved = {round(float(value), 3) for name, array in after.weights.items() for value in np.unique(array - played.state.weights[name])}
    assert moved == {0.0, 0.75, 1.5}  # 30/40 * 1, 10/40 * 3, and both


# -- policies ---------------------------------------------------------------------------------
def probabilities(played: Played, state: Any, client: str) -> np.ndarray:
    return policy.probabilities(played.method._policy(state, client)[0], played.method.tools.space.sizes)


def test_rewards_move_the_policies_of_participants_alone(played: Played) -> None:
    method, state = played.method, played.state
    good, bad = (sent_to(played, state, client) for client in ("client-000", "client-001"))
    after = method.absorb(state, [reported(good, 0.9), reported(bad, 0.1)])
    assert set(after.policies) == set(after.visits) == {"client-000", "client-001"}
    uniform = probabilities(played, state, "client-002")
    for instruction, likelier in ((good, True), (bad, False)):
        architecture = architecture_of(instruction)
        active = method.tools.space.active(architecture.choices)
        found = probabilities(played, after, instruction.client)
        genes, chosen = np.flatnonzero(active), np.array(architecture.choices)[active]
        assert ((found[genes, chosen] > uniform[genes, chosen]) == likelier).all()
        assert np.array_equal(found[~active], uniform[~active])  # without effect, without blame
    again = method.absorb(replace(after, round=7), [reported(sent_to(played, replace(after, round=7), "client-000"), 0.9)])
    assert np.array_equal(again.policies["client-001"], after.policies["client-001"])
    assert int(again.visits["client-000"]) == 2 and int(again.visits["client-001"]) == 1


def test_the_average_is_of_latest_accuracies_this_round_included(played: Played) -> None:
    method, state = played.method, played.state
    first = method.absorb(
        state, [reported(sent_to(played, state, name), value) for name, value in (("client-000", 0.2), ("client-001", 0.4))]
    )
    instruction = sent_to(played, first, "client-000")
    reports = [reported(instruction, 0.6)]
    accuracies = {**first.accuracies, "client-000": np.array(0.6)}
    assert method._rewards(reports, accuracies, {"client-000": np.array(0.0)}) == pytest.approx([0.6 - (0.6 + 0.4) / 2])
    assert {name: float(value) for name, value in method.absorb(first, reports).accuracies.items()} == {
        "client-000": 0.6,
        "client-001": 0.4,
    }


def on(played: Played, instruction: Instruction, **hardware: float) -> Answer:
    """A client's answer on hardware of its own."""
    site = replace(played.site(instruction.client), hardware=Hardware(**hardware))  # type: ignore[arg-type]
    answer: Answer = played.method.answer(instruction, site)
    return answer


def test_round_time_is_training_and_both_ways(played: Played, tiny: Tiny) -> None:
    instruction = sent_to(played, played.state, "client-000")
    answer = on(played, instruction, gmacs=2.0, mbits=8.0)
    update = sum(array.nbytes for array in answer.report.arrays["update"].values())
    link = (payload_bytes(instruction) + update) / 1e6
    assert answer.report.facts["seconds"] == pytest.approx(3 * answer.diary.trained_macs / 2e9 + link)
    clock = Played(tiny(OWN, "perfedrlnas.time=measured"))
    measured = on(clock, instruction, gmacs=1e-6, mbits=8.0).report.facts["seconds"]  # not worked out: that would take days
    assert link < float(measured) < link + 60


def test_a_subnet_that_does_not_fit_is_survived_and_avoided(tiny: Tiny) -> None:
    played = Played(tiny(OWN, "perfedrlnas.memory_weight=1"))
    method, state = played.method, played.state
    small, large = (sent_to(played, state, client) for client in ("client-000", "client-001"))
    fits, fails = on(played, small, memory_mb=1e6), on(played, large, memory_mb=1e-3)
    need = fits.diary.peak_memory_mb
    assert fits.report.facts["memory"] == pytest.approx(need / 1e6, rel=1e-6) and fits.diary.notes["out_of_memory"] == 0
    assert fails.report == Report("client-001", 0) and fails.diary.notes["out_of_memory"] == 1
    after = method.absorb(state, [fits.report, fails.report])
    alone = method.absorb(state, [fits.report])
    assert all(np.array_equal(after.weights[name], alone.weights[name]) for name in after.weights)
    assert set(after.accuracies) == {"client-000"} and set(after.policies) == {"client-000", "client-001"}
    reached = float(fits.report.facts["accuracy"])
    reports, latest = [fits.report, fails.report], (after.accuracies, after.memories)
    middle = (need / 1e6 + 1) / 2
    assert method._rewards(reports, *latest) == pytest.approx([middle - need / 1e6, -reached - 1 + middle], abs=1e-6)
    written = Played(tiny(OWN, "perfedrlnas.memory_weight=1", "perfedrlnas.memory_baseline=false")).method
    assert written._rewards(reports, *latest) == pytest.approx([-need / 1e6, -reached - 1], abs=1e-6)
    nobody = method.absorb(state, [fails.report])
    assert all(np.array_equal(nobody.weights[name], state.weights[name]) for name in state.weights) and nobody.round == 1


def test_memory_that_really_runs_out_is_survived(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "train_network", full)
    answer = played.answer(sent_to(played, played.state, "client-000"))
    assert not answer.report.facts and not answer.report.arrays and answer.diary.notes["out_of_memory"] == 1


def test_measured_memory_decides_what_fits(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    class Peak:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def megabytes(self) -> float:
            return 30.0

    monkeypatch.setattr(perfedrlnas, "MeasuredPeak", Peak)
    played = Played(tiny(OWN, "perfedrlnas.memory_weight=1"))
    measuring = replace(played.method, settings=replace(played.method.settings, memory="measured"))
    sent = sent_to(played, played.state, "client-000")
    played.method = measuring
    assert on(played, sent, memory_mb=0.1).diary.notes["memory"] == pytest.approx(300)  # not worked out
    fits, fails = on(played, sent, memory_mb=40.0), on(played, sent, memory_mb=29.0)
    assert fits.report.facts["memory"] == 0.75 and fits.report.arrays
    assert not fails.report.facts and not fails.report.arrays and fails.diary.notes["out_of_memory"] == 1
    with pytest.raises(InvalidConfig, match=r"memory=measured needs a GPU.*memory=analytic"):
        measuring.start(0)


@pytest.mark.gpu
def test_memory_measured_on_a_gpu() -> None:
    device = torch.device("cuda")
    peak = MeasuredPeak(device)
    kept = torch.empty(1_000_000, device=device)  # 4 MB
    for _ in range(3):
        torch.empty(2_000_000, device=device)  # 8 MB, given back each time
    assert peak.megabytes() == pytest.approx(12.0, rel=0.05)
    assert MeasuredPeak(device).megabytes() == 0.0 and len(kept) == 1_000_000  # what lay there before does not count


def test_policies_learn_what_fits(tiny: Tiny) -> None:
    """Half of what a policy that knows nothing draws is too large; once policies have settled, less than 2 % is."""
    played = Played(tiny(OWN, "perfedrlnas.memory_weight=1", "perfedrlnas.time_weight=0"))
    space = played.method.tools.space
    drawn = drawn_later(played, played.state)
    limit = float(np.median([space.cost(architecture).parameters for architecture in drawn]))

    def report(instruction: Instruction) -> Report:
        used = space.cost(architecture_of(instruction)).parameters / limit
        return reported(instruction, 0.5, memory=used) if used <= 1 else Report(instruction.client, instruction.round)

    state = played.state
    for _ in range(100):
        state = played.method.absorb(state, [report(sent_to(played, state, client)) for client in played.federation.names])
    later = [space.cost(architecture).parameters > limit for architecture in drawn_later(played, state, 100)]
    assert 0.4 < np.mean([space.cost(architecture).parameters > limit for architecture in drawn]) < 0.6 and np.mean(later) < 0.02


Number = Callable[[Architecture], float]


def settled(played: Played, rounds: int, accuracy: Number, seconds: Number = lambda _: 1.0) -> Any:
    """The state after rounds in which every client reports an accuracy and a time that its architecture decides."""
    state, clients = played.state, played.federation.names
    for _ in range(rounds):
        instructions = [sent_to(played, state, client) for client in clients]
        given = [(one, architecture_of(one)) for one in instructions]
        reports = [reported(one, accuracy(architecture), seconds=seconds(architecture)) for one, architecture in given]
        state = played.method.absorb(state, reports)
    return state


def drawn_later(played: Played, state: Any, draws: int = 20) -> list[Architecture]:
    """What the policies of a state draw, in rounds to come."""
    later = [replace(state, round=state.round + number) for number in range(draws)]
    return [played.method.drawn(one, client) for one in later for client in played.federation.names]


def test_policies_settle_on_what_is_rewarded(tiny: Tiny) -> None:
    """Accuracy is how many genes have their last choice; clients report in every round."""
    played = Played(tiny(OWN, "space=darts", "perfedrlnas.rate=0.3", "perfedrlnas.time_weight=0"))
    top = played.method.tools.space.sizes - 1

    def share(state: Any) -> float:
        return float(np.mean([np.array(architecture.choices) == top for architecture in drawn_later(played, state)]))

    state = settled(played, 100, lambda architecture: float((np.array(architecture.choices) == top).mean()))
    assert share(played.state) == pytest.approx(1 / 8, abs=0.04) and share(state) > 0.3


def test_the_time_term_makes_subnets_cheaper(tiny: Tiny) -> None:
    played = Played(tiny(OWN, "perfedrlnas.rate=0.2", "perfedrlnas.time_weight=1"))
    space = played.method.tools.space

    def macs(state: Any) -> float:
        return float(np.mean([space.cost(architecture).macs for architecture in drawn_later(played, state)]))

    assert macs(settled(played, 60, lambda _: 0.5, lambda a: space.cost(a).macs / 1e5)) < 0.8 * macs(played.state)


def test_a_budget_is_never_exceeded(tiny: Tiny) -> None:
    played = Played(tiny(OWN, "budget.parameters=40000"))
    space = played.method.tools.space
    assert isinstance(space, Bounded)
    for number in range(30):
        state = replace(played.state, round=number)
        assert all(space.fits(architecture_of(sent_to(played, state, client))) for client in played.federation.names)
    state = settled(played, 10, lambda architecture: space.cost(architecture).parameters / 1e5)  # large ones are rewarded
    assert all(space.fits(architecture_of(played.method.farewell(state, client))) for client in played.federation.names)


def test_who_never_took_part_gets_what_the_others_like(played: Played) -> None:
    state = settled(played, 1, lambda _: 0.5)
    some = {name: table for name, table in state.policies.items() if name != "client-002"}
    state = replace(state, policies=some)
    expected = np.mean([policy.probabilities(table[0], played.method.tools.space.sizes) for table in some.values()], 0)
    found = policy.probabilities(played.method._usual(state), played.method.tools.space.sizes)
    assert found == pytest.approx(expected, abs=1e-6)
    assert played.farewell("client-002").model is not None


def test_the_order_in_which_policies_were_read_changes_nothing(played: Played) -> None:
    state = settled(played, 3, lambda architecture: architecture.choices[0] / 3)
    turned = replace(state, policies=dict(reversed(state.policies.items())))
    assert len(turned.policies) > 2 and np.array_equal(played.method._usual(turned), played.method._usual(state))


@pytest.mark.filterwarnings("ignore:overflow")  # a policy can be finite once and draw from huge numbers
@pytest.mark.parametrize("setting", ["time_weight=1e308", "memory_weight=1e308", "rate=1e308"])
def test_a_policy_that_is_not_finite_is_refused(tiny: Tiny, setting: str) -> None:
    played = Played(tiny(OWN, f"perfedrlnas.{setting}"))
    state = played.state
    for _ in range(9):
        reports = [
            reported(sent_to(played, state, name), 0.1 * number, seconds=1.0 + 100 * number, memory=0.1 * number)
            for number, name in enumerate(played.federation.names)
        ]
        try:
            state = played.method.absorb(state, reports)
        except InvalidConfig as error:
            words = ("no longer finite", "perfedrlnas.time_weight", "perfedrlnas.memory_weight", "perfedrlnas.rate")
            assert all(word in str(error) for word in words)
            return
    pytest.fail("nothing was refused")
