"""`fedloom check`: somebody's images looked over before a run, and what a run with them will take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedloom import config
from fedloom.assemble.estimate import Estimate, estimate_run
from fedloom.commands.terminal import PrintJson, console, say
from fedloom.config import Settings
from fedloom.core.errors import InvalidConfig, InvalidData
from fedloom.core.registry import did_you_mean
from fedloom.data.check import LAYOUTS, Checked, check_images
from fedloom.report.words import byte_count, duration, many

PRESET = "own-images"
NAMED = 5  # remarks of a kind that are shown; problems are shown all
SHOWN = 12  # classes that have a column of their own


def check(
    place: Annotated[Path, typer.Argument(metavar="IMAGES", help="a folder of class folders, or one that holds a folder for every site")],
    source: Annotated[str, typer.Argument(metavar="[PRESET or FILE.toml]", help=f"what will be run; default: {PRESET}")] = "",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="settings that override the file")] = None,
    layout: Annotated[
        str, typer.Option(help="folder (of classes), sites (a folder each), site (one of these), or auto: folder or sites, as it looks")
    ] = "auto",
    estimate: Annotated[bool, typer.Option(help="try a few participations and say what a run will take here")] = True,
    as_json: PrintJson = False,
) -> None:
    """Look over your images before a run: every file that would stop it, class counts, copies, and time, memory and bytes of a run.

    Exit code 5 if something would stop a run.
    """
    if layout not in LAYOUTS:
        raise InvalidConfig(f"There is no layout {layout!r}. {did_you_mean(layout, list(LAYOUTS))}", layout=layout)
    if "=" in source:
        source, overrides = "", [source, *(overrides or [])]
    named = source or PRESET
    checked = check_images(place, config.load(named, overrides or []).data.image_size, layout)
    costs = None
    if estimate and not checked.problems and checked.layout != "site":
        costs = estimate_run(settings_for(place, checked, named, overrides or []))
    if as_json:
        print(json.dumps({"schema": "fedloom.check/1", **asdict(checked), "estimate": costs and asdict(costs)}, indent=2))
    else:
        _show(checked, costs, named)
    if checked.problems:
        raise InvalidData(f"{place}: {many(len(checked.problems), 'thing')} would stop a run", problems=len(checked.problems))


def settings_for(place: Path, checked: Checked, source: str, overrides: list[str]) -> Settings:
    """What would be run on these images. Of sites, all take part, unless that is said."""
    data = {"name": checked.layout, "folder": str(place)}
    table = config.table_of(overrides, config.read_tables(source, config.table_of(overrides)))
    table["data"] = {**table.get("data", {}), **data}
    if checked.layout == "sites":
        table["split"] = {**table.get("split", {}), "rule": "members"}
        said = config.table_of(overrides)
        table["clients"] = len(checked.counts)
        table["participants"] = said.get("participants", len(checked.counts))
    return config.from_table(table)


def _show(checked: Checked, costs: Estimate | None, source: str) -> None:
    console.print(_counts(checked))
    for line in _findings(checked):
        say(line)
    if costs:
        least, most = costs.seconds
        there = duration(least) if duration(least) == duration(most) else f"{duration(least)} to {duration(most)}"
        say(f"A run of {source} takes about {there} here, {costs.memory_mb:,.0f} MB of memory,")
        say(f"and sends {byte_count(costs.bytes_up)} up and {byte_count(costs.bytes_down)} down in {costs.participations} participations.")
    if not checked.problems:
        say("Nothing would stop a run.")


def _counts(checked: Checked) -> Table:
    """A row for every site (and part), a column for every class; of many classes, the number of them."""
    classes = checked.classes
    wide = len(classes) <= SHOWN
    table = Table("site", "part", "images", *(classes if wide else ["classes", "fewest", "most"]), title="images that can be read")
    for member, parts in checked.counts.items():
        for part, counts in parts.items():
            numbers = [counts.get(name, 0) for name in classes] if wide else [len(counts), min(counts.values()), max(counts.values())]
            table.add_row(member or "–", part, f"{sum(counts.values()):,}", *(f"{number:,}" for number in numbers))
    return table


def _findings(checked: Checked) -> Iterator[str]:
    for finding in checked.problems:
        yield f"stops a run ({finding.kind}): {finding.what}"
    remarks = [finding for finding in checked.findings if not finding.stops]
    for kind in dict.fromkeys(finding.kind for finding in remarks):
        own = [finding for finding in remarks if finding.kind == kind]
        for finding in own[:NAMED]:
            yield f"remark ({kind}): {finding.what}"
        if len(own) > NAMED:
            yield f"remark ({kind}): and {many(len(own) - NAMED, 'other')} like these; --json names all"
