"""What papers report for the data set of a page's runs."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.report.figure import Numbers
from fedloom.report.page.blocks import folded, numbers_table
from fedloom.report.page.html import Html, joined
from fedloom.report.published import TITLE, published_beside
from fedloom.report.view import RunView

COLUMNS = ("method", "network or variant", "test accuracy, %", "data set", "source", "protocol")


def published_block(runs: Sequence[RunView]) -> Html:
    """Folded, so that nobody takes them for the page's own numbers; empty where papers have none."""
    found = published_beside({run.dataset for run in runs}, {run.space_name for run in runs}, {run.method for run in runs})
    if not found:
        return joined()
    rows = tuple((one.method, one.what, one.shown, one.dataset, one.source, one.protocol) for one in found)
    return folded(TITLE, numbers_table(Numbers(COLUMNS, rows), TITLE))
