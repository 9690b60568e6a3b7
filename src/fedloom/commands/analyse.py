"""The commands `fedloom analyse …`: here those of the PerFedSDE-NAS papers, figure3 and costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedloom.analyses.costs import MEASURING, SMALL, Costs, Spread, costs
from fedloom.analyses.figure3 import CANDIDATES, DATA, DIFFUSION, EVOLUTION, EVOLUTION_RBF, Comparison, check_run, compare
from fedloom.assemble import Reopened, reopen_run
from fedloom.commands import analyse_rounds
from fedloom.commands.choice import choice
from fedloom.commands.terminal import PrintJson, RunFolder, TrustPlugins, console, say, write_analysis
from fedloom.generator.files import load_generator
from fedloom.generator.generator import AnyGenerator
from fedloom.report.plots import Panel, plot_lines

SHOWN = {DIFFUSION: "diffusion + RBF", EVOLUTION: "crossover and mutation", EVOLUTION_RBF: "crossover and mutation + RBF"}

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Analyses from the papers, for your own run.")


@app.command()
def figure3(
    folder: RunFolder,
    client: Annotated[list[str] | None, typer.Option(help="the client whose candidates are compared; may be given several times")] = None,
    candidates: Annotated[int, typer.Option(min=1, help="architectures from which the surrogate picks")] = CANDIDATES,
    out: Annotated[Path | None, typer.Option(help="folder for figure3.json, .svg and .png; default: RUN/analyses")] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Compare generated candidates with those of crossover and mutation, for a finished run of perfedsde (Fig. 3)."""
    run = reopen_run(folder, trust_plugins=trust_plugins)
    check_run(run, client or [])
    source = generator_of(run)
    figures = [compare(run, name, source, candidates) for name in client or []]
    for figure in figures:
        console.print(_figure_table(figure))
        for data in DATA:
            against = [f"{100 * figure.difference(data, other):+.2f} points against {SHOWN[other]}" for other in (EVOLUTION, EVOLUTION_RBF)]
            say(f"{figure.client}, {data} data, mean of diffusion + RBF: {', '.join(against)}")
    facts = {**run.facts, "clients": [figure.to_table() for figure in figures]}
    write_analysis(out or folder / "analyses", "figure3", facts, _pictures(figures))


@app.command("costs")
def costs_(folder: RunFolder, as_json: PrintJson = False, trust_plugins: TrustPlugins = False) -> None:
    """Show seconds and bytes per client and round (Table D), and compare with FedAvg on the smallest and largest network (Table 1)."""
    found = costs(reopen_run(folder, trust_plugins=trust_plugins))
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    console.print(_cost_table(found))
    console.print(_relative_table(found))


for command in (choice, analyse_rounds.pace, analyse_rounds.phases, analyse_rounds.memory, analyse_rounds.policies):
    app.command()(command)


def generator_of(run: Reopened) -> AnyGenerator:
    """The generator that the run's settings name."""
    own, tools = run.settings.components["perfedsde"], run.tools
    return load_generator(tools.supernet.space, own.generator_file, own.features, tools.device, own.sampler, own.steps)


# -- figure 3 ------------------------------------------------------------------------------------
def _pictures(figures: Sequence[Comparison]) -> dict[str, bytes]:
    def panel(figure: Comparison, data: str) -> Panel:
        lines = {SHOWN[name]: [100 * accuracy for accuracy in by_data[data]] for name, by_data in figure.accuracies.items()}
        return Panel(f"{figure.client}, {data} data", lines)

    rows = [[panel(figure, data) for data in DATA] for figure in figures]
    return plot_lines(rows, "architectures, sorted by accuracy", "accuracy in %")


def _figure_table(figure: Comparison) -> Table:
    table = Table("candidates", "scored", *(f"{data} {number}" for data in DATA for number in ("mean", "best")), title=figure.client)
    for name, by_data in figure.accuracies.items():
        numbers = [f"{value:.2%}" for data in DATA for value in (figure.mean(name, data), figure.best(name, data))]
        table.add_row(SHOWN[name], str(len(by_data[DATA[0]])), *numbers)
    return table


# -- costs ------------------------------------------------------------------------------------------
def _cost_table(found: Costs) -> Table:
    title = f"{found.method}, one client in one round: mean ± std over {found.participations} participations"
    table = Table("", "", title=title, show_header=False)
    for stage, seconds in found.seconds.items():
        table.add_row(f"{stage}, s" + " (not in the sum)" * (stage == MEASURING), _shown(seconds, 1, 3))
    table.add_row("sum, s", _shown(found.seconds_sum, 1, 3))
    table.add_row("down, MB", _shown(found.bytes_down, 1e6, 4))
    table.add_row("up, MB", _shown(found.bytes_up, 1e6, 4))
    table.add_row("both ways, MB", _shown(found.bytes_both, 1e6, 4))
    table.add_row("trained, GMAC", _shown(found.trained_macs, 1e9, 4))
    table.add_row("architectures scored", _shown(found.evaluated_architectures, 1, 1))
    return table


def _relative_table(found: Costs) -> Table:
    table = Table("one client in one round", *found.relative_macs, title=f"against {SMALL}")
    for name, row in (("trained multiply-accumulates", found.relative_macs), ("bytes sent both ways", found.relative_bytes)):
        table.add_row(name, *(f"{value:.2f}x" for value in row.values()))
    return table


def _shown(spread: Spread, unit: float, digits: int) -> str:
    return f"{spread.mean / unit:.{digits}f} ± {spread.std / unit:.{digits}f}"
