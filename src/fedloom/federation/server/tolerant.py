"""A method that leaves out reports it cannot use: some pass every check of their form and would still break a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fedloom.core.errors import BadReport, FedloomError, InvalidConfig, one_line, printable
from fedloom.core.messages import Report
from fedloom.core.method import Method


@dataclass(frozen=True)
class Tolerant:
    """A method's ``absorb`` that leaves out, with one line for each, reports it cannot use: for an architecture that is not in the space,
    without the fields it needs, or after which the state would no longer be finite. As absorbing is pure, it can be tried.
    """

    method: Method[Any]
    say: Callable[[str], None]

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
