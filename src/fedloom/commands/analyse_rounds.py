"""How runs went: `fedloom analyse pace`, `phases`, `memory` and `policies`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.table import Table

from fedloom.analyses.memory import memory_use
from fedloom.analyses.pace import pace as pace_of
from fedloom.analyses.pace import reached, too_fast
from fedloom.analyses.phases import Stage, beginnings
from fedloom.analyses.phases import phases as phases_of
from fedloom.analyses.policies import policy_likeness
from fedloom.assemble import reopen_run, saved_settings
from fedloom.commands.terminal import PrintJson, RunFolder, TrustPlugins, check_finite, console, say, write_analysis
from fedloom.core.progress import Moment
from fedloom.engine.store import Store
from fedloom.report.plots import Panel, plot_lines


def pace(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders, finished or not")],
    reach: Annotated[float | None, typer.Option(min=0, max=1, help="also show when this accuracy was reached, such as 0.8")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for pace.json, .svg and .png; default: analyses/ of the first RUN")] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Plot accuracy against simulated time (hardware.*), and show the time to a given accuracy (PerFedRLNAS, Table 2)."""
    check_finite("--reach", reach)
    short = len({folder.resolve().name for folder in folders}) == len(folders)
    names = [folder.resolve().name if short else str(folder) for folder in folders]
    methods = [saved_settings(folder, trust_plugins).method for folder in folders]
    found = {name: (method, pace_of(Store(folder))) for name, method, folder in zip(names, methods, folders, strict=True)}
    table = Table("run", "method", "rounds", "simulated s", "accuracy", *([f"s to {reach:.1%}"] if reach is not None else []))
    for name, (method, moments) in found.items():
        last = moments[-1]
        row = [name, method, str(last.round), f"{last.seconds:.2f}", f"{last.accuracy:.2%}"]
        table.add_row(*row, *([_when(moments, reach)] if reach is not None else []))
    console.print(table)
    for name, folder in zip(names, folders, strict=True):
        if too_fast(Store(folder)):
            say(f"{name} was made by a version that did not count the time of scoring: its seconds are too few to compare with others")
    target = out or folders[0] / "analyses"
    lines = {name: [100 * moment.accuracy for moment in moments] for name, (_, moments) in found.items()}
    places = {name: [moment.seconds for moment in moments] for name, (_, moments) in found.items()}
    pictures = plot_lines([[Panel("", lines, places)]], "simulated seconds", "mean test accuracy in %")
    told = {name: {"method": method, "moments": [asdict(moment) for moment in moments]} for name, (method, moments) in found.items()}
    write_analysis(target, "pace", {"runs": told}, pictures)


def _when(moments: Sequence[Moment], accuracy: float) -> str:
    moment = reached(moments, accuracy)
    return "never" if moment is None else f"{moment.seconds:.2f} (round {moment.round})"


def phases(
    folder: RunFolder,
    as_json: PrintJson = False,
    out: Annotated[Path | None, typer.Option(help="folder for phases.json, .svg and .png; default: RUN/analyses")] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Plot accuracy, decided edges and memory by round for a run of spider, with its three phases (SPIDER, Fig. 6)."""
    stages = phases_of(Store(folder), saved_settings(folder, trust_plugins).method)
    begun = beginnings(stages)
    if not as_json:
        table = Table("round", "phase", "validation", "test", "decided edges", "absent edges", "peak MB", "local step MB")
        for stage in stages:
            shares = [f"{share:.2%}" for share in (stage.validation_accuracy, stage.test_accuracy)]
            edges = [f"{count:.1f}" for count in (stage.decided_edges, stage.absent_edges)]
            memory = [f"{megabytes:.2f}" for megabytes in (stage.peak_memory_mb, stage.local_step_mb)]
            table.add_row(str(stage.round), str(stage.phase), *shares, *edges, *memory)
        console.print(table)
        say(", ".join(f"{name} from round {number} on" for name, number in begun.items()))
    told = {"phases": begun, "rounds": [asdict(stage) for stage in stages]}
    write_analysis(out or folder / "analyses", "phases", told, _phase_pictures(stages, begun), as_json)


def _phase_pictures(stages: Sequence[Stage], begun: dict[str, int]) -> dict[str, bytes]:
    def panel(vertical: str, scale: float, **lines: str) -> Panel:
        values = {name: [scale * getattr(stage, item) for stage in stages] for name, item in lines.items()}
        places = {name: [stage.round for stage in stages] for name in lines}
        return Panel("", values, places, vertical=vertical, marks=begun)

    accuracy = panel("accuracy in %", 100, validation="validation_accuracy", test="test_accuracy")
    edges = panel("edges", 1, decided="decided_edges", absent="absent_edges")
    memory = panel("memory in MB", 1, peak="peak_memory_mb", local="local_step_mb")
    return plot_lines([[accuracy], [edges], [memory]], "round", "")


def memory(
    folder: RunFolder,
    out: Annotated[Path | None, typer.Option(help="folder for memory.json, .svg and .png; default: RUN/analyses")] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Compare the memory that clients have (hardware.memory_mb) with what training takes there (PerFedRLNAS, Fig. 4); any method."""
    found = memory_use(reopen_run(folder, trust_plugins=trust_plugins))
    table = Table("client", "tier", "has, MB", "rounds take, MB", "own network, MB", "did not fit in rounds")
    for use in found.clients:
        limit = f"{use.memory_mb:.2f}" if use.memory_mb else "no limit"
        own = f"{use.network_mb:.2f}" if use.network_mb else "–"
        table.add_row(use.client, str(use.tier), limit, f"{use.rounds_mb:.2f}", own, f"{use.over} of {use.participations}")
    console.print(table)
    shares = found.over_by_round
    half = shares[len(shares) // 2 :]
    if shares:
        say(f"networks that did not fit: {fmean(shares):.1%} in all rounds, {fmean(half):.1%} in the second half of them")
    limited = [use for use in found.clients if use.memory_mb]
    lines = {
        "what the client has": [use.memory_mb for use in limited],
        "what rounds take at most": [use.rounds_mb for use in limited],
        "what its own network takes": [use.network_mb for use in limited],
    }
    pictures = plot_lines([[Panel("", lines, points=tuple(lines))]], "clients, by their memory", "MB of training memory")
    write_analysis(out or folder / "analyses", "memory", asdict(found), pictures)


def policies(
    folder: RunFolder,
    out: Annotated[Path | None, typer.Option(help="folder for policies.json, .svg and .png; default: RUN/analyses")] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Compare policies and labels of all pairs of clients, for a run of perfedrlnas (its Theorem 1)."""
    found = policy_likeness(reopen_run(folder, trust_plugins=trust_plugins))
    table = Table("pairs of clients", "divergence of labels", "likeness of policies")
    for group in found.groups:
        table.add_row(str(group.pairs), f"{group.divergence:.3f}", f"{group.likeness:.4f}")
    console.print(table)
    said = "all pairs are alike" if found.correlation is None else f"{found.correlation:+.3f}, p of one as low {found.p:.3f} (Mantel)"
    say(f"rank correlation of both over {len(found.divergences)} pairs: {said}")
    lines = {"pairs": found.likenesses, "means of groups": [group.likeness for group in found.groups]}
    places = {"pairs": found.divergences, "means of groups": [group.divergence for group in found.groups]}
    pictures = plot_lines([[Panel("", lines, places, points=("pairs",))]], "divergence of labels, nats", "likeness of policies")
    write_analysis(out or folder / "analyses", "policies", asdict(found), pictures)
