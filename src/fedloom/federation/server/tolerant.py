"""A server that leaves out reports which pass every check of their form: those it cannot use, and those that would outweigh all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

import numpy as np

from fedloom.core.errors import BadReport, FedloomError, InvalidConfig, one_line, printable
from fedloom.core.messages import Report
from fedloom.core.method import Method
from fedloom.federation.agreement import RoundSettings
from fedloom.federation.wire.messages import norm

FEW = 3  # reports of a round without which nobody can be told from the others


@dataclass(frozen=True)
class Tolerant:
    """A method's ``absorb`` that leaves out, with one line for each, reports it cannot use: for an architecture that is not in the space,
    without the fields it needs, or after which the state would no longer be finite. As absorbing is pure, it can be tried.

    It also leaves out who claims more training images than was agreed on (``claims``), or weighs ``settings.outlier`` times more than the
    median report: an average follows the images and steps that a site claims, and these cannot be checked.
    """

    method: Method[Any]
    say: Callable[[str], None]
    settings: RoundSettings = field(default_factory=RoundSettings)
    claims: Mapping[str, int] = field(default_factory=dict)

    def absorb(self, state: Any, reports: Sequence[Report]) -> Any:
        reports = self._in_proportion(reports)
        try:
            return self._absorbed(state, reports)
        except Exception as error:
            faults = [self._why_not(state, report) for report in reports]
            useful = [report for report, fault in zip(reports, faults, strict=True) if not fault]
            if len(useful) == len(reports) or (not useful and isinstance(error, InvalidConfig)):
                raise  # it is about none of them, but about the settings
            self._leave_out(reports, faults)
            return self._absorbed(state, useful)

    def _leave_out(self, reports: Sequence[Report], faults: Sequence[str]) -> None:
        for report, fault in zip(reports, faults, strict=True):
            if fault:
                self.say(printable(f"{report.client}, round {report.round + 1}: left out: {fault}"))

    def _in_proportion(self, reports: Sequence[Report]) -> Sequence[Report]:
        found = [dict(self._weights_of(report)) for report in reports]
        names = {name for own in found for name in own}
        usual = {name: median(own.get(name, 0.0) for own in found) for name in names} if len(reports) >= FEW else {}
        faults = [self._too_much(report.client, own, usual) for report, own in zip(reports, found, strict=True)]
        self._leave_out(reports, faults)
        return [report for report, fault in zip(reports, faults, strict=True) if not fault]

    def _weights_of(self, report: Report) -> Iterator[tuple[str, float]]:
        """What a report weighs in an average, by name."""
        if "examples" in report.facts:
            yield "examples", float(report.facts["examples"])
        for name, arrays in report.arrays.items():
            upload = self.method.uploads[name]
            if upload.counts:
                yield name, max((float(array.max(initial=0)) for array in arrays.values()), default=0.0)
            elif upload.like:
                yield name, norm(arrays)

    def _too_much(self, client: str, own: Mapping[str, float], usual: Mapping[str, float]) -> str:
        """Why a report would outweigh the others; nothing if it would not."""
        agreed = self.claims.get(client)
        if agreed is not None and own.get("examples", 0) > agreed:
            return f"it claims {own['examples']:g} training images, and {agreed} were agreed on (federation.images)"
        for name, size in own.items():
            most = self.settings.outlier * usual.get(name, 0.0)
            if 0 < most < size and not (name == "examples" and agreed is not None):
                cure = ". If that is true, agree on federation.images" if name == "examples" else ""
                return (
                    f"its {name} is {size:.3g}, more than {self.settings.outlier:g} times the median of the round ({usual[name]:.3g}){cure}"
                )
        return ""

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
