"""What all commands share: the terminal they print to, arguments and options that several of them have, files of analyses."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from fedloom.core.errors import Interrupted, InvalidConfig, visible
from fedloom.files import write_file


class _Visible:
    """Names in anybody's files are part of what is printed: no control character of theirs acts on the terminal."""

    def __init__(self, printed: ConsoleRenderable) -> None:
        self.printed = printed

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.printed, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


class _OnlyVisible(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Visible(printed) for printed in renderables]


def new_console(stderr: bool = False) -> Console:
    made = Console(stderr=stderr, markup=False, emoji=False)  # brackets and colons in names mean themselves
    made.push_render_hook(_OnlyVisible())
    return made


TERMINATED = 128 + signal.SIGTERM  # the exit code, as shells have it
console = new_console()
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")]
PrintJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="FILE or MODULE", help="your own components to import; may be given several times"),
]
TrustPlugins = Annotated[bool, typer.Option("--trust-plugins", help="import the plugins that RUN names; they can do anything")]


def say(text: str) -> None:
    """Text as it is: no colours for numbers, no line breaks of the console's own."""
    console.print(text, highlight=False, soft_wrap=True)


def source_and_changes(source: str, overrides: list[str] | None) -> tuple[str, list[str]]:
    """The preset or file, and what is to be changed: `fedloom run method=fedavg` changes the quickstart."""
    if "=" in source and not os.path.isfile(source):
        return "quickstart", [source, *(overrides or [])]
    return source or "quickstart", list(overrides or [])


def check_finite(option: str, value: float | None) -> None:
    """nan and inf pass typer's own bounds."""
    if value is not None and not math.isfinite(value):
        raise InvalidConfig(f"{option} must be a finite number, got {value!r}")


@contextmanager
def stoppable(how: str) -> Iterator[None]:
    """how: what goes on after a stop by the keyboard, or by SIGTERM where that is an orderly end."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"stopped. {how}") from None
    except SystemExit as left:
        if left.code != TERMINATED:
            raise
        stopped = Interrupted(f"stopped. {how}")
        stopped.exit_code = TERMINATED
        raise stopped from None


def write_analysis(target: Path, name: str, facts: Mapping[str, Any], pictures: Mapping[str, bytes], as_json: bool = False) -> None:
    """NAME.json, .svg and .png in the folder ``target``; what is in the first is printed as well, or where they are."""
    text = json.dumps({"schema": f"fedloom.{name}/1", **facts}, indent=2)
    for ending, content in {"json": f"{text}\n".encode(), **pictures}.items():
        write_file(target / f"{name}.{ending}", content)
    if as_json:
        print(text)
    else:
        say(f"{target}/{name}.svg, .png and .json")
