"""The command line: every command under its name, every refusal as one sentence."""

from __future__ import annotations

import sys
import traceback

import typer
import typer.core

import fedloom
from fedloom.commands import analyse
from fedloom.commands.audit import audit
from fedloom.commands.compare import compare
from fedloom.commands.federation import certs, serve, site
from fedloom.commands.gain import gain
from fedloom.commands.generators import generate, pretrain, pretrain_help
from fedloom.commands.latency import latency
from fedloom.commands.networks import draw, export, import_weights, predict
from fedloom.commands.newcomers import join
from fedloom.commands.report import report
from fedloom.commands.runs import resume, run, settings_help, show
from fedloom.commands.spaces import list_, space
from fedloom.core.errors import FedloomError, printable, visible

LONGEST = 4000  # characters of a refusal: it may quote what somebody else wrote
typer.core.HAS_RICH = False  # typer escapes brackets for rich even where, as here, its rich help is off
app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=fedloom.__doc__)
app.add_typer(analyse.app, name="analyse")
app.command(epilog=settings_help())(run)
for command in (resume, compare, show, report, audit, gain, join, serve, site, certs, space, latency, generate, export, predict, draw):
    app.command()(command)
app.command("list")(list_)
app.command("import-weights")(import_weights)
app.command(epilog=pretrain_help())(pretrain)


def main() -> None:
    """Every refusal is one sentence and its own exit code; --trace anywhere shows where it came from."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--trace"]
    trace = len(arguments) < len(sys.argv) - 1
    try:
        app(arguments, standalone_mode=True)
    except FedloomError as error:
        if trace:
            print(visible(traceback.format_exc()), end="", file=sys.stderr)
        print(f"fedloom: {printable(str(error), LONGEST)}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
