"""What every method promises, on a federation of four clients, two rounds and a tiny network."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom import config
from fedloom.core.architecture import Architecture
from fedloom.core.boundary import release
from fedloom.core.client_site import ClientMemory
from fedloom.core.errors import UndeclaredUpload
from fedloom.core.messages import Instruction, Report
from fedloom.core.method import Answer, is_per_client
from fedloom.engine.loop import run_rounds
from fedloom.engine.store import Store
from fedloom.files import read_arrays
from fedloom.testing.played import Played
from fedloom.testing.plugged import plugged
from fedloom.testing.tiny import tiny_file

SEED = 5
LARGER = (  # than the tiny federation: clients that take part twice, once and never
    *(f"seed={SEED}", "clients=4", "participants=3", "split.size=40", "split.test_size=15"),
    *("training.rate=0.1", "training.cutout=2", "training.calibration=12"),
)


class FirstRound(Played):
    """A method and its clients, with the answers to a first round that the server has not absorbed yet."""

    def __init__(self, load: Callable[..., config.Settings]) -> None:
        """load: settings, with changes as ``key=value``."""
        super().__init__(load())
        self.load = load
        self.known: list[tuple[Instruction, ClientMemory, Answer]] = []
        self.instructions = [] if self.method.finished(self.state) else self.method.plan(self.state, self.federation.names)
        self.answers = [self.answer_once(instruction) for instruction in self.instructions]

    def answer_once(self, instruction: Instruction, memory: ClientMemory | None = None) -> Answer:
        """As ``answer``, but not computed twice."""
        memory = memory or ClientMemory()
        for asked, had, answer in self.known:
            if not differences((asked, had), (instruction, memory)):
                return answer
        self.known.append((instruction, memory, self.answer(instruction, memory)))
        return self.known[-1][2]

    @property
    def reports(self) -> list[Report]:
        return [answer.report for answer in self.answers]

    def absorbed(self) -> Any:
        """The state after the first round."""
        return self.method.absorb(self.state, self.reports)

    def newcomer(self) -> tuple[Instruction, Answer]:
        """The farewell of a client that never took part, after one round."""
        instruction = self.method.farewell(self.absorbed(), self.federation.names[-1])
        return instruction, self.answer_once(instruction)

    def participations(self) -> list[tuple[Instruction, ClientMemory]]:
        """A first one, a later one with a memory, and the last one of clients with and without one."""
        found: list[tuple[Instruction, ClientMemory]] = []
        state = self.absorbed()
        if self.instructions:
            later = {instruction.client: instruction for instruction in self.method.plan(state, self.federation.names)}
            known = next(answer for answer in self.answers if answer.report.client in later)
            found += [(self.instructions[0], ClientMemory()), (later[known.report.client], known.memory)]
            found.append((self.method.farewell(state, known.report.client), known.memory))
        found.append((self.method.farewell(state, self.federation.names[-1]), ClientMemory()))
        return found


@dataclass
class Link:
    """Answers in an order of its own, if at all; as the method it notes in which order reports arrive."""

    played: FirstRound
    turn: Callable[[list[Report]], list[Report]] | None

    def __post_init__(self) -> None:
        self.memories: dict[str, ClientMemory] = {}
        self.orders: list[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.played.method, name)

    def absorb(self, state: Any, reports: Sequence[Report]) -> Any:
        self.orders.append([report.client for report in reports])
        return self.played.method.absorb(state, reports)

    def clients(self) -> list[str]:
        return self.played.federation.names

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        if self.turn is None:
            return []
        answers = [self.played.answer_once(instruction, self.memories.get(instruction.client)) for instruction in instructions]
        self.memories |= {answer.report.client: answer.memory for answer in answers}
        return self.turn([answer.report for answer in answers])

    def run(self) -> Any:
        return run_rounds(self, self, self.played.state, lambda state: None)  # type: ignore[arg-type]


# -- equality of everything there is --------------------------------------------
def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two things differ, bit by bit, through dataclasses, mappings in any order, sequences and arrays."""
    if type(one) is not type(other):
        return [f"{where or 'it'}: {type(one).__name__}, then {type(other).__name__}"]
    if is_dataclass(one):
        return [
            found
            for item in fields(one)
            for found in differences(getattr(one, item.name), getattr(other, item.name), f"{where}.{item.name}")
        ]
    if isinstance(one, dict):
        absent = [f"{where}[{key!r}]: in one of them only" for key in {*one} ^ {*other}]
        return absent + [found for key in {*one} & {*other} for found in differences(one[key], other[key], f"{where}[{key!r}]")]
    if isinstance(one, list | tuple) and len(one) == len(other):
        return [found for index, pair in enumerate(zip(one, other, strict=True)) for found in differences(*pair, f"{where}[{index}]")]
    if isinstance(one, np.ndarray):
        equal = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        return [] if equal else [f"{where or 'it'}: the arrays differ"]
    return [] if one == other else [f"{where or 'it'}: {str(one)[:60]}, then {str(other)[:60]}"]


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


def state_of_global_generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()  # type: ignore[index]


# -- the contract ------------------------------------------------------------------
def played(cases: Sequence[Any]) -> Any:
    """The fixture of a MethodContract. A case: a plugin's file or "", and settings as ``key=value``, the method among them."""

    def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirstRound]:
        plugin, *changes = request.param
        with plugged(*filter(None, [plugin])):
            file = tiny_file(tmp_path_factory.mktemp("tiny"))
            yield FirstRound(lambda *more: config.load(str(file), [*LARGER, *changes, *more]))

    return pytest.fixture(scope="class", params=cases)(staticmethod(played))


class MethodContract:
    """Needs a fixture ``played``, such as the function of that name makes."""

    # -- state ----------------------------------------------------------------------
    def test_state_is_a_frozen_dataclass_of_plain_things(self, played: FirstRound) -> None:
        for state in (played.state, played.absorbed()):
            how = getattr(type(state), "__dataclass_params__", None)
            assert how and how.frozen, "the state must be a frozen dataclass"
            assert type(state.round) is int and type(state.seed) is int
            for item in fields(state):
                value = getattr(state, item.name)
                if isinstance(value, dict):
                    assert all(isinstance(name, str) and isinstance(array, np.ndarray) for name, array in value.items()), item.name
                else:
                    assert isinstance(value, int | float | str | np.ndarray), item.name

    def test_state_survives_a_restart(self, played: FirstRound, tmp_path: Path) -> None:
        for state in (played.state, played.absorbed()):
            store = Store(tmp_path / str(state.round))
            store.save_state(state, state.round)
            fresh = Store(tmp_path / str(state.round))
            assert not differences(fresh.load_state(played.method.start(SEED)), state)
            assert fresh.checkpoint == state.round

    def test_a_restart_changes_no_answer(self, played: FirstRound, tmp_path: Path) -> None:
        state = played.absorbed()
        Store(tmp_path).save_state(state, state.round)
        again = Store(tmp_path).load_state(played.method.start(SEED))
        planned, replanned = (played.method.plan(one, played.federation.names)[:1] for one in (state, again))
        for one, other in zip(planned, replanned, strict=True):
            assert not differences(one, other)
            assert not differences(played.answer_once(one), played.answer(other))

    def test_what_belongs_to_single_clients_is_marked(self, played: FirstRound) -> None:
        for state in (played.state, played.absorbed(), Link(played, lambda reports: reports).run()):
            named = {item.name for item in fields(state) if isinstance(getattr(state, item.name), dict)}
            of_clients = {name for name in named if set(getattr(state, name)) & set(played.federation.names)}
            marked = {item.name for item in fields(state) if is_per_client(item)}
            assert of_clients <= marked, "make these fields of the state with per_client()"

    def test_the_shared_supernet_is_whole(self, played: FirstRound) -> None:
        for state in (played.state, played.absorbed()):
            shared = played.method.supernet_of(state)
            assert {name: array.shape for name, array in shared.items()} == (dict(played.tools.supernet.shapes) if shared else {})

    def test_start_follows_from_the_seed(self, played: FirstRound) -> None:
        scramble_global_generators(1)
        assert not differences(played.method.start(SEED), played.state)
        assert played.state.round == 0 and played.state.seed == SEED
        assert differences(played.method.start(SEED + 1), played.state)

    # -- server ---------------------------------------------------------------------
    def test_plan_is_pure_and_asks_each_client_once(self, played: FirstRound) -> None:
        before = copied(played.state)
        again = played.method.plan(played.state, played.federation.names)
        assert not differences(again, played.instructions)
        assert not differences(played.state, before)
        clients = [instruction.client for instruction in again]
        assert len(set(clients)) == len(clients) == (0 if played.method.finished(played.state) else played.tools.participants)
        assert set(clients) <= set(played.federation.names)
        assert all(instruction.round == played.state.round for instruction in again)
        assert len({instruction.seed for instruction in again}) == len(again), "each client needs a seed of its own"

    def test_absorb_is_pure(self, played: FirstRound) -> None:
        before = copied((played.state, played.reports))
        assert not differences(played.absorbed(), played.absorbed())
        assert not differences((played.state, played.reports), before)

    @pytest.mark.parametrize("received", [0, 1, 2])
    def test_absorb_takes_fewer_reports_than_asked_for(self, played: FirstRound, received: int) -> None:
        state = played.method.absorb(played.state, played.reports[:received])
        assert type(state) is type(played.state)
        assert played.method.finished(state) or state.round == played.state.round + 1
        for item in fields(state):
            value = getattr(state, item.name)
            for array in value.values() if isinstance(value, dict) else [value] if isinstance(value, np.ndarray) else []:
                assert np.isfinite(array).all(), item.name
        changed = differences(replace(state, round=0), replace(played.state, round=0))
        if not received:
            assert not changed
        elif played.reports:
            assert changed, "reports must change the state"

    def test_the_order_of_answers_does_not_matter(self, played: FirstRound) -> None:
        forwards, backwards = Link(played, lambda reports: reports), Link(played, lambda reports: reports[::-1])
        one, other = forwards.run(), backwards.run()
        assert not differences(one, other)
        assert played.method.finished(one)
        assert forwards.orders == backwards.orders == [sorted(order) for order in forwards.orders]
        assert len(forwards.orders) == (played.tools.rounds if played.instructions else 0)

    def test_clients_that_do_not_answer_do_not_stop_the_rounds(self, played: FirstRound) -> None:
        assert played.method.finished(Link(played, turn=None).run())

    # -- client ---------------------------------------------------------------------
    def test_answer_is_pure(self, played: FirstRound) -> None:
        for instruction, memory in played.participations():
            before = copied((instruction, memory))
            scramble_global_generators(1)
            generators = state_of_global_generators()
            one = played.answer(instruction, memory)
            assert state_of_global_generators() == generators, "the global generators of random, numpy and torch are not to be used"
            scramble_global_generators(2)
            assert not differences(one, played.answer_once(instruction, memory))
            assert not differences((instruction, memory), before)

    def test_the_clients_data_are_left_as_they_are(self, played: FirstRound) -> None:
        instruction, memory = played.participations()[0]
        site = played.site(instruction.client, memory)
        parts = (site.data.train, site.data.validation, site.data.test)
        before = [(part.images.clone(), part.labels.clone()) for part in parts]
        played.method.answer(instruction, site)
        for part, (images, labels) in zip(parts, before, strict=True):
            assert torch.equal(part.images, images) and torch.equal(part.labels, labels)
        assert site.clock.seconds, 'answer must measure its stages: `with site.clock("train"):`'

    def test_another_seed_gives_another_answer(self, played: FirstRound) -> None:
        for instruction, memory in played.participations()[:1]:
            one = played.answer_once(instruction, memory)
            other = played.answer(replace(instruction, seed=instruction.seed + 1), memory)
            assert differences((one.report, one.model), (other.report, other.model))

    def test_reports_pass_the_door_and_use_what_the_method_declares(self, played: FirstRound) -> None:
        seen: set[str] = set()
        for instruction, report in zip(played.instructions, played.reports, strict=True):
            released = release(report, instruction, played.method.uploads)
            assert released.report is report and released.bytes > 0
            seen |= {*report.arrays, *report.facts}
        assert seen == set(played.method.uploads)
        assert all(upload.meaning for upload in played.method.uploads.values())

    def test_a_report_with_anything_more_is_refused(self, played: FirstRound) -> None:
        for instruction, memory in played.participations():
            report = played.answer_once(instruction, memory).report
            for more in (
                replace(report, facts={**report.facts, "label_count": 0.5}),
                replace(report, arrays={**report.arrays, "labels": {"labels": np.zeros(3)}}),
            ):
                with pytest.raises(UndeclaredUpload):
                    release(more, instruction, played.method.uploads)

    def test_declared_coverage_is_where_the_update_is(self, played: FirstRound) -> None:
        for report in played.reports:
            if not {"update", "coverage"} <= set(report.arrays):
                continue
            moved = trained = 0
            for name, update in report.arrays["update"].items():
                covered = np.broadcast_to(report.arrays["coverage"][name] > 0, update.shape)
                assert not update[~covered].any(), name
                moved, trained = moved + int(np.count_nonzero(update)), trained + int(np.count_nonzero(covered))
            assert moved > 0.8 * trained  # a gradient may be zero, most are not

    def test_answers_do_not_depend_on_test_data(self, played: FirstRound) -> None:
        """Under the clean protocol test data report and do nothing else."""
        for instruction, memory in played.participations():
            site = played.site(instruction.client, memory)
            other = replace(site.data.test, labels=(site.data.test.labels + 1) % 10, images=255 - site.data.test.images)
            one = played.answer_once(instruction, memory)
            two = played.method.answer(instruction, replace(site, data=replace(site.data, test=other)))
            assert not differences(replace(one, diary=two.diary), two)
            assert one.diary.architecture == two.diary.architecture

    def test_the_last_participation_leaves_a_model_and_uploads_nothing(self, played: FirstRound) -> None:
        instruction, answer = played.newcomer()
        assert answer.report == Report(instruction.client, instruction.round)
        assert release(answer.report, instruction, played.method.uploads).bytes == 0
        assert answer.model is not None
        played.tools.space.check(Architecture.parse(answer.model.architecture))
        assert answer.diary.architecture == answer.model.architecture

    def test_rounds_leave_no_model(self, played: FirstRound) -> None:
        assert all(answer.model is None for answer in played.answers)

    def test_the_stated_accuracy_is_that_of_the_model_file(self, played: FirstRound, tmp_path: Path) -> None:
        last = [(instruction, memory) for instruction, memory in played.participations() if played.answer_once(instruction, memory).model]
        for instruction, memory in last:
            answer, store = played.answer_once(instruction, memory), Store(tmp_path)
            assert answer.model is not None
            store.save_model(instruction.client, answer.model, {"space": played.tools.space.name})
            arrays, facts = read_arrays(store.model_path(instruction.client))
            assert facts["architecture"] == answer.model.architecture
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            network = played.tools.supernet.load(Architecture.parse(facts["architecture"]), tensors)
            data = played.federation.data_of(instruction.client)
            for examples, stated in ((data.test, answer.diary.test_accuracy), (data.validation, answer.diary.validation_accuracy)):
                with torch.no_grad():
                    guesses = network(played.tools.pixels.normalise(examples.images)).argmax(1)
                assert (guesses == examples.labels).double().mean().item() == stated
        assert len(last) == (2 if played.instructions else 1)

    def test_every_client_gets_a_model_of_its_own(self, played: FirstRound) -> None:
        state = played.absorbed()
        models = [played.answer_once(played.method.farewell(state, client)).model for client in played.federation.names]
        assert all(model is not None for model in models)
        for index, model in enumerate(models):
            assert all(differences(model, other) for other in models[:index])

    def test_work_is_accounted_for(self, played: FirstRound) -> None:
        for answer in [*played.answers, played.newcomer()[1]]:
            diary = answer.diary
            assert diary.trained_macs > 0 and diary.peak_memory_mb > 0
            assert diary.test_accuracy is not None and diary.validation_accuracy is not None
            assert 0 <= diary.test_accuracy <= 1 and 0 <= diary.validation_accuracy <= 1

    def test_memories_survive_a_restart(self, played: FirstRound, tmp_path: Path) -> None:
        for answer in played.answers:
            client = answer.report.client
            Store(tmp_path).save_memory(client, 0, answer.memory)
            assert not differences(Store(tmp_path).load_memory(client, 1), answer.memory)
            assert not differences(Store(tmp_path).load_memory(client, 0), ClientMemory())
