"""The command line: every command under its name, every refusal as one sentence."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer
import typer.core

import fedloom
from fedloom.commands import analyse
from fedloom.commands.audit import audit
from fedloom.commands.check import check
from fedloom.commands.compare import compare
from fedloom.commands.data import download
from fedloom.commands.evaluate import evaluate, predict
from fedloom.commands.federation import certs, serve, site
from fedloom.commands.gain import gain
from fedloom.commands.generators import generate, pretrain, pretrain_help
from fedloom.commands.latency import latency
from fedloom.commands.networks import draw, export, import_weights
from fedloom.commands.newcomers import join
from fedloom.commands.report import report
from fedloom.commands.runs import resume, run, settings_help, show
from fedloom.commands.spaces import list_, space
from fedloom.core.errors import FedloomError, printable, visible

LONGEST = 4000  # characters of a refusal: it may quote what somebody else wrote
typer.core.HAS_RICH = False  # typer escapes brackets for rich even where, as here, its rich help is off
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help=fedloom.__doc__,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of their use: a first run, what came of it, a real federation, what there is, and research.
app.command(epilog=settings_help())(run)
for command in (check, resume, show, report, compare, audit, export, predict, evaluate, draw, serve, site, join, certs):
    app.command()(command)
app.command("list")(list_)
for further in (download, space, latency, generate, gain):
    app.command()(further)
app.add_typer(analyse.app, name="analyse")
app.command(epilog=pretrain_help())(pretrain)
app.command("import-weights")(import_weights)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fedloom {fedloom.__version__}")
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    pass


def main() -> None:
    """Every refusal is one sentence and its own exit code; --trace anywhere shows where it came from."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--trace"]
    trace = len(arguments) < len(sys.argv) - 1
    try:
        app(arguments, prog_name="fedloom", standalone_mode=True)
    except FedloomError as error:
        if trace:
            print(visible(traceback.format_exc()), end="", file=sys.stderr)
        print(f"fedloom: {printable(str(error), LONGEST)}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
