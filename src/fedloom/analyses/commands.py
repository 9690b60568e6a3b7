"""The commands `fedloom analyse …`, `fedloom join RUN` and `fedloom gain RUN`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedloom.analyses.costs import MEASURING, SMALL, Costs, Spread, costs
from fedloom.analyses.figure3 import CANDIDATES, DATA, DIFFUSION, EVOLUTION, EVOLUTION_RBF, Comparison, Source, check_run, compare
from fedloom.analyses.gain import EPOCHS, gain_of
from fedloom.analyses.join import check_run as check_joinable
from fedloom.analyses.join import join as join_run
from fedloom.analyses.memory import memory_use
from fedloom.analyses.pace import Moment, reached
from fedloom.analyses.pace import pace as pace_of
from fedloom.analyses.phases import Stage, beginnings
from fedloom.analyses.phases import phases as phases_of
from fedloom.analyses.policies import policy_likeness
from fedloom.assemble import Reopened, reopen_run, saved_settings
from fedloom.core.errors import Interrupted
from fedloom.core.result import mean_and_std
from fedloom.engine.store import Store
from fedloom.files import write_file
from fedloom.generator.shelf import load_generator
from fedloom.report.plots import Panel, plot_lines, plot_matrix

SCHEMA, JOIN_SCHEMA, PACE_SCHEMA, PHASES_SCHEMA = "fedloom.figure3/1", "fedloom.join/1", "fedloom.pace/1", "fedloom.phases/1"
MEMORY_SCHEMA, POLICIES_SCHEMA = "fedloom.memory/1", "fedloom.policies/1"
SHOWN = {DIFFUSION: "diffusion + RBF", EVOLUTION: "crossover and mutation", EVOLUTION_RBF: "crossover and mutation + RBF"}

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The papers' analyses of a run.")
console = Console()
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")]


@app.command()
def figure3(
    folder: RunFolder,
    client: Annotated[list[str] | None, typer.Option(help="whose candidates; may be given several times")] = None,
    candidates: Annotated[int, typer.Option(min=1, help="architectures that the surrogate picks from")] = CANDIDATES,
    out: Annotated[Path | None, typer.Option(help="the folder for figure3.json, .svg and .png; RUN/analyses if not said")] = None,
) -> None:
    """Accuracies of generated candidates against those of crossover and mutation, of a finished run of perfedsde (Fig. 3)."""
    run = reopen_run(folder)
    check_run(run, client or [])
    source = generator_of(run)
    figures = [compare(run, name, source, candidates) for name in client or []]
    target = out or folder / "analyses"
    for ending, content in {"json": _as_json(run, figures), **_pictures(figures)}.items():
        write_file(target / f"figure3.{ending}", content)
    for figure in figures:
        console.print(_figure_table(figure))
        for data in DATA:
            against = [f"{100 * figure.difference(data, other):+.2f} points against {SHOWN[other]}" for other in (EVOLUTION, EVOLUTION_RBF)]
            _print(f"{figure.client}, {data} data, mean of diffusion + RBF: {', '.join(against)}")
    _print(f"{target}/figure3.svg, .png and .json")


@app.command("costs")
def costs_(folder: RunFolder, as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Seconds by stage and bytes per client and round (Table D), and what FedAvg on the smallest and largest network costs (Table 1)."""
    found = costs(reopen_run(folder))
    if as_json:
        print(json.dumps(found.to_table(), indent=2))
        return
    console.print(_cost_table(found))
    console.print(_relative_table(found))


@app.command("pace")
def pace_(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs, finished or not")],
    reach: Annotated[float | None, typer.Option(min=0, max=1, help="an accuracy, such as 0.8, whose time is asked for")] = None,
    out: Annotated[Path | None, typer.Option(help="the folder for pace.json, .svg and .png; the first RUN/analyses if not said")] = None,
) -> None:
    """Accuracy against simulated time (hardware.*), and the time to a given accuracy (PerFedRLNAS, Table 2)."""
    short = len({folder.resolve().name for folder in folders}) == len(folders)
    names = [folder.resolve().name if short else str(folder) for folder in folders]
    found = {name: (saved_settings(folder).method, pace_of(Store(folder))) for name, folder in zip(names, folders, strict=True)}
    table = Table("run", "method", "rounds", "simulated s", "accuracy", *([f"s to {reach:.1%}"] if reach is not None else []))
    for name, (method, moments) in found.items():
        last = moments[-1]
        row = [name, method, str(last.round), f"{last.seconds:.2f}", f"{last.accuracy:.2%}"]
        table.add_row(*row, *([_when(moments, reach)] if reach is not None else []))
    console.print(table)
    target = out or folders[0] / "analyses"
    lines = {name: [100 * moment.accuracy for moment in moments] for name, (_, moments) in found.items()}
    places = {name: [moment.seconds for moment in moments] for name, (_, moments) in found.items()}
    pictures = plot_lines([[Panel("", lines, places)]], "simulated seconds", "mean test accuracy in %")
    told = {name: {"method": method, "moments": [asdict(moment) for moment in moments]} for name, (method, moments) in found.items()}
    _write(target, "pace", {"schema": PACE_SCHEMA, "runs": told}, pictures)


def _when(moments: Sequence[Moment], accuracy: float) -> str:
    moment = reached(moments, accuracy)
    return "never" if moment is None else f"{moment.seconds:.2f} (round {moment.round})"


@app.command("phases")
def phases_(
    folder: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    out: Annotated[Path | None, typer.Option(help="the folder for phases.json, .svg and .png; RUN/analyses if not said")] = None,
) -> None:
    """Accuracy, decided edges and memory of a run of spider, round by round, with its three phases (SPIDER, Fig. 6)."""
    stages, target = phases_of(Store(folder), saved_settings(folder).method), out or folder / "analyses"
    begun = beginnings(stages)
    told = {"schema": PHASES_SCHEMA, "phases": begun, "rounds": [asdict(stage) for stage in stages]}
    text = json.dumps(told, indent=2)
    for ending, content in {"json": f"{text}\n".encode(), **_phase_pictures(stages, begun)}.items():
        write_file(target / f"phases.{ending}", content)
    if as_json:
        print(text)
        return
    table = Table("round", "phase", "validation", "test", "decided edges", "absent edges", "peak MB", "local step MB")
    for stage in stages:
        numbers = [
            f"{stage.validation_accuracy:.2%}",
            f"{stage.test_accuracy:.2%}",
            f"{stage.decided_edges:.1f}",
            f"{stage.absent_edges:.1f}",
        ]
        table.add_row(str(stage.round), str(stage.phase), *numbers, f"{stage.peak_memory_mb:.2f}", f"{stage.local_step_mb:.2f}")
    console.print(table)
    _print(", ".join(f"{name} from round {number} on" for name, number in begun.items()))
    _print(f"{target}/phases.svg, .png and .json")


def _phase_pictures(stages: Sequence[Stage], begun: dict[str, int]) -> dict[str, bytes]:
    def panel(vertical: str, scale: float, **lines: str) -> Panel:
        values = {name: [scale * getattr(stage, item) for stage in stages] for name, item in lines.items()}
        places = {name: [stage.round for stage in stages] for name in lines}
        return Panel("", values, places, vertical=vertical, marks=begun)

    accuracy = panel("accuracy in %", 100, validation="validation_accuracy", test="test_accuracy")
    edges = panel("edges", 1, decided="decided_edges", absent="absent_edges")
    memory = panel("memory in MB", 1, peak="peak_memory_mb", local="local_step_mb")
    return plot_lines([[accuracy], [edges], [memory]], "round", "")


def gain(
    folder: RunFolder,
    epochs: Annotated[int, typer.Option(min=1, help="of fine-tuning, of which the best counts")] = EPOCHS,
    start: Annotated[
        str, typer.Option(help="weights it starts from: personal (the other client's own) or shared (the supernet's)")
    ] = "personal",
    rate: Annotated[float | None, typer.Option(min=0, help="learning rate; the first of training.finetune_rates if not said")] = None,
    clients: Annotated[int, typer.Option(min=0, help="only the first so many clients; 0 is all")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    out: Annotated[Path | None, typer.Option(help="the folder for gain.json, .svg and .png; RUN/analyses if not said")] = None,
) -> None:
    """What architectures of their own are worth: every client's network fine-tuned at every client of a finished run (SPIDER, Eq. 6).

    Every accuracy is written down as it comes: the same command goes on where it was stopped.
    """
    work, target = gain_of(reopen_run(folder), clients, epochs, rate, start), out or folder / "analyses"
    watching = Console(stderr=True) if as_json else console

    def show(done: int, of: int, i: str, j: str, accuracy: float) -> None:
        watching.print(f"{done}/{of}: {j}'s network at {i}: {accuracy:.2%}", highlight=False, soft_wrap=True, markup=False)

    try:
        table = work.measure(target / "gain.json", show)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped. The same command goes on with what is in {target}/gain.json") from None
    names = [f"{client} (gain {100 * own:+.1f})" for client, own in zip(work.clients, table["gains"], strict=True)]
    matrix = [[100 * accuracy for accuracy in row] for row in table["accuracies"]]
    for ending, content in plot_matrix(matrix, names, work.clients, "whose architecture", "whose data").items():
        write_file(target / f"gain.{ending}", content)
    if as_json:
        print(json.dumps(table, indent=2))
        return
    shown = Table("client", "own architecture", "others', mean", "gain, points")
    for client, row, own in zip(work.clients, table["accuracies"], table["gains"], strict=True):
        accuracy = row[work.clients.index(client)]
        shown.add_row(client, f"{accuracy:.2%}", f"{accuracy - own:.2%}", f"{100 * own:+.2f}")
    console.print(shown)
    _print(f"gain of {work.run.settings.method}, mean over clients: {100 * table['gain']:+.2f} points")
    _print(f"{target}/gain.svg, .png and .json")


def join(
    folder: RunFolder,
    clients: Annotated[int, typer.Option(min=1, help="how many newcomers")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="rounds in which they only search")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="which data they have, and their draws")] = 0,
    out: Annotated[Path | None, typer.Option(help="the folder for join.json, .svg and .png; RUN/analyses if not said")] = None,
) -> None:
    """Newcomers join a finished run of perfedrlnas: they look for their subnets in the frozen supernet (Fig. 5)."""
    run = reopen_run(folder)
    check_joinable(run)

    def show(number: int, mean: float, spread: float) -> None:
        _print(f"round {number}/{rounds}: subnets tried, test accuracy {mean:.2%} ± {spread:.2%} over {clients} newcomers")

    found, target = join_run(run, clients, rounds, seed, show), out or folder / "analyses"
    facts = {"schema": JOIN_SCHEMA, "space": run.settings.space, "dataset": run.settings.data.name, "seed": seed}
    panel = Panel(f"{clients} newcomers", {"subnets tried": [100 * accuracy for accuracy in found.accuracies]})
    pictures = plot_lines([[panel]], "round of search", "test accuracy in %")
    mean, std = mean_and_std([newcomer.test_accuracy for newcomer in found.newcomers])
    _print(f"their most likely architectures, untrained by them: {mean:.2%} ± {std:.2%}")
    _write(target, "join", {**facts, **found.to_table()}, pictures)


@app.command("memory")
def memory_(
    folder: RunFolder,
    out: Annotated[Path | None, typer.Option(help="the folder for memory.json, .svg and .png; RUN/analyses if not said")] = None,
) -> None:
    """The memory that clients have and what their networks take of it (PerFedRLNAS, Fig. 4); any method with hardware.memory_mb."""
    found = memory_use(reopen_run(folder))
    table = Table("client", "tier", "has, MB", "network takes, MB", "did not fit")
    for use in found.clients:
        limit = f"{use.memory_mb:.2f}" if use.memory_mb else "no limit"
        table.add_row(use.client, str(use.tier), limit, f"{use.used_mb:.2f}", f"{use.over} of {use.participations}")
    console.print(table)
    shares = found.over_by_round
    half = shares[len(shares) // 2 :]
    if shares:
        _print(f"networks that did not fit: {_mean(shares):.1%} in all rounds, {_mean(half):.1%} in the second half of them")
    limited = [use for use in found.clients if use.memory_mb]
    lines = {"what the client has": [use.memory_mb for use in limited], "what its network takes": [use.used_mb for use in limited]}
    pictures = plot_lines([[Panel("", lines, points=tuple(lines))]], "clients, by their memory", "MB of training memory")
    _write(out or folder / "analyses", "memory", {"schema": MEMORY_SCHEMA, **found.to_table()}, pictures)


@app.command("policies")
def policies_(
    folder: RunFolder,
    out: Annotated[Path | None, typer.Option(help="the folder for policies.json, .svg and .png; RUN/analyses if not said")] = None,
) -> None:
    """Do clients with unlike labels get unlike policies? Pairs of clients of a run of perfedrlnas (its Theorem 1)."""
    found = policy_likeness(reopen_run(folder))
    table = Table("pairs of clients", "divergence of labels", "likeness of policies")
    for group in found.groups:
        table.add_row(str(group.pairs), f"{group.divergence:.3f}", f"{group.likeness:.4f}")
    console.print(table)
    said = "all pairs are alike" if found.correlation is None else f"{found.correlation:+.3f}, p of one as low {found.p:.3f} (Mantel)"
    _print(f"rank correlation of both over {len(found.divergences)} pairs: {said}")
    lines = {"pairs": found.likenesses, "means of groups": [group.likeness for group in found.groups]}
    places = {"pairs": found.divergences, "means of groups": [group.divergence for group in found.groups]}
    pictures = plot_lines([[Panel("", lines, places, points=("pairs",))]], "divergence of labels, nats", "likeness of policies")
    _write(out or folder / "analyses", "policies", {"schema": POLICIES_SCHEMA, **found.to_table()}, pictures)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _write(target: Path, name: str, facts: dict[str, Any], pictures: dict[str, bytes]) -> None:
    for ending, content in {"json": (json.dumps(facts, indent=2) + "\n").encode(), **pictures}.items():
        write_file(target / f"{name}.{ending}", content)
    _print(f"{target}/{name}.svg, .png and .json")


def generator_of(run: Reopened) -> Source:
    """The generator that the run's settings name."""
    own, bench = run.settings.components["perfedsde"], run.bench
    return load_generator(bench.supernet.space, own.generator_file, own.features, bench.device, own.sampler, own.steps)


# -- figure 3 ------------------------------------------------------------------------------------
def _as_json(run: Reopened, figures: Sequence[Comparison]) -> bytes:
    settings = run.settings
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "space": settings.space,
        "dataset": settings.data.name,
        "protocol": settings.protocol,
        "seed": settings.seed,
        "rounds": settings.rounds,
    }
    return (json.dumps({**facts, "clients": [figure.to_table() for figure in figures]}, indent=2) + "\n").encode()


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


def _print(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
