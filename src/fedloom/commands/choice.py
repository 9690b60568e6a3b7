"""`fedloom analyse choice`: could a choice of one's own pay?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from fedloom.analyses.choice import OTHERS, REPEATS, choice_of
from fedloom.assemble import reopen_run
from fedloom.commands.terminal import PrintJson, RunFolder, TrustPlugins, check_finite, console, new_console, say, stoppable, write_analysis
from fedloom.core.architecture import Architecture
from fedloom.maths.choosing import beyond
from fedloom.report.plots import Panel, plot_lines

SHOWN = {
    "another": "any other one, on average",
    "best_for_all": "the best one for all",
    "best_for_each": "each client's own best, seen on half of its test images",
    "by_validation_loss": "the lowest loss on its validation images",
    "ceiling": "ceiling: own best over the best for all, if one knew",
}


def choice(
    folder: RunFolder,
    others: Annotated[
        int, typer.Option(min=1, help="architectures beside the first: those that clients ended with, then random ones")
    ] = OTHERS,
    repeats: Annotated[int, typer.Option(min=2, help="how often each is fine-tuned at each client")] = REPEATS,
    epochs: Annotated[int | None, typer.Option(min=1, help="epochs of fine-tuning; default: training.finetune_epochs")] = None,
    rate: Annotated[float | None, typer.Option(min=0, help="learning rate; default: the first of training.finetune_rates")] = None,
    first: Annotated[str, typer.Option(help="what all have without a search: a name or id; default: the run's anchor, or medium")] = "",
    distance: Annotated[
        float | None, typer.Option(min=0, max=1, help="how far random ones are from the first; default: perfedsde.distance, or 1")
    ] = None,
    clients: Annotated[int, typer.Option(min=0, help="use only this many clients, from the first; 0: all")] = 0,
    as_json: PrintJson = False,
    trust_plugins: TrustPlugins = False,
    out: Annotated[Path | None, typer.Option(help="folder for choice.json, .svg and .png; default: RUN/analyses")] = None,
) -> None:
    """Measure what choosing an architecture for each client could give: all clients of a finished run try the same ones, fine-tuned.

    Every accuracy is saved at once. After a stop the same command continues.
    """
    check_finite("--rate", rate)
    check_finite("--distance", distance)
    run, target = reopen_run(folder, trust_plugins=trust_plugins), out or folder / "analyses"
    work = choice_of(run, others, repeats, clients, epochs, rate, first, distance)
    watching = new_console(stderr=True) if as_json else console

    def show(done: int, of: int, client: str, architecture: Architecture, accuracy: float) -> None:
        number = work.architectures.index(architecture)
        watching.print(f"{done}/{of}: architecture {number} at {client}: {accuracy:.2%}", highlight=False, soft_wrap=True)

    with stoppable(f"The same command goes on with what is in {target}/choice.json"):
        table = work.measure(target / "choice.json", show)
    if not as_json:
        _show(table)
    write_analysis(target, "choice", table, _picture(table), as_json)


def _show(table: dict[str, Any]) -> None:
    shown = Table("architecture", "gain over the first, points", "95 %")
    for name, words in SHOWN.items():
        low, high = table[name]["interval"]
        shown.add_row(words, f"{table[name]['points']:+.2f}", f"{low:+.2f} to {high:+.2f}")
    console.print(shown)
    among, own, error = (table["deviations"][name] for name in ("architectures", "own", "error"))
    said = f"{among:.2f} points between architectures, {own:.2f} more in what suits a client, {error:.2f} from one measurement to the next"
    say(f"Standard deviations of accuracy: {said}")
    say(verdict(table))


def verdict(table: dict[str, Any]) -> str:
    """The answer in a sentence."""
    low, high = table["ceiling"]["interval"]
    if low > 0:
        return f"Architectures suit clients differently. Over the best one for all, {low:.2f} to {high:.2f} points could be gained at most"
    return (
        f"It is not shown that architectures suit clients differently. Over the best one for all, at most {high:.2f} points could be gained"
    )


def _picture(table: dict[str, Any]) -> dict[str, bytes]:
    """What is an architecture's own at a client, by two independent measurements: on the diagonal if it is no chance."""
    accuracies = 100 * np.array(table["accuracies"], float)
    across, up = beyond(accuracies[:, :, 0, 0]).ravel(), beyond(accuracies[:, :, 1, 1]).ravel()
    ends = [float(min(across.min(), up.min())), float(max(across.max(), up.max()))]
    lines = {"an architecture at a client": up.tolist(), "both agree": ends}
    places = {"an architecture at a client": across.tolist(), "both agree": ends}
    panel = Panel("", lines, places, points=("an architecture at a client",))
    return plot_lines([[panel]], "points beyond means, one training, half the images", "another training, the other half")
