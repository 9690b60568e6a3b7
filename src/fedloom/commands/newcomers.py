"""`fedloom join`: a personal model for a client that arrives after training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedloom.analyses.newcomers import check_run, with_personal_models, with_policies
from fedloom.assemble import reopen_run
from fedloom.commands.terminal import TrustPlugins, say, write_analysis
from fedloom.core.result import mean_and_std
from fedloom.engine.newcomers import ROUNDS
from fedloom.federation.agreement import read_site
from fedloom.federation.site.rounds import join as join_federation
from fedloom.report.plots import Panel, plot_lines


def join(
    source: Annotated[Path, typer.Argument(metavar="RUN or FILE", help="a finished run; with --site: the server's newcomers.safetensors")],
    site: Annotated[Path | None, typer.Option(metavar="SITE.toml", help="the newcomer is this site, with its own images")] = None,
    clients: Annotated[int, typer.Option(min=1, help="number of newcomers to simulate (without --site)")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="perfedrlnas: rounds of search")] = ROUNDS,
    seed: Annotated[int, typer.Option(min=0, help="seed of the newcomers' data and draws (without --site)")] = 0,
    out: Annotated[Path | None, typer.Option(help="folder for join.json, .svg and .png; default: RUN/analyses")] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Find personal models for clients that join after training. They search in the frozen supernet and upload nothing."""
    if site is not None:
        say(f"All of it is in {join_federation(read_site(site), source, rounds, say)}")
    else:
        _simulate(source, clients, rounds, seed, out, trust_plugins)


def _simulate(folder: Path, clients: int, rounds: int, seed: int, out: Path | None, trust_plugins: bool) -> None:
    """Newcomers of a finished run, in simulation."""
    run = reopen_run(folder, trust_plugins=trust_plugins)
    check_run(run)
    target = out or folder / "analyses"
    facts = {"space": run.settings.space, "dataset": run.settings.data.name, "seed": seed}
    if run.settings.method == "perfedrlnas":

        def show(number: int, mean: float, spread: float) -> None:
            say(f"round {number}/{rounds}: subnets tried, test accuracy {mean:.2%} ± {spread:.2%} over {clients} newcomers")

        found = with_policies(run, clients, rounds, seed, show)
        panel = Panel(f"{clients} newcomers", {"subnets tried": [100 * accuracy for accuracy in found.accuracies]})
        pictures = plot_lines([[panel]], "round of search", "test accuracy in %")
        what = "their most likely architectures, untrained by them"
    else:

        def count(number: int, mean: float, spread: float) -> None:
            say(f"newcomer {number}/{clients}: test accuracy so far {mean:.2%} ± {spread:.2%}")

        found = with_personal_models(run, clients, seed, count)
        panel = Panel(f"{clients} newcomers", {"personal models": sorted(100 * one.test_accuracy for one in found.newcomers)})
        pictures = plot_lines([[panel]], "newcomer, sorted", "test accuracy in %")
        what = "their personal models"
    mean, std = mean_and_std([newcomer.test_accuracy for newcomer in found.newcomers])
    say(f"{what}: {mean:.2%} ± {std:.2%}")
    write_analysis(target, "join", {**facts, **asdict(found)}, pictures)
