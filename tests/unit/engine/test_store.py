"""The run folder: files are whole or absent, damage is noticed and named, and a resume finds what it needs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.core.client_site import ClientMemory, PersonalModel
from fedloom.core.errors import DamagedRun, UnusableFolder
from fedloom.core.result import LedgerEntry
from fedloom.engine.store import Store
from fedloom.files import read_arrays
from support.checks import flipped

ENTRY = LedgerEntry(
    client="client-0",
    round=0,
    final=False,
    bytes_down=10,
    bytes_up=5,
    uploads=("examples", "update"),
    seconds={"train": 0.5},
    architecture="toy:1-2",
    validation_accuracy=0.25,
    test_accuracy=None,
    trained_macs=100,
    evaluated_architectures=3,
    peak_memory_mb=1.5,
    process_memory_mb=200.0,
    notes={"covered": 0.5},
)


@dataclass(frozen=True)
class State:
    round: int
    rate: float
    name: str
    picks: tuple[int, ...]
    scores: np.ndarray
    weights: dict[str, np.ndarray]
    momenta: dict[str, np.ndarray]


@dataclass(frozen=True)
class OtherState(State):
    """The same fields: only its name tells it apart."""


@dataclass(frozen=True)
class SmallState:
    """Of its fields all are in a State."""

    round: int
    name: str


def a_state(round: int = 3) -> State:
    weights = {"stem": np.arange(6, dtype=np.float32).reshape(2, 3), "a/b": np.array([True, False]), "empty": np.zeros((0, 4), np.int8)}
    return State(round, 0.1, 'näme with "quotes"\n', (1, 2), np.array([[1, 2], [3, -4]], np.int64), weights, {})


def a_template(**changes: Any) -> State:
    """What a method starts with: the same names and shapes, other values."""
    zeros = {name: np.zeros_like(array) for name, array in a_state().weights.items()}
    return replace(State(0, 0.0, "", (), np.zeros(0), zeros, {}), **changes)


def a_memory(number: int) -> ClientMemory:
    return ClientMemory({"population": np.full((2, 3), number, np.uint8)}, {"number": number, "text": "x"})


def memory_number(memory: ClientMemory) -> int | None:
    if memory.arrays:
        assert set(np.unique(memory.arrays["population"])) == {memory.facts["number"]}
    return memory.facts.get("number")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run")


# -- server state ---------------------------------------------------------------------------


def test_a_state_comes_back_whole(store: Store) -> None:
    state = a_state()
    store.save_state(state, 3)
    assert store.checkpoint == 3
    again = Store(store.folder)
    got = again.load_state(a_template())
    assert got is not None and again.checkpoint == 3
    assert (got.round, got.rate, got.name, got.picks, got.momenta) == (3, 0.1, state.name, (1, 2), {})
    assert got.scores.dtype == np.int64 and (got.scores == state.scores).all()
    assert set(got.weights) == set(state.weights)
    for name, array in state.weights.items():
        assert got.weights[name].dtype == array.dtype and got.weights[name].shape == array.shape and (got.weights[name] == array).all()


def test_what_a_state_does_not_use_leaves_no_trace(store: Store) -> None:
    """So a state that can hold more than it used to has the same file while it does not."""
    store.save_state(a_state(), 3)
    facts = read_arrays(store.folder / "state" / "server.safetensors")[1]["fields"]
    assert facts["weights"] == "named arrays" and "momenta" not in facts


@pytest.mark.parametrize("turn", [sorted, lambda names: sorted(names, reverse=True)])
def test_named_arrays_come_back_in_the_order_of_the_template(store: Store, turn: Callable[[Any], list[str]]) -> None:
    """Sums over them depend on it, and a file has an order of its own."""
    store.save_state(a_state(), 3)
    weights = a_template().weights
    got = store.load_state(a_template(weights={name: weights[name] for name in turn(weights)}))
    assert list(got.weights) == turn(weights) and (got.weights["stem"] == a_state().weights["stem"]).all()


def test_an_array_without_axes_comes_back(store: Store) -> None:
    store.save_state(replace(a_state(), scores=np.array(3.0)), 3)
    got = store.load_state(a_template(scores=np.array(0.0)))
    assert got.scores.shape == () and got.scores == 3


def test_the_round_of_a_state_is_the_checkpoint_whatever_the_state_calls_it(store: Store) -> None:
    store.save_state(a_state(round=7), 2)
    again = Store(store.folder)
    assert again.load_state(a_template()).round == 7 and again.checkpoint == 2


def test_loaded_arrays_cannot_be_changed(store: Store) -> None:
    """They go into messages that several clients share."""
    store.save_state(a_state(), 3)
    got = store.load_state(a_template())
    for array in (got.scores, *got.weights.values()):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1


def test_no_state_yet(store: Store) -> None:
    assert store.load_state(a_template()) is None and store.checkpoint == 0


@pytest.mark.parametrize("template", [OtherState(**vars(a_template())), SmallState(0, "")])
def test_the_state_of_another_method_is_refused(store: Store, template: Any) -> None:
    store.save_state(a_state(), 3)
    words = rf"server\.safetensors does not hold the state of this run's .*: it holds a State, not a {type(template).__name__}"
    again = Store(store.folder)
    with pytest.raises(DamagedRun, match=words) as caught:
        again.load_state(template)
    assert caught.value.facts == {"path": str(store.folder / "state" / "server.safetensors")} and again.checkpoint == 0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        pytest.param({"stem": np.zeros((3, 2), np.float32)}, r"stem has shape \(2, 3\), not \(3, 2\)", id="turned"),
        pytest.param({"stem": np.zeros((2, 3, 1), np.float32)}, r"stem has shape \(2, 3\), not \(2, 3, 1\)", id="one axis more"),
        pytest.param({"head": np.zeros(2)}, "head", id="one more"),
        pytest.param({"stem": None}, "stem", id="one less"),
    ],
)
def test_the_state_of_another_network_is_refused(store: Store, change: dict[str, Any], word: str) -> None:
    store.save_state(a_state(), 3)
    weights = {name: array for name, array in {**a_template().weights, **change}.items() if array is not None}
    with pytest.raises(DamagedRun, match=rf"server\.safetensors does not hold the state of this run's .*{word}"):
        Store(store.folder).load_state(a_template(weights=weights))


def test_a_damaged_state_is_refused(store: Store) -> None:
    store.save_state(a_state(), 3)
    flipped(store.folder / "state" / "server.safetensors", -1, 0)
    with pytest.raises(DamagedRun, match=r"server\.safetensors is damaged"):
        store.load_state(a_template())


def test_a_split_comes_back(store: Store) -> None:
    assert store.load_split() is None
    store.save_split({"train": np.arange(3)}, {"dataset": "digits"})
    arrays, facts = store.load_split()
    assert arrays["train"].tolist() == [0, 1, 2] and facts == {"dataset": "digits"}


# -- ledger -----------------------------------------------------------------------------------


def entries(*rounds: int, final: bool = False) -> list[LedgerEntry]:
    return [replace(ENTRY, round=round, client=f"client-{index}", final=final) for index, round in enumerate(rounds)]


def test_entries_come_back(store: Store) -> None:
    store.folder.mkdir()
    assert list(store.read_ledger()) == []
    store.append(entries(0, 0))
    store.append(entries(1))
    assert list(store.read_ledger()) == [*entries(0, 0), *entries(1)]
    assert len((store.folder / "ledger.jsonl").read_text().splitlines()) == 3


def test_a_torn_last_line_is_dropped_wherever_it_is_torn(store: Store) -> None:
    store.folder.mkdir()
    store.append(entries(0, 0))
    path = store.folder / "ledger.jsonl"
    good = path.read_bytes()
    second = good.index(b"\n") + 1
    for length in range(second, len(good), 5):
        path.write_bytes(good[:length])
        assert list(store.read_ledger()) == entries(0)


@pytest.mark.parametrize("line", ["", "{", "5", "null", "[]", '"x"', '{"client": "x"}', '{"client": "x", "uploads": []}', "\udcff"])
def test_a_damaged_line_in_the_middle_is_named_by_its_number(store: Store, line: str) -> None:
    store.folder.mkdir()
    good = [entry.to_json() for entry in entries(0, 0)]
    path = store.folder / "ledger.jsonl"
    path.write_bytes("\n".join([good[0], line, good[1], ""]).encode(errors="surrogateescape"))
    with pytest.raises(DamagedRun, match=f"{re.escape(str(path))}, line 2 is damaged"):
        list(store.read_ledger())


def test_a_damaged_last_line_that_is_complete_is_no_torn_line(store: Store) -> None:
    store.folder.mkdir()
    (store.folder / "ledger.jsonl").write_text(ENTRY.to_json() + '\n{"client":\n')
    with pytest.raises(DamagedRun, match="line 2 is damaged"):
        list(store.read_ledger())


@pytest.mark.parametrize(
    ("checkpoint", "over", "kept"),
    [(0, False, []), (1, False, [0]), (2, False, [0, 1]), (3, False, [0, 1, 2]), (3, True, [0, 1, 2, "final"])],
)
def test_rewinding_drops_what_came_after_the_checkpoint(store: Store, checkpoint: int, over: bool, kept: list[object]) -> None:
    store.folder.mkdir()
    for round in range(3):
        store.append(entries(round, round))
    store.append(entries(3, final=True))
    with open(store.folder / "ledger.jsonl", "a") as file:
        file.write('{"client":"torn')
    store.checkpoint = checkpoint
    store.rewind_ledger(rounds_over=over)
    assert [("final" if entry.final else entry.round) for entry in store.read_ledger()] == [
        place for place in kept for _ in range(1 if place == "final" else 2)
    ]
    assert (store.folder / "ledger.jsonl").read_bytes().endswith(b"\n") or not kept


# -- client memory ----------------------------------------------------------------------------


def test_memory_comes_back_at_the_next_round(store: Store) -> None:
    assert store.load_memory("client-0", 5) == ClientMemory()
    store.save_memory("client-0", 5, a_memory(7))
    assert memory_number(store.load_memory("client-0", 6)) == 7 and store.load_memory("client-0", 6).facts["text"] == "x"
    assert store.load_memory("client-1", 6) == ClientMemory()


def test_a_client_asked_again_for_a_round_has_the_memory_from_before(store: Store) -> None:
    store.save_memory("client-0", 2, a_memory(2))
    store.save_memory("client-0", 10, a_memory(10))
    assert memory_number(store.load_memory("client-0", 10)) == 2
    assert memory_number(store.load_memory("client-0", 2)) is None
    assert memory_number(store.load_memory("client-0", 11)) == 10  # as numbers: 10 comes after 2
    store.save_memory("client-0", 10, a_memory(99))
    assert memory_number(store.load_memory("client-0", 11)) == 99


@pytest.mark.parametrize("checkpoint_every", [1, 2, 3])
@pytest.mark.parametrize("takes_part", [range(9), (0, 2, 4, 6, 8), (0, 5), (3, 4), (1, 2, 7, 8), (0, 1, 2, 6)])
def test_pruning_keeps_what_a_resume_needs(store: Store, checkpoint_every: int, takes_part: Any) -> None:
    """After any write the run may be killed and go on from the checkpoint: its first round must find what it found before."""
    rounds = list(takes_part)
    for round in range(10):
        if round in rounds:
            before = [number for number in rounds if number < round]
            assert memory_number(store.load_memory("c", round)) == (max(before) if before else None)
            store.save_memory("c", round, a_memory(round))
            for again in range(store.checkpoint, round + 1):
                wanted = [number for number in rounds if number < store.checkpoint]
                if again in rounds:
                    got = memory_number(store.load_memory("c", again))
                    assert got == (max(wanted) if wanted else None), f"round {again} after a kill in round {round}"
                    break  # later rounds find what this one writes again
        if (round + 1) % checkpoint_every == 0:
            store.checkpoint = round + 1
        assert len(list(store.client_folder("c").glob("memory-*"))) <= 2 + checkpoint_every  # old ones do not pile up


def test_a_damaged_memory_names_its_file(store: Store) -> None:
    store.save_memory("client-0", 0, a_memory(1))
    path = store.client_folder("client-0") / "memory-0.safetensors"
    flipped(path, -1, 3)
    with pytest.raises(DamagedRun, match=re.escape(str(path))):
        store.load_memory("client-0", 1)


def test_half_written_and_foreign_files_are_no_memories(store: Store) -> None:
    store.save_memory("client-0", 1, a_memory(1))
    (store.client_folder("client-0") / ".memory-2.safetensors.part").write_bytes(b"half")
    (store.client_folder("client-0") / "notes.txt").write_text("mine")
    (store.client_folder("client-0") / "memory-4 (copy).safetensors").write_text("a copy")
    assert memory_number(store.load_memory("client-0", 5)) == 1


def test_a_lost_memory_is_not_an_empty_one(store: Store) -> None:
    store.save_memory("client-0", 1, a_memory(1))
    store.save_state(a_state(), 3)
    again = Store(store.folder)
    again.load_state(a_state())
    assert memory_number(again.load_memory("client-0", 3)) == 1 and again.load_memory("client-1", 3) == ClientMemory()
    shutil.rmtree(store.folder / "clients")
    with pytest.raises(DamagedRun, match="client-0 has lost the client's memory; without it the run would become another"):
        again.load_memory("client-0", 3)
    assert again.load_memory("client-1", 3) == ClientMemory()


def test_a_method_without_memory_writes_none(store: Store) -> None:
    store.save_memory("client-0", 1, ClientMemory())
    assert not store.client_folder("client-0").exists()


def test_a_memory_that_was_emptied_stays_empty(store: Store) -> None:
    store.save_memory("client-0", 0, a_memory(1))
    store.save_memory("client-0", 1, ClientMemory())
    assert store.load_memory("client-0", 2) == ClientMemory()
    assert memory_number(store.load_memory("client-0", 1)) == 1  # asked again for the round that emptied it


def test_a_personal_model_describes_itself(store: Store) -> None:
    store.save_model("client-0", PersonalModel("toy:1", {"w": np.ones(2, np.float32)}), {"classes": ["a", "b"]})
    arrays, facts = read_arrays(store.model_path("client-0"))
    assert arrays["w"].tolist() == [1, 1] and facts == {"classes": ["a", "b"], "architecture": "toy:1"}


# -- the folder ---------------------------------------------------------------------------------


def test_a_second_claim_is_refused_until_the_first_is_released(store: Store) -> None:
    store.claim()
    with pytest.raises(UnusableFolder, match=f"{re.escape(str(store.folder))} is in use by another process"):
        Store(store.folder).claim()
    store.release()
    second = Store(store.folder)
    second.claim()
    second.release()
    second.release()  # once is enough, twice does no harm


def test_the_lock_of_another_process_holds_and_ends_with_it(store: Store) -> None:
    program = """if True:
        import sys, pathlib, fedloom.engine.store
        store = fedloom.engine.store.Store(pathlib.Path(sys.argv[1]))
        store.claim()
        print("mine", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", program, str(store.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(UnusableFolder, match="in use by another process"):
            store.claim()
        other.kill()
        other.wait()
    store.claim()
    store.release()


def test_a_folder_under_a_file_cannot_be_claimed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UnusableFolder, match=r"cannot be written \(Not a directory\).*run.folder"):
        Store(tmp_path / "file" / "run").claim()


def test_text_comes_back_and_a_missing_one_is_named(store: Store) -> None:
    store.write_text("config.toml", "text = 'ä'\n")
    assert store.read_text("config.toml") == "text = 'ä'\n"
    with pytest.raises(DamagedRun, match=re.escape(str(store.folder / "result.json"))):
        store.read_text("result.json")


def test_the_ledger_holds_no_surprise(store: Store) -> None:
    """The names in a line are what people read it by."""
    store.folder.mkdir()
    store.append([ENTRY])
    line = json.loads((store.folder / "ledger.jsonl").read_text())
    assert line["uploads"] == ["examples", "update"] and line["seconds"] == {"train": 0.5} and line["test_accuracy"] is None
