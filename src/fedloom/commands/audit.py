"""`fedloom audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.commands.terminal import TrustPlugins, console, say
from fedloom.core.errors import DamagedRun
from fedloom.federation.agreement import read_site
from fedloom.federation.site.record import own_record
from fedloom.federation.site.statement import LOG
from fedloom.report.reading import open_run
from fedloom.report.terminal.audit import audit_view
from fedloom.report.view import Course


def audit(
    source: Annotated[Path, typer.Argument(metavar="RUN or SITE.toml", help="folder of a run or of a server; at a site: its settings")],
    rounds: Annotated[bool, typer.Option("--rounds", help="also every round, with the bytes of each field")] = False,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Show what left the clients of a run, or this site: every field, its shape, bytes and rounds, who could read it, what protects it."""
    if source.is_file():
        _audit_site(source, rounds)
        return
    if (source / LOG).exists():
        raise DamagedRun(f"{source} is a site's folder. Name the site's settings in place of it: fedloom audit SITE.toml")
    run = open_run(source, trust_plugins)
    title = f"What left the clients: {run.method} on {run.dataset}, {run.spoken_state}"
    for part in audit_view(title, run.course, run.manifest, run.protection, run.privacy, rounds):
        console.print(part, highlight=False)
    if run.manifest is None:
        say(f"What each field means is not shown: {run.no_data}")


def _audit_site(file: Path, rounds: bool) -> None:
    record = own_record(read_site(file))
    title = f"What left {record.site} in the federation {record.federation}"
    for part in audit_view(title, Course.of(record.entries), record.uploads, record.privacy, record.spent, rounds):
        console.print(part, highlight=False)
    for line in record.remarks:
        say(line)
