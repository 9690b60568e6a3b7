"""What left the building: the manifest, field by field, with bytes, readers and protection."""

from __future__ import annotations

from fedloom.report.audit import fields_that_left, rounds_that_left, sentences
from fedloom.report.page.blocks import folded, missing, numbers_table
from fedloom.report.page.html import Html, joined, tag, ticked
from fedloom.report.view import RunView

REVEALS = (
    "Fedloom checks and counts what leaves. What a field reveals is limited only by what is named under “protected by”. A server that sees "
    "an update can draw conclusions about the data it was trained on, and an update that is zero where a client did not train shows the "
    "outline of its network."
)


def privacy_blocks(run: RunView) -> list[Html]:
    fields, rounds = fields_that_left(run.course, run.manifest, run.protection), rounds_that_left(run.course)
    blocks = []
    if fields:
        blocks.append(numbers_table(fields, "What may leave a client, and what did"))
    else:
        blocks.append(
            tag("p", "The method declares no field that may leave a client. Any report that carried one would have been refused.")
        )
    if run.manifest is None:
        blocks.append(missing(f"What each field means is not shown: {run.no_data or 'the method could not be read'}"))
    blocks += [tag("p", f"{sentence}.") for sentence in sentences(run.course, run.privacy)]
    blocks.append(tag("p", ticked(REVEALS if fields else "This method shows the server nothing of a client's data.")))
    if rounds:
        blocks.append(folded("What left in each round", numbers_table(rounds, "Bytes that left, by round and field")))
    return [blocks[0], joined(*blocks[1:])]
