"""A server that does not fall over one report: some pass every check of their form and are still of no use to the method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fedloom.core.boundary import Manifest
from fedloom.core.client_site import ClientSite
from fedloom.core.errors import BadReport, FedloomError, InvalidConfig, one_line, printable
from fedloom.core.messages import Instruction, Report
from fedloom.core.method import Answer, Method


@dataclass(frozen=True)
class Tolerant(Method[Any]):
    """A method, but reports that it cannot absorb are left out, with one line for each: one for an architecture that is not in the space,
    one without the fields it needs, one after which the state would no longer be finite. As absorbing is pure, it can be tried.
    """

    method: Method[Any]
    say: Callable[[str], None]

    @property
    def uploads(self) -> Manifest:
        return self.method.uploads

    def start(self, seed: int) -> Any:
        return self.method.start(seed)

    def plan(self, state: Any, clients: Sequence[str]) -> list[Instruction]:
        return self.method.plan(state, clients)

    def absorb(self, state: Any, reports: Sequence[Report]) -> Any:
        try:
            return self._absorbed(state, reports)
        except Exception as error:
            faults = [self._why_not(state, report) for report in reports]
            useful = [report for report, fault in zip(reports, faults, strict=True) if not fault]
            if len(useful) == len(reports) or (not useful and isinstance(error, InvalidConfig)):
                raise  # it is about none of them, but about the settings
            for report, fault in zip(reports, faults, strict=True):
                if fault:
                    self.say(printable(f"{report.client}, round {report.round + 1}: left out: {fault}"))
            return self._absorbed(state, useful)

    def finished(self, state: Any) -> bool:
        return self.method.finished(state)

    def farewell(self, state: Any, client: str) -> Instruction:
        return self.method.farewell(state, client)

    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        return self.method.answer(instruction, site)

    def _absorbed(self, state: Any, reports: Sequence[Report]) -> Any:
        after = self.method.absorb(state, reports)
        for item in fields(after):
            value = getattr(after, item.name)
            for array in value.values() if isinstance(value, dict) else [value]:
                if getattr(getattr(array, "dtype", None), "kind", "") == "f" and not np.isfinite(array).all():
                    raise BadReport(f"{item.name} would no longer be finite")
        return after

    def _why_not(self, state: Any, report: Report) -> str:
        """What is wrong with a report, taken alone; nothing if it can be absorbed."""
        try:
            self._absorbed(state, [report])
        except FedloomError as error:
            return str(error)
        except Exception as error:
            return f"it is of no use to the method ({type(error).__name__}: {one_line(error)})"
        return ""
