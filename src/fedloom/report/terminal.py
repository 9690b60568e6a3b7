"""The terminal that all commands print to, and an option that several of them have."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

console = Console()


def say(text: str) -> None:
    """Text as it is: no colours for numbers, no line breaks of the console's own."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="FILE or MODULE", help="components of your own, which are imported; may be given several times"),
]
