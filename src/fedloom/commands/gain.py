"""`fedloom gain`: what architectures of their own are worth to the clients of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedloom.analyses.gain import EPOCHS, gain_of
from fedloom.assemble import reopen_run
from fedloom.commands.terminal import PrintJson, RunFolder, TrustPlugins, check_finite, console, new_console, say, stoppable, write_analysis
from fedloom.report.plots import plot_matrix


def gain(
    folder: RunFolder,
    epochs: Annotated[int, typer.Option(min=1, help="epochs of fine-tuning; the best epoch counts")] = EPOCHS,
    start: Annotated[
        str, typer.Option(help="weights that fine-tuning starts from: personal (the other client's) or shared (the supernet's)")
    ] = "personal",
    rate: Annotated[float | None, typer.Option(min=0, help="learning rate; default: the first of training.finetune_rates")] = None,
    clients: Annotated[int, typer.Option(min=0, help="use only this many clients, from the first; 0: all")] = 0,
    as_json: PrintJson = False,
    trust_plugins: TrustPlugins = False,
    out: Annotated[Path | None, typer.Option(help="folder for gain.json, .svg and .png; default: RUN/analyses")] = None,
) -> None:
    """Measure what personal architectures are worth: fine-tune every client's network at every client of a finished run (SPIDER, Eq. 6).

    Every accuracy is saved at once. After a stop the same command continues.
    """
    check_finite("--rate", rate)
    run, target = reopen_run(folder, trust_plugins=trust_plugins), out or folder / "analyses"
    work = gain_of(run, clients, epochs, rate, start)
    watching = new_console(stderr=True) if as_json else console

    def show(done: int, of: int, i: str, j: str, accuracy: float) -> None:
        watching.print(f"{done}/{of}: {j}'s network at {i}: {accuracy:.2%}", highlight=False, soft_wrap=True)

    with stoppable(f"The same command goes on with what is in {target}/gain.json"):
        table = work.measure(target / "gain.json", show)
    names = [f"{client} (gain {100 * own:+.1f})" for client, own in zip(work.clients, table["gains"], strict=True)]
    matrix = [[100 * accuracy for accuracy in row] for row in table["accuracies"]]
    if not as_json:
        shown = Table("client", "own architecture", "others', mean", "gain, points")
        for client, row, own in zip(work.clients, table["accuracies"], table["gains"], strict=True):
            accuracy = row[work.clients.index(client)]
            shown.add_row(client, f"{accuracy:.2%}", f"{accuracy - own:.2%}", f"{100 * own:+.2f}")
        console.print(shown)
        say(f"gain of {work.run.settings.method}, mean over clients: {100 * table['gain']:+.2f} points")
    write_analysis(target, "gain", table, plot_matrix(matrix, names, work.clients, "whose architecture", "whose data"), as_json)
