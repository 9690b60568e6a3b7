"""What left the clients, who could read it, and what protected it: the same rows and sentences for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.core.boundary import Manifest, Upload
from fedloom.core.privacy import EXAMPLES, OF_SUMS, UPDATE, PrivacySettings
from fedloom.core.words import ranges
from fedloom.report.figure import Numbers
from fedloom.report.view import Course
from fedloom.report.words import byte_count, plain, privacy_words

COVERAGE, SHARES = "coverage", "shares"
COLUMNS = ("field", "what it is", "what is checked", "shape", "rounds", "per report, mean", "together", "readable by", "protected by")
UNPROTECTED = "privacy.noise is 0, so there is no epsilon: nothing bounds what all updates together tell about a client"


def fields_that_left(course: Course, declared: Manifest | None, own: PrivacySettings) -> Numbers | None:
    """A row for every field that a method declares, or that left without; nothing if there is none."""
    known = dict(declared or {})
    if own.secure:  # what a method declares stays at the client; parts of sums leave
        known = {name: upload for name, upload in OF_SUMS.items() if name in {*known, *course.totals.uploads}} if known else {}
    names = [*known, *sorted(course.totals.uploads - set(known))]
    rows = tuple(_row(course, name, known.get(name), own) for name in names)
    return Numbers(COLUMNS, rows) if rows else None


def rounds_that_left(course: Course) -> Numbers | None:
    """A row for every round in which something left, with the bytes of each field; nothing where fields were not recorded."""
    if course.unnamed_up or not course.up_by_round:
        return None
    names = sorted({name for sent in course.up_by_round.values() for name in sent})
    rows = []
    for number, sent in sorted(course.up_by_round.items()):
        sizes = [f"{sent.get(name, 0):,}" for name in names]
        rows.append((str(number + 1), f"{course.senders[number]:,}", *sizes, f"{sum(sent.values()):,}"))
    columns = ("round", "clients", *(f"bytes of {plain(name)}" for name in names), "bytes together")
    return Numbers(columns, tuple(rows))


def sentences(course: Course, privacy: Mapping[str, Any]) -> list[str]:
    """privacy: of result.json."""
    sent = f"{course.reports:,} of {course.participations:,} participations sent a report"
    totals = course.totals
    sums = f"{sent}, {byte_count(totals.bytes_up)} together; {byte_count(totals.bytes_down)} went the other way"
    late = [f"{course.late:,} came after the deadline and were not used"] if course.late else []
    if not totals.uploads:
        return [sums, *late]
    return [sums, *late, privacy_words(privacy) or UNPROTECTED]


def _row(course: Course, name: str, upload: Upload | None, own: PrivacySettings) -> tuple[str, ...]:
    left = name in course.totals.uploads
    known = name in course.up_by_field and not course.unnamed_up
    size = course.up_by_field.get(name, 0)
    each, total = (byte_count(size / max(course.reports, 1)), byte_count(size)) if known else ("not recorded" if left else "–", "–")
    rounds = ranges(number + 1 for number, sent in course.up_by_round.items() if name in sent)
    return (
        plain(name),
        plain(upload.meaning, 200) if upload else "not declared",
        _checks(upload),
        _shapes(course.shapes.get(name, ())) if left else "–",
        rounds if known else "not recorded" if left else "none",
        each,
        total,
        readers(name, own.secure),
        protection(name, own),
    )


def readers(name: str, secure: bool) -> str:
    """Who could read a field as one client sent it, and what others see of it."""
    if secure and name in (UPDATE, COVERAGE):
        return f"nobody; {'everybody' if name == UPDATE else 'the server'}, in the sum of its round"
    if name == SHARES:
        return "the site that each is sealed for"
    return "the server; everybody, in the mean of its round" if name == UPDATE else "the server"


def protection(name: str, own: PrivacySettings) -> str:
    """The settings that make a field say less."""
    if name == EXAMPLES:
        return "privacy.noise: all send 1" if own.noise else "nothing"
    settings = [f"privacy.secure (least {own.least})"] if own.secure and name in (UPDATE, COVERAGE) else []
    settings += [f"privacy.{key}={getattr(own, key):g}" for key in ("clip", "noise") if name == UPDATE and getattr(own, key)]
    return ", ".join(settings) or "nothing"


def _shapes(known: Sequence[str]) -> str:
    """One, or how many different ones there were."""
    more = f", and {len(known) - 1} other shapes" if len(known) > 1 else ""
    return f"{plain(known[0], 120)}{more}" if known else "not recorded"


def _checks(upload: Upload | None) -> str:
    if upload is None:
        return "–"
    if upload in OF_SUMS.values():
        return "masks, keys or shares of the agreed size"
    if upload.like is None:
        return f"one finite number, at least {upload.low:g}"
    shape = f"arrays {'that are part of' if upload.part else 'like'} the {upload.like} it received"
    return f"{shape}, {'whole numbers from 0 on' if upload.counts else 'finite'}"
