"""Rounds in which the server gets sums and no single report (``privacy.secure``).

What a client adds to a sum, and what a sum means, is said here once. A simulation adds the same whole numbers without masks, which cancel
in the sum anyway: it has nobody to hide from, and ends with the numbers of a federation whose sites mask (``federation/server/sums.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fedloom.core.boundary import Manifest
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import EVERYBODY, FINISH, Arrays, Instruction, Report, field_bytes, field_shapes
from fedloom.core.method import Method
from fedloom.core.privacy import COVERAGE, EXAMPLES, UPDATE, PrivacySettings
from fedloom.engine.base import Link
from fedloom.maths.sums import Bits, FixedPoint, Words, counting, flat, kept, mean, mean_of_trained, shaped, trained

WEIGHTS = "weights"  # the instruction's group of arrays that updates are of, all of them
RULES = ("fedavg", "coverage", "coverage_equal")  # which need no more than sums


@dataclass(frozen=True)
class Counted:
    """How many clients trained each entry, and how many were counted."""

    counts: Words
    clients: int


@dataclass(frozen=True)
class Sums:
    """clients: most of a round; parts: clients train parts of what is shared, and say which; summand: as ``Method.summand``; clear: facts
    of a report that the server still reads of every client, each by itself; singles: it wants a report without update of each client."""

    settings: PrivacySettings
    clients: int
    parts: bool
    summand: Callable[[Instruction, Report], Report | None] = lambda instruction, report: report if report.arrays else None
    clear: Manifest = field(default_factory=dict)
    singles: bool = False

    @cached_property
    def fixed(self) -> FixedPoint:
        return FixedPoint(self.settings.range, self.clients)

    @property
    def labels(self) -> tuple[str, ...]:
        """The sums of a round, by the field that they hide, in their order."""
        return (COVERAGE, UPDATE) if self.parts else (UPDATE,)

    # -- a client's half -------------------------------------------------------------------------
    def counts_of(self, report: Report) -> Words:
        """(entries,) of the first sum."""
        return trained(report.arrays[COVERAGE], report.arrays[UPDATE], self.clients)

    def update_of(self, report: Report, seen: Bits | None = None) -> Words:
        """(entries,) of the second sum, or of the only one; with weights the client's is one more word at the end. seen: entries that may
        be seen; all if there is no first sum."""
        values, most = flat(report.arrays[UPDATE]), self.settings.examples
        if seen is not None:
            values *= seen
        if not most:
            return self.fixed.encoded(values)
        weight = min(int(report.facts[EXAMPLES]), most)
        return np.append(self.fixed.encoded(values, weight / most), np.array([weight], "<u4"))

    def single(self, report: Report) -> Report:
        """What the server may read of one client."""
        return Report(report.client, report.round, {}, {name: fact for name, fact in report.facts.items() if name in self.clear})

    # -- the server's half -----------------------------------------------------------------------
    def words(self, entries: int, counting_them: bool) -> tuple[int, np.dtype[np.unsignedinteger]]:
        """How long a client's part of a sum is, and of what."""
        return (entries, counting(self.clients)) if counting_them else (entries + bool(self.settings.examples), np.dtype("<u4"))

    def seen(self, counted: Counted, still: int) -> Bits:
        """Entries that may be seen in a sum of ``still`` clients."""
        return kept(counted.counts, self.settings.least, counted.clients - still)

    def report(
        self, round: int, total: Words, summed: int, like: Arrays, counted: Counted | None = None, seen: Bits | None = None
    ) -> Report:
        """The sum as the report of one client, whose update is the mean: a method that averages makes of it what it is."""
        if counted is None or seen is None:
            most = self.settings.examples
            weight = float(total[-1]) / most if most else float(summed)
            found, seen = mean(total[:-1] if most else total, self.fixed, weight), None
        else:
            found = mean_of_trained(total, self.fixed, counted.counts, seen, counted.clients, summed)
        arrays = {UPDATE: shaped(found, like)}
        if seen is not None and not self.singles:  # where the server draws the parts, methods have no such field
            arrays[COVERAGE] = {name: array > 0 for name, array in shaped(seen, like).items()}
        return Report(EVERYBODY, round, arrays, {EXAMPLES: 1})

    def without_masks(self, reports: Sequence[Report]) -> list[Report]:
        """What comes of a simulated round: nothing where fewer reported than may be seen."""
        if len(reports) < self.settings.least:
            return []
        first, summed = reports[0], len(reports)
        counted = Counted(_sum([self.counts_of(report) for report in reports]), summed) if self.parts else None
        seen = self.seen(counted, summed) if counted else None
        total = _sum([self.update_of(report, seen) for report in reports])
        return [self.report(first.round, total, summed, first.arrays[UPDATE], counted, seen)]

    def bytes_of(self, instruction: Instruction, report: Report) -> dict[str, int]:
        """What leaves a client in place of a report's fields; keys and shares, some kilobytes, come on top."""
        masked = {name: count * word.itemsize for name, (count, word) in self._parts_of(instruction, report).items()}
        return {**masked, **field_bytes(self.single(report))}

    def shapes_of(self, instruction: Instruction, report: Report) -> dict[str, str]:
        """The same in words."""
        parts = self._parts_of(instruction, report)
        masked = {name: f"{count:,} masked numbers ({word.name})" for name, (count, word) in parts.items()}
        return {**masked, **field_shapes(self.single(report))}

    def _parts_of(self, instruction: Instruction, report: Report) -> dict[str, tuple[int, np.dtype[np.unsignedinteger]]]:
        if (summand := self.summand(instruction, report)) is None:
            return {}
        entries = sum(array.size for array in summand.arrays[UPDATE].values())
        return {name: self.words(entries, name == COVERAGE) for name in self.labels}


class SummedLink:
    """A link to simulated clients that gives their sum for their reports."""

    def __init__(self, link: Link, sums: Sums) -> None:
        self._link, self._sums, self.at_once = link, sums, link.at_once

    def clients(self) -> Sequence[str]:
        return self._link.clients()

    def exchange(self, instructions: Sequence[Instruction]) -> list[Report]:
        reports, sums = self._link.exchange(instructions), self._sums
        if any(instruction.action == FINISH for instruction in instructions):
            return reports
        asked = {instruction.client: instruction for instruction in instructions}
        reports.sort(key=lambda report: report.client)
        parts = [part for report in reports if (part := sums.summand(asked[report.client], report)) is not None]
        return [*sums.without_masks(parts), *(sums.single(report) for report in reports if sums.singles)]


def check_secure(settings: PrivacySettings, name: str, method: Method[Any], rule: str, parts: bool, participants: int) -> None:
    """Refuse secure sums where they cannot be made, or would hide less than they seem to. name: the method's; rule: by which its server
    averages updates, empty if it needs them for something else; parts: clients may train parts of what is shared."""
    uploads = method.uploads
    if not settings.secure or not uploads:
        return
    off = "or privacy.secure=false"
    whole = UPDATE in uploads and uploads[UPDATE].like == WEIGHTS and not uploads[UPDATE].part
    more = set(uploads) - {UPDATE, COVERAGE, EXAMPLES} - set(_clear(method))
    if not rule or not whole or more:
        what = f"The server of {name} needs every client's own report, and secure sums hide them"
        raise InvalidConfig(f"{what}. Choose a method that only averages, such as perfedsde or fedavg, {off}", key="privacy.secure")
    if rule not in RULES:
        what = f"{name}.averaging={rule} compares or weighs single updates, and secure sums hide them"
        cure = "coverage_equal" if parts else "fedavg"
        raise InvalidConfig(f"{what}. Set {name}.averaging={cure}, {off}", key=f"{name}.averaging")
    if parts and rule == "fedavg" and not settings.noise:
        what = f"{name}.averaging=fedavg does not count who trained an entry, so that a sum could show what one client changed"
        raise InvalidConfig(f"{what}. Set {name}.averaging=coverage_equal, {off}", key=f"{name}.averaging")
    if settings.examples and parts:
        what = "privacy.examples would weigh who trained an entry, and known numbers of examples then say who it was"
        raise InvalidConfig(f"{what}. Set privacy.examples=0", key="privacy.examples")
    if settings.examples and settings.noise:
        what = "privacy.examples weighs clients, and with privacy.noise all count the same"
        raise InvalidConfig(f"{what}. Set privacy.examples=0", key="privacy.examples")
    if participants < settings.least:
        what = f"participants is {participants}, and a sum needs {settings.least} (privacy.least)"
        raise InvalidConfig(f"{what}. Raise participants, {off}", key="privacy.least")


def sums_of(settings: PrivacySettings, method: Method[Any], participants: int) -> Sums | None:
    """Nothing where single reports reach the server."""
    if not settings.secure or not method.uploads:
        return None
    parts = COVERAGE in method.uploads or method.sums_parts
    return Sums(settings, participants, parts, method.summand, _clear(method), method.sums_parts)


def _clear(method: Method[Any]) -> Manifest:
    """Numbers that the server reads of every client, because its half learns from each."""
    alone = {name: upload for name, upload in method.uploads.items() if upload.like is None and name != EXAMPLES}
    return alone if method.sums_parts else {}


def _sum(words: Sequence[Words]) -> Words:
    total = np.zeros_like(words[0])
    for own in words:
        total += own
    return total
