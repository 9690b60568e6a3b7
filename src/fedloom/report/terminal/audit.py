"""What left, in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedloom.core.boundary import Manifest
from fedloom.core.privacy import PrivacySettings
from fedloom.report.audit import fields_that_left, rounds_that_left, sentences
from fedloom.report.figure import Numbers
from fedloom.report.view import Course


def audit_view(
    title: str, course: Course, declared: Manifest | None, own: PrivacySettings, privacy: Mapping[str, Any], by_round: bool
) -> Iterator[RenderableType]:
    """Field by field, each as a list of facts, as they are too many for the width of a terminal. privacy: epsilon and delta."""
    yield Text(title, style="bold")
    fields = fields_that_left(course, declared, own)
    if fields is None:
        yield Text("The method declares no field that may leave a client, and nothing left.")
    for row in fields.rows if fields else ():
        table = Table("", "", title=row[0], title_justify="left", show_header=False, box=None)
        for name, value in zip(fields.columns[1:] if fields else (), row[1:], strict=True):
            table.add_row(name, value)
        yield table
    yield from map(Text, sentences(course, privacy))
    if by_round and (rounds := rounds_that_left(course)):
        yield _table(rounds)
    elif by_round:
        yield Text("What left in each round was not recorded, or nothing left")


def _table(numbers: Numbers) -> Table:
    table = Table(*numbers.columns, title="bytes that left, by round and field")
    for row in numbers.rows:
        table.add_row(*row)
    return table
