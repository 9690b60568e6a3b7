"""What every method promises, in every search space, on a federation of four clients, two rounds and a tiny network."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.assemble.builder import make_tools
from fedloom.config import from_table
from fedloom.core.architecture import Architecture
from fedloom.core.boundary import release
from fedloom.core.client_site import ClientMemory, ClientSite
from fedloom.core.errors import UndeclaredUpload
from fedloom.core.messages import Instruction, Report
from fedloom.core.method import Answer, is_per_client
from fedloom.data.readers import DataSettings, Pool, read
from fedloom.data.splits import Federation, SplitSettings, make_split
from fedloom.engine.loop import run_rounds
from fedloom.engine.store import Store
from fedloom.files import read_arrays
from fedloom.methods.base import METHODS
from fedloom.spaces.base import SPACES
from fedloom.training.tools import Tools
from support.untrained import fake_generator

SEED = 5
# Used where a method has a setting of that name.
SMALL = {"architecture": "smallest", "epochs": 1, "iterations": 2, "population": 5, "archive_size": 2, "offspring": 2, "candidates": 6}
SMALL |= {"warmup": 0, "recovery": 1, "edges": 7}
SMALL |= {"supernet_share": 0.5, "distil_epochs": 1, "generations": 2, "mutation_size": 2, "crossover_size": 2, "finalists": 2}
SPLIT = SplitSettings(rule="label", alpha=1.0, validation=0.3, server=0.1)
FEW = {"spider": {"operations": "s2"}}  # of its space: it trains all operations at once
TRAINING = {
    "epochs": 1,
    "batch": 8,
    "rate": 0.1,
    "crop": 1,
    "flip": False,
    "cutout": 2,
    "calibration": 12,
    "finetune_epochs": 1,
    "finetune_rates": [0.02],
}


@dataclass
class World:
    """A method, its clients, and a first round already played."""

    method: Any
    tools: Tools
    federation: Federation
    state: Any  # before any round
    instructions: list[Instruction]  # of round 0
    answers: list[Answer]
    known: list[tuple[Instruction, ClientMemory, Answer]] = field(default_factory=list)

    def site(self, client: str, memory: ClientMemory | None = None) -> ClientSite:
        return ClientSite(client, self.federation.data_of(client), memory or ClientMemory())

    def answer(self, instruction: Instruction, memory: ClientMemory | None = None) -> Answer:
        answer = self.method.answer(instruction, self.site(instruction.client, memory))
        assert isinstance(answer, Answer)
        return answer

    def answer_once(self, instruction: Instruction, memory: ClientMemory | None = None) -> Answer:
        """The same, but not computed twice."""
        memory = memory or ClientMemory()
        for asked, had, answer in self.known:
            if same((asked, had), (instruction, memory)):
                return answer
        self.known.append((instruction, memory, self.answer(instruction, memory)))
        return self.known[-1][2]

    @property
    def reports(self) -> list[Report]:
        return [answer.report for answer in self.answers]

    def farewell(self) -> tuple[Instruction, Answer]:
        """A client that never took part, after one round."""
        state = self.method.absorb(self.state, self.reports)
        instruction = self.method.farewell(state, self.federation.names[-1])
        return instruction, self.answer_once(instruction)


@pytest.fixture(scope="module")
def federation() -> Federation:
    whole = read(DataSettings("digits"))
    train, test = (Pool(pool.images[:count], pool.labels[:count]) for pool, count in ((whole.train, 160), (whole.test, 60)))
    few = replace(whole, train=train, test=test)
    split = make_split(SPLIT, few.train.labels, few.test.labels, 4, SEED)
    return Federation(few, split, "cpu")


def worlds() -> Iterator[Any]:
    """Every method on every space. CI takes the flagship on two and the others on one space each; `make slow` has the rest."""
    for method in METHODS:
        own = method.make.spaces or sorted((space.name for space in SPACES), key=lambda name: name != "mobilenetv3")
        for number, space in enumerate(own):
            marks = [pytest.mark.slow] if number > (method.name == "perfedsde") else []
            yield pytest.param(f"{method.name} on {space}", marks=marks, id=f"{method.name} on {space}")


@pytest.fixture(scope="module", params=worlds())
def world(request: pytest.FixtureRequest, federation: Federation) -> World:
    method_name, space_name = request.param.split(" on ")
    entry: Any = METHODS[method_name]
    own = {item.name: SMALL[item.name] for item in fields(entry.settings) if item.name in SMALL}
    table = {
        "method": entry.name,
        "seed": SEED,
        "clients": 4,
        "participants": 3,
        "rounds": 2,
        "space": space_name,
        space_name: asdict(SPACES[space_name].settings.tiny()) | FEW.get(method_name, {}),
        "split": asdict(SPLIT),
        "training": TRAINING,
        entry.name: own,
    }
    settings = from_table(table)
    tools = make_tools(settings, federation.dataset, torch.device("cpu"))
    method = entry.make(settings.components[entry.name], tools)
    with fake_generator():  # kept by the method; fast, and there is one for every space
        state = method.start(SEED)
    instructions = [] if method.finished(state) else method.plan(state, federation.names)
    made = World(method, tools, federation, state, instructions, [])
    made.answers = [made.answer_once(instruction) for instruction in instructions]
    return made


# -- equality of everything there is --------------------------------------------
def same(one: Any, other: Any) -> bool:
    """Bit for bit, through dataclasses, mappings in any order, sequences and arrays."""
    if is_dataclass(one):
        return type(one) is type(other) and all(same(getattr(one, item.name), getattr(other, item.name)) for item in fields(one))
    if isinstance(one, dict):
        return isinstance(other, dict) and set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and one == other


def copied(thing: Any) -> Any:
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{item.name: copied(getattr(thing, item.name)) for item in fields(thing)})
    if isinstance(thing, dict):
        return {key: copied(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return type(thing)(map(copied, thing))
    return thing.copy() if isinstance(thing, np.ndarray) else thing


def scramble_global_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# -- state ------------------------------------------------------------------------
def states_of(world: World) -> list[Any]:
    return [world.state, world.method.absorb(world.state, world.reports)]


def test_state_is_a_frozen_dataclass_of_plain_things(world: World) -> None:
    for state in states_of(world):
        assert is_dataclass(state) and state.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert type(state.round) is int and type(state.seed) is int
        for item in fields(state):
            value = getattr(state, item.name)
            if isinstance(value, dict):
                assert all(isinstance(name, str) and isinstance(array, np.ndarray) for name, array in value.items())
            else:
                assert isinstance(value, int | float | str | np.ndarray), item.name


def test_state_survives_a_restart(world: World, tmp_path: Path) -> None:
    for state in states_of(world):
        store = Store(tmp_path / str(state.round))
        store.save_state(state, state.round)
        fresh = Store(tmp_path / str(state.round))
        assert same(fresh.load_state(world.method.start(SEED)), state)
        assert fresh.checkpoint == state.round


def test_a_restart_changes_no_answer(world: World, tmp_path: Path) -> None:
    state = world.method.absorb(world.state, world.reports)
    Store(tmp_path).save_state(state, state.round)
    again = Store(tmp_path).load_state(world.method.start(SEED))
    planned, replanned = (world.method.plan(one, world.federation.names)[:1] for one in (state, again))
    for one, other in zip(planned, replanned, strict=True):
        assert same(one, other)
        assert same(world.answer_once(one), world.answer(other))


def test_what_belongs_to_single_clients_is_marked(world: World) -> None:
    for state in [*states_of(world), Link(world, lambda reports: reports).run()]:
        named = {item.name for item in fields(state) if isinstance(getattr(state, item.name), dict)}
        of_clients = {name for name in named if set(getattr(state, name)) & set(world.federation.names)}
        assert of_clients <= {item.name for item in fields(state) if is_per_client(item)}


def test_the_shared_supernet_is_whole(world: World) -> None:
    for state in states_of(world):
        shared = world.method.supernet_of(state)
        assert {name: array.shape for name, array in shared.items()} == (dict(world.tools.supernet.shapes) if shared else {})
    assert bool(shared) == (type(world.method).__name__ not in ("FedAvg", "Local"))


def test_start_follows_from_the_seed(world: World) -> None:
    scramble_global_generators(1)
    assert same(world.method.start(SEED), world.state)
    assert world.state.round == 0 and world.state.seed == SEED
    assert not same(world.method.start(SEED + 1), world.state)


# -- server -----------------------------------------------------------------------
def test_plan_is_pure_and_asks_each_client_once(world: World) -> None:
    before = copied(world.state)
    again = world.method.plan(world.state, world.federation.names)
    assert same(again, world.instructions) and same(world.state, before)
    clients = [instruction.client for instruction in again]
    assert len(set(clients)) == len(clients) == (0 if world.method.finished(world.state) else 3)
    assert set(clients) <= set(world.federation.names)
    assert all(instruction.round == world.state.round for instruction in again)
    assert len({instruction.seed for instruction in again}) == len(again)


def test_absorb_is_pure(world: World) -> None:
    before = copied((world.state, world.reports))
    one, again = (world.method.absorb(world.state, world.reports) for _ in range(2))
    assert same(one, again)
    assert same((world.state, world.reports), before)


@pytest.mark.parametrize("received", [0, 1, 2])
def test_absorb_takes_fewer_reports_than_asked_for(world: World, received: int) -> None:
    state = world.method.absorb(world.state, world.reports[:received])
    assert type(state) is type(world.state)
    assert world.method.finished(state) or state.round == world.state.round + 1
    for item in fields(state):
        value = getattr(state, item.name)
        for array in value.values() if isinstance(value, dict) else [value] if isinstance(value, np.ndarray) else []:
            assert np.isfinite(array).all()
    if not received:
        assert same(replace(state, round=0), replace(world.state, round=0))
    elif world.reports:
        assert not same(replace(state, round=0), replace(world.state, round=0))


class Link:
    """Answers in an order of its own, if at all; as the method it notes in which order reports arrive."""

    def __init__(self, world: World, turn: Callable[[list[Report]], list[Report]] | None) -> None:
        self.world, self.turn = world, turn
        self.memories: dict[str, ClientMemory] = {}
        self.orders: list[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world.method, name)

    def absorb(self, state: Any, reports: Sequence[Report]) -> Any:
        self.orders.append([report.client for report in reports])
        return self.world.method.absorb(state, reports)

    def clients(self) -> list[str]:
        return self.world.federation.names

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        if self.turn is None:
            return []
        answers = [self.world.answer_once(instruction, self.memories.get(instruction.client)) for instruction in instructions]
        self.memories |= {answer.report.client: answer.memory for answer in answers}
        return self.turn([answer.report for answer in answers])

    def run(self) -> Any:
        return run_rounds(self, self, self.world.state, lambda state: None)  # type: ignore[arg-type]


def test_the_order_of_answers_does_not_matter(world: World) -> None:
    forwards, backwards = Link(world, lambda reports: reports), Link(world, lambda reports: reports[::-1])
    one, other = forwards.run(), backwards.run()
    assert same(one, other)
    assert world.method.finished(one)
    assert forwards.orders == backwards.orders == [sorted(order) for order in forwards.orders]
    assert len(forwards.orders) == (2 if world.instructions else 0)


def test_clients_that_do_not_answer_do_not_stop_the_rounds(world: World) -> None:
    assert world.method.finished(Link(world, turn=None).run())


# -- client -----------------------------------------------------------------------
def cases(world: World) -> list[tuple[Instruction, ClientMemory]]:
    """A first participation, a later one with a memory, and the last one of clients with and without one."""
    found: list[tuple[Instruction, ClientMemory]] = []
    state = world.method.absorb(world.state, world.reports)
    if world.instructions:
        later = {instruction.client: instruction for instruction in world.method.plan(state, world.federation.names)}
        known = next(answer for answer in world.answers if answer.report.client in later)
        found += [(world.instructions[0], ClientMemory()), (later[known.report.client], known.memory)]
        found.append((world.method.farewell(state, known.report.client), known.memory))
    found.append((world.method.farewell(state, world.federation.names[-1]), ClientMemory()))
    return found


def test_answer_is_pure(world: World) -> None:
    for instruction, memory in cases(world):
        before = copied((instruction, memory))
        scramble_global_generators(1)
        generators = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()
        one = world.answer(instruction, memory)
        assert (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()) == generators
        scramble_global_generators(2)
        assert same(one, world.answer_once(instruction, memory))
        assert same((instruction, memory), before)


def test_the_clients_data_are_left_as_they_are(world: World) -> None:
    instruction, memory = cases(world)[0]
    site = world.site(instruction.client, memory)
    parts = (site.data.train, site.data.validation, site.data.test)
    before = [(part.images.clone(), part.labels.clone()) for part in parts]
    world.method.answer(instruction, site)
    for part, (images, labels) in zip(parts, before, strict=True):
        assert torch.equal(part.images, images) and torch.equal(part.labels, labels)
    assert site.clock.seconds


def test_another_seed_gives_another_answer(world: World) -> None:
    for instruction, memory in cases(world)[:1]:
        one, other = world.answer_once(instruction, memory), world.answer(replace(instruction, seed=instruction.seed + 1), memory)
        assert not same((one.report, one.model), (other.report, other.model))


def test_reports_pass_the_door_and_use_what_the_method_declares(world: World) -> None:
    seen: set[str] = set()
    for instruction, report in zip(world.instructions, world.reports, strict=True):
        released = release(report, instruction, world.method.uploads)
        assert released.report is report and released.bytes > 0
        seen |= {*report.arrays, *report.facts}
    assert seen == set(world.method.uploads)
    assert all(upload.meaning for upload in world.method.uploads.values())


def test_a_report_with_anything_more_is_refused(world: World) -> None:
    for instruction, memory in cases(world):
        report = world.answer_once(instruction, memory).report
        for more in (
            replace(report, facts={**report.facts, "label_count": 0.5}),
            replace(report, arrays={**report.arrays, "labels": {"labels": np.zeros(3)}}),
        ):
            with pytest.raises(UndeclaredUpload):
                release(more, instruction, world.method.uploads)


def test_declared_coverage_is_where_the_update_is(world: World) -> None:
    for report in world.reports:
        if not {"update", "coverage"} <= set(report.arrays):
            continue
        moved = trained = 0
        for name, update in report.arrays["update"].items():
            covered = np.broadcast_to(report.arrays["coverage"][name] > 0, update.shape)
            assert not update[~covered].any(), name
            moved, trained = moved + np.count_nonzero(update), trained + np.count_nonzero(covered)
        assert moved > 0.8 * trained  # a gradient may be zero, most are not


def test_answers_do_not_depend_on_test_data(world: World) -> None:
    """Under the clean protocol test data report and do nothing else."""
    for instruction, memory in cases(world):
        site = world.site(instruction.client, memory)
        other = replace(site.data.test, labels=(site.data.test.labels + 1) % 10, images=255 - site.data.test.images)
        one = world.answer_once(instruction, memory)
        two = world.method.answer(instruction, replace(site, data=replace(site.data, test=other)))
        assert same(replace(one, diary=two.diary), two)
        assert one.diary.architecture == two.diary.architecture


def test_the_last_participation_leaves_a_model_and_uploads_nothing(world: World) -> None:
    instruction, answer = world.farewell()
    assert answer.report == Report(instruction.client, instruction.round)
    assert release(answer.report, instruction, world.method.uploads).bytes == 0
    assert answer.model is not None
    architecture = Architecture.parse(answer.model.architecture)
    world.tools.space.check(architecture)
    assert answer.diary.architecture == answer.model.architecture


def test_rounds_leave_no_model(world: World) -> None:
    assert all(answer.model is None for answer in world.answers)


def test_the_stated_accuracy_is_that_of_the_model_file(world: World, tmp_path: Path) -> None:
    last = [(instruction, memory) for instruction, memory in cases(world) if world.answer_once(instruction, memory).model]
    for instruction, memory in last:
        answer, store = world.answer_once(instruction, memory), Store(tmp_path)
        assert answer.model is not None
        store.save_model(instruction.client, answer.model, {"space": world.tools.space.name})
        arrays, facts = read_arrays(store.model_path(instruction.client))
        assert facts["architecture"] == answer.model.architecture
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        network = world.tools.supernet.load(Architecture.parse(facts["architecture"]), tensors)
        data = world.federation.data_of(instruction.client)
        for examples, stated in ((data.test, answer.diary.test_accuracy), (data.validation, answer.diary.validation_accuracy)):
            with torch.no_grad():
                guesses = network(world.tools.pixels.normalise(examples.images)).argmax(1)
            assert (guesses == examples.labels).double().mean().item() == stated
    assert len(last) == (2 if world.instructions else 1)


def test_every_client_gets_a_model_of_its_own(world: World) -> None:
    state = world.method.absorb(world.state, world.reports)
    models = [world.answer_once(world.method.farewell(state, client)).model for client in world.federation.names]
    assert all(model is not None for model in models)
    for index, model in enumerate(models):
        assert not any(same(model, other) for other in models[:index])


def test_work_is_accounted_for(world: World) -> None:
    for answer in [*world.answers, world.farewell()[1]]:
        diary = answer.diary
        assert diary.trained_macs > 0 and diary.peak_memory_mb > 0
        assert diary.test_accuracy is not None and diary.validation_accuracy is not None
        assert 0 <= diary.test_accuracy <= 1 and 0 <= diary.validation_accuracy <= 1


def test_memories_survive_a_restart(world: World, tmp_path: Path) -> None:
    for answer in world.answers:
        client = answer.report.client
        Store(tmp_path).save_memory(client, 0, answer.memory)
        assert same(Store(tmp_path).load_memory(client, 1), answer.memory)
        assert same(Store(tmp_path).load_memory(client, 0), ClientMemory())
