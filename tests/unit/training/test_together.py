"""Clients that answer in turn: who runs when, what is served together, whose seconds count, and what an error leaves behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from fedloom.training import together as module
from fedloom.training.together import answers, own_seconds, together

Task = Callable[[], Any]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert [thread for thread in threading.enumerate() if thread not in before] == []


class Jobs:
    """Two kinds of work, and what was asked of each, call by call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []

    def double(self, requests: Sequence[int]) -> list[int]:
        self.calls.append(("double", list(requests)))
        return [2 * request for request in requests]

    def negate(self, requests: Sequence[int]) -> list[int]:
        self.calls.append(("negate", list(requests)))
        return [-request for request in requests]


# -- order and grouping ------------------------------------------------------------------
def test_alone_a_job_runs_at_once() -> None:
    jobs = Jobs()
    assert together(jobs.double, [1, 2]) == [2, 4]
    assert answers([lambda: together(jobs.double, [3])]) == [[6]]  # one client needs no thread
    assert answers([]) == []
    assert jobs.calls == [("double", [1, 2]), ("double", [3])]


def test_clients_run_one_at_a_time_in_their_order_and_ask_together() -> None:
    jobs, seen = Jobs(), []

    def client(name: int) -> Task:
        def task() -> int:
            seen.append((name, "begins"))
            (one,) = together(jobs.double, [name])
            seen.append((name, one))
            (two,) = together(jobs.double, [one])
            seen.append((name, two))
            return two

        return task

    assert answers([client(name) for name in (1, 2, 3)]) == [4, 8, 12]
    assert seen == [(1, "begins"), (2, "begins"), (3, "begins"), (1, 2), (2, 4), (3, 6), (1, 4), (2, 8), (3, 12)]
    assert jobs.calls == [("double", [1, 2, 3]), ("double", [2, 4, 6])]


def test_several_requests_of_one_client_come_back_to_it() -> None:
    jobs = Jobs()
    counts = {1: 3, 2: 0, 3: 1}
    tasks = [lambda name=name, count=count: together(jobs.double, [name] * count) for name, count in counts.items()]  # type: ignore[misc]
    assert answers(tasks) == [[2, 2, 2], [], [6]]
    assert jobs.calls == [("double", [1, 1, 1, 3])]


def test_different_jobs_are_served_apart_each_once() -> None:
    """Grouped by job, jobs in the order in which clients first ask for them."""
    jobs = Jobs()
    tasks = [
        lambda: together(jobs.negate, [1]),
        lambda: together(jobs.double, [2]),
        lambda: together(jobs.negate, [3]),
        lambda: together(Jobs().double, [4]),  # of another object: not the same job
    ]
    assert answers(tasks) == [[-1], [4], [-3], [8]]
    assert jobs.calls == [("negate", [1, 3]), ("double", [2])]


def test_clients_may_end_early_or_never_ask() -> None:
    jobs = Jobs()

    def client(questions: int) -> Task:
        return lambda: [together(jobs.double, [questions])[0] for _ in range(questions)]

    assert answers([client(questions) for questions in (2, 0, 1, 3)]) == [[4, 4], [], [2], [6, 6, 6]]
    assert [requests for _, requests in jobs.calls] == [[2, 1, 3], [2, 3], [3]]


def test_a_job_may_itself_ask() -> None:
    """It runs where nobody waits: its questions are answered at once."""
    jobs = Jobs()

    def outer(requests: Sequence[int]) -> list[int]:
        return together(jobs.negate, together(jobs.double, requests))

    assert answers([lambda: together(outer, [1]), lambda: together(outer, [2])]) == [[-2], [-4]]
    assert jobs.calls == [("double", [1, 2]), ("negate", [2, 4])]


def test_clients_of_clients_meet() -> None:
    jobs = Jobs()

    def run(*names: int) -> Task:
        return lambda: [answers([lambda name=name: together(jobs.double, [name]) for name in names]) for _ in range(2)]  # type: ignore[misc]

    assert answers([run(1, 2), lambda: together(jobs.double, [3]), run(4)]) == [[[[2], [4]]] * 2, [6], [[[8]]] * 2]
    assert jobs.calls == [("double", [1, 2, 3, 4]), ("double", [1, 2, 4])]


def test_many_clients_give_the_same_every_time() -> None:
    """Whatever the system does with their threads."""

    def run() -> list[Any]:
        jobs, order = Jobs(), []

        def client(name: int) -> Task:
            def task() -> int:
                value = name
                for _ in range(name % 4):
                    order.append(name)
                    (value,) = together(jobs.negate if name % 3 else jobs.double, [value])
                return value

            return task

        return [answers([client(name) for name in range(24)]), order, jobs.calls]

    first = run()
    assert all(run() == first for _ in range(5))


# -- errors --------------------------------------------------------------------------------
def test_the_error_of_a_client_is_raised_and_the_others_are_dismissed() -> None:
    jobs, seen, ended = Jobs(), [], []

    def good(name: int) -> Task:
        def task() -> None:
            try:
                together(jobs.double, [name])
                together(jobs.double, [name])
                seen.append(name)
            except Exception:  # what a client does about errors is not told of its dismissal
                seen.append("caught")
            finally:
                ended.append(name)

        return task

    def bad() -> None:
        together(jobs.double, [7])
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        answers([good(1), bad, good(2)])
    assert seen == [] and ended == [1, 2] and len(jobs.calls) == 1
    assert together(jobs.double, [1]) == [2]  # the next one is not disturbed


def test_those_who_did_not_begin_never_do() -> None:
    begun: list[int] = []

    def bad() -> None:
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        answers([lambda: begun.append(0), bad, lambda: begun.append(2)])
    assert begun == [0]


def test_a_client_that_does_not_want_to_end_is_dismissed_again() -> None:
    jobs, tries = Jobs(), []

    def stubborn() -> None:
        while len(tries) < 3:
            try:
                together(jobs.double, [1])
            except BaseException as error:
                tries.append(type(error).__name__)

    def bad() -> None:
        together(jobs.double, [2])
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        answers([bad, stubborn])
    assert tries == ["_Dismissed"] * 3


def test_an_error_of_a_job_is_raised_where_it_was_asked_for() -> None:
    """So that a client's name can be put to it, as when it works alone."""
    ended: list[tuple[int, str]] = []

    def broken(requests: Sequence[int]) -> list[int]:
        raise MemoryError("too many")

    def client(name: int) -> Task:
        def task() -> None:
            try:
                together(broken, [name])
            except BaseException as error:
                ended.append((name, type(error).__name__))
                raise

        return task

    with pytest.raises(MemoryError, match="too many"):
        answers([client(1), client(2), client(3)])
    assert ended == [(1, "MemoryError"), (2, "_Dismissed"), (3, "_Dismissed")]


def test_an_interrupt_ends_all_of_them() -> None:
    jobs = Jobs()

    def interrupted() -> None:
        together(jobs.double, [1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answers([lambda: together(jobs.double, [2]), interrupted, lambda: together(jobs.double, [3])])


def test_a_client_may_live_with_the_error_of_a_job() -> None:
    jobs = Jobs()

    def broken(requests: Sequence[int]) -> list[int]:
        raise MemoryError("too many")

    def client(name: int) -> Task:
        def task() -> list[int]:
            try:
                return together(broken, [name])
            except MemoryError:
                return together(jobs.double, [name])

        return task

    assert answers([client(1), client(2), lambda: together(jobs.negate, [3])]) == [[2], [4], [-3]]
    assert jobs.calls == [("negate", [3]), ("double", [1, 2])]


# -- seconds ------------------------------------------------------------------------------------
class Clock:
    """Time that passes only when somebody works."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr(module.time, "perf_counter", lambda: self.now)

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_others_do_not_count_and_common_work_counts_by_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def job(requests: Sequence[float]) -> Sequence[float]:
        clock.work(12)
        return requests

    def other(requests: Sequence[float]) -> Sequence[float]:
        clock.work(50)
        return requests

    def client(own: float, kind: Any) -> Task:
        def task() -> float:
            start = own_seconds()
            clock.work(own)
            together(kind, [own])
            clock.work(2 * own)
            return own_seconds() - start

        return task

    # three share a job, however many requests they make of it; the fourth has one to itself
    assert answers([client(1, job), client(5, job), client(10, job), client(3, other)]) == [3 + 4, 15 + 4, 30 + 4, 9 + 50]
    start = own_seconds()
    clock.work(7)
    together(job, [0.0])
    assert own_seconds() - start == 7 + 12  # alone everything is one's own


def test_shares_add_up_to_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, began = Clock(monkeypatch), 100.0

    def job(requests: Sequence[float]) -> Sequence[float]:
        clock.work(sum(requests))
        return requests

    def client(questions: int) -> Task:
        def task() -> float:
            start = own_seconds()
            for number in range(questions):
                clock.work(0.5)
                together(job, [number + 1.0])
            return own_seconds() - start

        return task

    spent = answers([client(questions) for questions in (3, 1, 2)])
    assert sum(spent) == pytest.approx(clock.now - began)


def test_of_work_for_several_runs_each_counts_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def job(requests: Sequence[float]) -> Sequence[float]:
        clock.work(12)
        return requests

    def client(own: float) -> Task:
        def task() -> float:
            start = own_seconds()
            clock.work(own)
            together(job, [own])
            return own_seconds() - start

        return task

    def run(*clients: float) -> Task:
        def task() -> tuple[float, list[float]]:
            start = own_seconds()
            spent = answers([client(own) for own in clients])
            return own_seconds() - start, spent

        return task

    # each of two runs counts half of the job, and each of its clients an equal part of that half
    assert answers([run(1, 2, 3), run(5, 7)]) == [(6 + 6, [1 + 2, 2 + 2, 3 + 2]), (12 + 6, [5 + 3, 7 + 3])]


def test_real_time_passes_too() -> None:
    def client() -> float:
        start = own_seconds()
        time.sleep(0.02)
        return own_seconds() - start

    one, two = answers([client, client])
    assert 0.02 <= one < 0.2 and 0.02 <= two < 0.2
