"""The same seed and thread count give the same run, bit for bit, whatever else the process does and whoever answers first."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.assemble import new_run
from fedloom.assemble.builder import build
from fedloom.config import Settings
from fedloom.core.messages import Instruction, Report
from fedloom.data.readers import read
from fedloom.data.splits import Federation, make_split
from fedloom.engine.inline import InlineLink
from fedloom.engine.loop import run_rounds, say_farewell
from fedloom.engine.run import Watcher
from fedloom.engine.store import Store
from fedloom.engine.visit import ClientRecords
from fedloom.methods.base import METHODS

Content = Callable[[Path], dict[str, Any]]
QUICK = ("perfedsde", "ditto", "local")  # a search, clients with memories, no rounds; `make slow` has the others


def methods(*, but: str = "") -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in METHODS if name != but]


EVERY_METHOD = methods()


class Federated:
    """A method and a link to its clients, without the rest of a run."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        dataset, device = read(settings.data), torch.device("cpu")
        split = make_split(settings.split, dataset.train.labels, dataset.test.labels, settings.clients, settings.seed)
        federation = Federation(dataset, split, device)
        built = build(settings, dataset, device)
        self.method = built.method
        self.entries: list[Any] = []
        self.folder = folder
        records = ClientRecords(self.method, Store(folder), built.model_facts, self.entries.append)
        self.link = InlineLink(self.method, federation.names, federation.data_of, records)


class Reordered:
    """A link whose clients answer in another order than asked."""

    at_once = 3

    def __init__(self, link: InlineLink, draw: random.Random) -> None:
        self._link, self._draw = link, draw

    def clients(self) -> Sequence[str]:
        return self._link.clients()

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        reports = self._link.exchange(instructions[::-1])
        self._draw.shuffle(reports)
        return reports


def plain(report: Report | Instruction) -> tuple[Any, ...]:
    arrays = {group: {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()} for group, arrays in report.arrays.items()}
    return report.client, report.round, arrays, dict(report.facts)


def plain_state(state: Any) -> dict[str, Any]:
    return {
        name: {key: array.tobytes() for key, array in value.items()} if isinstance(value, dict) else value
        for name, value in vars(state).items()
    }


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_the_same_seed_gives_the_same_run(
    method: str, tiny: Callable[..., Settings], nobody: Watcher, content: Content, tmp_path: Path
) -> None:
    settings = tiny(f"method={method}", "rounds=2", "run.folder=somewhere")
    new_run(settings, tmp_path / "one", nobody)
    torch.manual_seed(99)  # nobody may draw from the global generators
    np.random.seed(99)
    random.seed(99)
    new_run(settings, tmp_path / "two", nobody)
    one, two = content(tmp_path / "one"), content(tmp_path / "two")
    assert len([name for name in one if name.endswith("model.safetensors")]) == 3
    assert sorted(one) == sorted(two)
    for name in one:
        assert one[name] == two[name], name


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_a_run_leaves_the_global_generators_alone(method: str, tiny: Callable[..., Settings], nobody: Watcher, tmp_path: Path) -> None:
    """They are the caller's: a notebook that seeds them must not find them moved."""
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    new_run(tiny(f"method={method}", "rounds=1", "clients=2"), tmp_path / "run", nobody)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_another_seed_gives_another_run(
    method: str, tiny: Callable[..., Settings], nobody: Watcher, content: Content, tmp_path: Path
) -> None:
    made = []
    for seed in (0, 1):
        new_run(tiny(f"method={method}", f"seed={seed}", "rounds=1"), tmp_path / str(seed), nobody)
        made.append(content(tmp_path / str(seed)))
    one, other = made
    assert one["result.json"]["clients"] != other["result.json"]["clients"]
    for name in ("state/split.safetensors", "clients/client-000/model.safetensors"):
        assert one[name] != other[name], name


@pytest.mark.parametrize("method", methods(but="local"))
def test_an_instruction_answered_twice_gives_the_same_report(method: str, tiny: Callable[..., Settings], tmp_path: Path) -> None:
    """In one process and with the memory that the first answer left on disk."""
    federated = Federated(tiny(f"method={method}"), tmp_path)
    state = federated.method.start(0)
    for _ in range(2):
        instructions = federated.method.plan(state, federated.link.clients())
        assert [plain(one) for one in instructions] == [plain(one) for one in federated.method.plan(state, federated.link.clients())]
        first, second = (federated.link.exchange(instructions) for _ in range(2))
        assert [plain(report) for report in first] == [plain(report) for report in second]
        count = len(instructions)
        assert [entry.test_accuracy for entry in federated.entries[:count]] == [entry.test_accuracy for entry in federated.entries[count:]]
        federated.entries.clear()
        state = federated.method.absorb(state, first)


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_the_order_in_which_clients_answer_does_not_matter(
    method: str, tiny: Callable[..., Settings], content: Content, tmp_path: Path
) -> None:
    """Asked the other way round and heard in any order: same server state, same memories, same personal models."""
    settings = tiny(f"method={method}", "participants=3")
    straight, mixed = Federated(settings, tmp_path / "straight"), Federated(settings, tmp_path / "mixed")
    states = []
    for federated, link in ((straight, straight.link), (mixed, Reordered(mixed.link, random.Random(1)))):
        state = run_rounds(federated.method, link, federated.method.start(settings.seed), lambda state: None)
        say_farewell(federated.method, link, state, (), lambda: None)
        states.append(plain_state(state))
    assert states[0] == states[1]
    assert content(straight.folder) == content(mixed.folder) and content(mixed.folder)
    if method != "local":
        assert [entry.client for entry in mixed.entries] != [entry.client for entry in straight.entries]  # it really was another order


def test_a_method_hears_reports_in_the_order_of_names() -> None:
    """Sums of floats depend on their order; the loop sees to it, so that no method has to."""
    heard: list[list[str]] = []

    class Listener:
        def finished(self, state: int) -> bool:
            return state == 1

        def plan(self, state: int, clients: Sequence[str]) -> list[Instruction]:
            return [Instruction(client, state, "train", 0) for client in clients]

        def absorb(self, state: int, reports: Sequence[Report]) -> int:
            heard.append([report.client for report in reports])
            return state + 1

    class Link:
        def clients(self) -> Sequence[str]:
            return ["b", "c", "a"]

        def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
            return [Report(instruction.client, instruction.round) for instruction in instructions]

    method: Any = Listener()
    assert run_rounds(method, Link(), 0, lambda state: None) == 1
    assert heard == [["a", "b", "c"]]
