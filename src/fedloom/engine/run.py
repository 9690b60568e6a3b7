"""From the first round, or the last checkpoint, to the result."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from fedloom.core.architecture import Architecture
from fedloom.core.errors import DamagedRun
from fedloom.core.messages import Report
from fedloom.core.method import Method
from fedloom.core.result import ClientResult, Ledger, LedgerEntry, RunResult
from fedloom.engine.base import Link
from fedloom.engine.loop import run_rounds, say_farewell
from fedloom.engine.protection import Account
from fedloom.engine.store import Spent, Store
from fedloom.spaces.base import SearchSpace
from fedloom.training.together import own_seconds


class Watcher(Protocol):
    """Observes a run; every function is called as it happens."""

    def begin(self, rounds: int, clients: int, rounds_done: int, clients_done: int) -> None: ...
    def stage(self, client: str, stage: str) -> None: ...  # what it does from now on; "": nothing that is measured
    def participation(self, entry: LedgerEntry) -> None: ...
    def round_done(self, round: int, entries: Sequence[LedgerEntry]) -> None: ...
    def end(self, result: RunResult) -> None: ...


@dataclass
class Run:
    """A federation ready to run on this machine."""

    method: Method[Any]
    initial: Any  # the method's state before the first round
    store: Store
    watcher: Watcher
    rounds: int
    seed: int
    facts: dict[str, Any]  # method, space, dataset, protocol, environment, one_class: what the result says of the run
    space: SearchSpace  # of the clients' architectures
    images: Mapping[str, tuple[int, int]]  # client -> its training and test images; empty on a server, which knows of none
    account: Account
    checkpoint_every: int = 1
    beside: bool = False  # checkpoints are written while the next round computes; not where others may have seen that round begin
    absorb: Callable[[Any, Sequence[Report]], Any] | None = None  # in place of the method's
    ledger: Ledger = field(default_factory=Ledger)
    waiting: list[LedgerEntry] = field(default_factory=list)  # entries not yet in the ledger file
    before: Spent | None = None  # what earlier parts of the run took, if that is known
    over: bool = False  # the run was finished before; its result stays as it was written

    def record(self, entry: LedgerEntry) -> None:
        self.waiting.append(entry)
        self.watcher.participation(entry)

    def execute(self, link: Link) -> RunResult:
        saved = self.store.load_state(self.initial)
        state = self.initial if saved is None else saved
        self.store.check_whole(self.over)
        self.over = self.over and self.method.finished(state)  # or it was finished, and is to have more rounds
        if not self.over:
            rounds_over = self.method.finished(state)
            if not rounds_over and any(entry.final for entry in self.store.read_ledger()):  # what clients did at the end was not the end
                self.store.rewind_memories()
            self.store.rewind_ledger(rounds_over)
        self.ledger.add(self.store.read_ledger())
        before = self._spent_before(state.round)
        if self.over:
            return self._result(state.round, True, before)
        clock = own_seconds()
        if saved is None:
            self.store.save_state(state, state.round)
        self.watcher.begin(self.rounds, len(link.clients()), state.round, len(self.ledger.final))

        def spent() -> Spent:
            return replace(before, seconds=round(before.seconds + own_seconds() - clock, 3))

        def after_round(state: Any) -> None:
            self.watcher.round_done(state.round, self.waiting)
            self._write_down()
            if state.round % self.checkpoint_every == 0 or self.method.finished(state):
                write = partial(self._checkpoint, state, spent())
                self.store.beside(write) if self.beside else write()

        def after_some() -> None:
            self.store.save_spent(spent())
            self._write_down()

        with rarely_collected():
            try:
                state = run_rounds(self.method, link, state, after_round, self.absorb)
            finally:
                self.store.settle()
            say_farewell(self.method, link, state, set(self.ledger.final), after_some)
        now = spent()
        self.store.save_spent(now)
        result = self._write_result(state.round, True, now)
        self.watcher.end(result)
        return result

    def _spent_before(self, round: int) -> Spent:
        if self.before is not None:
            return self.before
        if not (round or self.ledger.final):
            return Spent()  # nothing is kept of what was done before, if anything was
        what = f"what it took before it went on after round {round} is not known"
        return Spent(0.0, f"{what}: neither result.json nor state/seconds.json says it")

    def _checkpoint(self, state: Any, spent: Spent) -> None:
        self.store.save_spent(spent)  # before the state: rounds that are not repeated have their seconds counted
        self.store.save_state(state, state.round)
        self._write_result(state.round, False, spent)

    def _write_down(self) -> None:
        self.store.append(self.waiting)
        self.ledger.add(self.waiting)
        self.waiting.clear()

    def _write_result(self, round: int, finished: bool, spent: Spent) -> RunResult:
        result = self._result(round, finished, spent)
        self.store.write_text("result.json", result.to_json() + "\n")
        return result

    def _result(self, round: int, finished: bool, spent: Spent) -> RunResult:
        known = [entry for entry in self.ledger.final.values() if entry.architecture]  # a server knows of none
        clients = tuple(describe_client(entry, self.space, self.images) for entry in sorted(known, key=lambda entry: entry.client))
        facts = dict(self.facts)
        if spent.remark:
            facts["environment"] = {**facts["environment"], "seconds": spent.remark}
        facts |= {"rounds": round, "seed": self.seed, "seconds": spent.seconds, "privacy": self.account.spent(self.ledger.departures)}
        return RunResult(finished=finished, clients=clients, ledger=self.ledger, **facts)


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Meanwhile Python's garbage collector passes over what is there now. That is torch and the run, hundreds of thousands of objects that
    stay: to look at them again and again took 50 ms of a round."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def describe_client(entry: LedgerEntry, space: SearchSpace, images: Mapping[str, tuple[int, int]]) -> ClientResult:
    """A client's line in the result, from its final participation."""
    if entry.client not in images:
        raise DamagedRun(f"ledger.jsonl names {entry.client}, of whom nothing is known here")
    if entry.test_accuracy is None or entry.validation_accuracy is None:
        raise DamagedRun("ledger.jsonl holds a final participation without accuracies")
    cost = space.cost(Architecture.parse(entry.architecture))
    return ClientResult(
        name=entry.client,
        test_accuracy=entry.test_accuracy,
        validation_accuracy=entry.validation_accuracy,
        architecture=entry.architecture,
        parameters=cost.parameters,
        macs=cost.macs,
        train_examples=images[entry.client][0],
        test_examples=images[entry.client][1],
        judged=entry.judged,
    )
