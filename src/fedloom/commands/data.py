"""The commands about data sets: download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fedloom.commands.terminal import console, say, stoppable
from fedloom.data.download import ARCHIVES
from fedloom.data.download import download as fetch
from fedloom.data.readers import DataSettings


def download(
    name: Annotated[str, typer.Argument(help=f"the data set: {', '.join(ARCHIVES)}")],
    folder: Annotated[Path, typer.Option(help="folder that holds the data sets, as data.folder names it")] = Path(DataSettings.folder),
) -> None:
    """Fetch a published data set from its own page, check it and unpack it where runs look for it."""
    name = name.replace("-", "").lower()  # tiny-imagenet, CIFAR-10
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with stoppable("Nothing was kept"), shown as progress:
        task = progress.add_task(name, total=None)
        place = fetch(name, folder, lambda done, whole: progress.update(task, completed=done, total=whole))
    say(f"{place}: {ARCHIVES[name].bytes / 1e6:,.0f} MB from {ARCHIVES[name].address}, checked ({ARCHIVES[name].kind})")
