"""What left the building: the manifest, field by field, with bytes."""

from __future__ import annotations

from fedloom.core.boundary import Upload
from fedloom.report.figure import Numbers
from fedloom.report.page.blocks import missing, numbers_table
from fedloom.report.page.html import Html, tag, ticked
from fedloom.report.view import RunView
from fedloom.report.words import byte_count, plain, privacy_words

REVEALS = (
    "Fedloom checks and counts what leaves; it does not hide what a field reveals. A server that sees an update can draw conclusions about "
    "the data it was trained on, and an update that is zero where a client did not train shows the outline of its network."
)


def privacy_blocks(run: RunView) -> list[Html]:
    sent = run.course.totals.uploads
    blocks = []
    declared = dict(run.manifest or {})
    names = [*declared, *sorted(sent - set(declared))]
    if names:
        columns = ("field", "what it is", "what is checked", "left", "per report, mean", "in the whole run")
        rows = tuple(_row(run, name, declared.get(name)) for name in names)
        blocks.append(numbers_table(Numbers(columns, rows), "What may leave a client, and what did"))
    else:
        blocks.append(
            tag("p", "The method declares no field that may leave a client. Any report that carried one would have been refused.")
        )
    if run.manifest is None:
        blocks.append(missing(f"What each field means is not shown: {run.no_data or 'the method could not be read'}"))
    totals = run.course.totals
    reports = f"{run.course.reports:,} of {run.course.participations:,} participations sent a report"
    sums = f"{reports}, {byte_count(totals.bytes_up)} together; {byte_count(totals.bytes_down)} went the other way."
    if run.course.late:
        sums += f" {run.course.late:,} came after the deadline and were not used."
    blocks.append(tag("p", sums))
    if words := privacy_words(run.privacy):
        blocks.append(tag("p", f"{words}."))
    blocks.append(tag("p", ticked(REVEALS if names else "This method shows the server nothing of a client's data.")))
    return blocks


def _row(run: RunView, name: str, upload: Upload | None) -> tuple[str, ...]:
    course = run.course
    left = name in course.totals.uploads
    known = name in course.up_by_field and not course.unnamed_up
    size = course.up_by_field.get(name, 0)
    each, total = (byte_count(size / max(course.reports, 1)), byte_count(size)) if known else ("not recorded" if left else "–", "–")
    return (plain(name), plain(upload.meaning, 200) if upload else "not declared", _checks(upload), "yes" if left else "no", each, total)


def _checks(upload: Upload | None) -> str:
    if upload is None:
        return "–"
    if upload.like is None:
        return f"one finite number, at least {upload.low:g}"
    shape = f"arrays {'that are part of' if upload.part else 'like'} the {upload.like} it received"
    return f"{shape}, {'whole numbers from 0 on' if upload.counts else 'finite'}"
