"""`fedloom report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedloom.commands.terminal import TrustPlugins, say
from fedloom.core.errors import InvalidConfig
from fedloom.files import write_file
from fedloom.report.figure import KINDS, Figure, pictures
from fedloom.report.neighbours import baselines_of, run_folders
from fedloom.report.page.several import comparison_figures, comparison_page
from fedloom.report.page.single import figures_of, page
from fedloom.report.reading import open_run
from fedloom.report.words import many

NAME = "report.html"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders, or a folder of runs such as compare makes")],
    out: Annotated[Path | None, typer.Option(help="file to write; default: report.html in the run's folder")] = None,
    figures: Annotated[Path | None, typer.Option(help=f"also write every figure as {', '.join(KINDS)} into this folder")] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            help="a run of local or fedavg on the same split to compare with, besides those in the same folder; may be given several times"
        ),
    ] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Write one HTML page about a run, or about several side by side. It opens anywhere and loads nothing from elsewhere."""
    folders = run_folders(runs)
    if against and len(folders) > 1:
        raise InvalidConfig("--against cannot be used with several runs: name all of them as RUN")
    views = [open_run(folder, trust_plugins) for folder in folders]
    drawn: Sequence[Figure]
    if len(views) == 1:
        baselines = baselines_of(folders[0], run_folders(against or []))
        text, drawn = page(views[0], baselines), figures_of(views[0], baselines) if figures else ()
    else:
        text, drawn = comparison_page(views), comparison_figures(views) if figures else ()
    target = out or _place(runs, folders) / NAME
    write_file(target, text.encode())
    say(f"{target}")
    if figures:
        for figure in drawn:
            for kind, content in pictures(figure).items():
                write_file(figures / f"{figure.key}.{kind}", content)
        say(f"{many(len(drawn), 'figure')} as {', '.join(KINDS)} in {figures}")


def _place(given: Sequence[Path], folders: Sequence[Path]) -> Path:
    """A run's own folder; of several the folder that all of them are in, or else this one."""
    if len(folders) == 1:
        return folders[0]
    if len(given) == 1:
        return given[0]
    parents = {folder.resolve().parent for folder in folders}
    return folders[0].parent if len(parents) == 1 else Path()
