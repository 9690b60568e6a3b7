"""Clients that answer in turn, and the work that all of them ask for, done at once.

A client's half of a method is ordinary code that asks for training and scores. Among ``answers`` one client after the other runs until
it asks; when all of them wait, what they asked for is done together, a job for all that asked the same, and they go on. Threads serve
as places to wait only: one runs at a time, in the order of clients, so results do not depend on timing.

A client may lead clients itself: runs side by side are such clients. What its own clients ask for it asks for in turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")
Job = Callable[[Sequence[Request]], Sequence[Result]]  # a result for every request

PATIENCE = 5.0  # seconds for a dismissed client that is in the middle of something of its own

_here = threading.local()  # .client: whose thread this is


def together(job: Job[Request, Result], requests: Sequence[Request]) -> list[Result]:
    """What a job makes of these requests. Among ``answers`` it gets those of all clients that ask for it, in the order of clients."""
    client: _Client[Any] | None = getattr(_here, "client", None)
    return list(job(requests)) if client is None else client.ask(job, requests)


def own_seconds() -> float:
    """A clock that, among ``answers``, stands while others run, and counts a share of what is done together."""
    client: _Client[Any] | None = getattr(_here, "client", None)
    return time.perf_counter() - (0.0 if client is None else client.others)


def answers(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """What each task returns. An error in one of them is raised here, and the others are dismissed. An error of a job is raised where it
    was asked for."""
    if len(tasks) == 1:
        return [tasks[0]()]
    clients = [_Client(task) for task in tasks]
    try:
        while waiting := [client for client in clients if not client.over]:
            _serve(waiting)
            for client in waiting:
                client.go_on()
                if client.error is not None:
                    raise client.error
    finally:
        for client in clients:
            client.dismiss()
    return [client.result for client in clients]


def _serve(clients: Sequence[_Client[Any]]) -> None:
    """Do what they asked for, each job once."""
    groups: dict[Any, list[_Client[Any]]] = {}
    for client in clients:
        if client.asked is not None:
            groups.setdefault(client.asked[0], []).append(client)
    for job, group in groups.items():
        asked = [client.asked[1] for client in group if client.asked is not None]
        start = own_seconds()
        try:
            results = iter(together(job, [request for requests in asked for request in requests]))
            given: list[list[Any] | Exception] = [[next(results) for _ in requests] for requests in asked]
        except Exception as error:
            given = [error for _ in group]
        share = (own_seconds() - start) / len(group)
        for client, own in zip(group, given, strict=True):
            client.give(own, share)


class _Dismissed(BaseException):
    """Ends a client whose answer nobody waits for any more."""


class _Client(Generic[Result]):
    """A task in a thread of its own, which runs only between ``go_on`` and its next question."""

    result: Result

    def __init__(self, task: Callable[[], Result]) -> None:
        self.over, self.others = False, 0.0  # others: seconds in which it waited for what is not its own
        self.error: BaseException | None = None
        self.asked: tuple[Job[Any, Any], Sequence[Any]] | None = None
        self._given: list[Any] | Exception = []
        self._task, self._dismissed, self._spent = task, False, 0.0
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), daemon=True)

    # -- for those who lead ------------------------------------------------------
    def go_on(self) -> None:
        """Let it run until it asks or ends."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()

    def give(self, results: list[Any] | Exception, seconds: float) -> None:
        """seconds: its share of the work."""
        self.asked, self._given, self._spent = None, results, seconds

    def dismiss(self) -> None:
        """Ends it where it waits, and waits for that: clients clean up one after the other too."""
        if self._thread.ident is not None:
            if not self.over:
                self._dismissed = True
                self._turn.release()
            self._thread.join(PATIENCE)

    # -- in its thread -------------------------------------------------------------
    def _run(self) -> None:
        _here.client = self
        try:
            self.result = self._task()
        except _Dismissed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.over = True
            self._back.release()

    def ask(self, job: Job[Any, Any], requests: Sequence[Any]) -> list[Any]:
        if self._dismissed:
            raise _Dismissed
        start = time.perf_counter()
        self.asked = (job, requests)
        self._back.release()
        self._turn.acquire()
        if self._dismissed:
            raise _Dismissed
        self.others += time.perf_counter() - start - self._spent
        given, self._given = self._given, []
        if isinstance(given, Exception):
            raise given
        return given
