"""Three tiers of devices: what does each tier get from a search within its budget, and from what the others offer?

perfedsde searches within each client's budget. FedAvg and SCAFFOLD train one network that the weakest tier can hold. HeteroFL has one
network whose narrowest width the weakest can hold. Local training has the largest of these networks that a tier can hold, without any
federation.

python benchmarks/fleet.py [--seeds 3,4,5] [--only METHOD]     adds rows to benchmarks/results/fleet.json, or replaces them
python benchmarks/fleet.py cifar10 --set rounds=100 --only fedavg   the same on CIFAR-10 (use a GPU), in results/fleet-cifar10.json
python benchmarks/fleet.py [PRESET] --table                         prints the table for docs/how-to/budgets.md

Runs lie in runs/fleet-PRESET/METHOD-SEED. The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fedloom import config
from fedloom.assemble import new_run, resume_run
from fedloom.assemble.builder import Built, build
from fedloom.assemble.environment import environment
from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientSite
from fedloom.core.result import LedgerEntry
from fedloom.data.readers import read
from fedloom.data.splits import Federation, make_split
from fedloom.engine.store import Store
from fedloom.report.terminal.live import LiveView
from fedloom.spaces.base import SearchSpace

RESULTS = Path(__file__).parent / "results"
TIERS = ("weak", "middle", "strong")
NAMES = {
    "perfedsde": "`perfedsde`, each within its budget",
    "fedavg": "`fedavg` on what the weakest can hold",
    "scaffold": "`scaffold` on what the weakest can hold",
    "heterofl": "`heterofl`",
    "local": "`local`, on what each tier can hold",
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A preset with tiers. part: of the supernet, for perfedsde, where a supernet travels; common: for all runs."""

    preset: str
    budget: str
    part: str
    common: tuple[str, ...] = ()

    def settings(self, *changes: str) -> config.Settings:
        return config.load(self.preset, [*self.common, *changes])

    @property
    def name(self) -> str:
        return "fleet" if self.preset == "quickstart" else f"fleet-{self.preset}"


CASES = {
    case.preset: case
    for case in (
        Case(
            "quickstart",
            "budget.macs=[450e3,900e3,0]",
            "budget.supernet=[80e3,140e3,0]",  # of 253,298
            ("inline.device=cpu", "inline.threads=1"),
        ),
        Case("cifar10", "budget.macs=[40e6,78e6,0]", "budget.supernet=[3e6,4.5e6,0]"),  # of 6,410,690; medium takes 77e6 MACs
    )
}


def built(case: Case, *changes: str) -> tuple[config.Settings, Built, Federation]:
    settings = case.settings(*changes)
    dataset = read(settings.data)
    split = make_split(settings.split, dataset.train.labels, dataset.test.labels, settings.clients, settings.seed, dataset.members)
    return settings, build(settings, dataset, torch.device("cpu")), Federation(dataset, split, "cpu")


def holds(space: SearchSpace, architecture: Architecture) -> Architecture:
    """An architecture, reduced until it fits."""
    return space.decode(space.encode(architecture))


def widest(weakest: SearchSpace, whole: SearchSpace) -> tuple[Architecture, float]:
    """The network for HeteroFL and the narrowest share of its channels: all channels, the least depth, and kernels as large as the
    narrowest width can have in the weakest tier."""
    smallest = np.array(whole.named["smallest"].choices)
    channels = np.array([gene.channels for gene in whole.genes])
    kernels = np.array([gene.name.startswith("kernel") for gene in whole.genes])
    for kernel in reversed(range(int(whole.sizes[kernels].min()))):
        narrow = np.where(kernels, kernel, smallest)
        if weakest.fits(whole.canonical(narrow)):
            share = min(gene.values[0] / gene.values[-1] for gene, has in zip(whole.genes, channels, strict=True) if has)  # type: ignore[operator]
            return whole.canonical(np.where(channels, whole.sizes - 1, narrow)), float(share)
    raise ValueError("no width fits")


def by_tier(accuracies: Mapping[str, float], tier_of: Mapping[str, int]) -> list[float]:
    return [mean(value for client, value in accuracies.items() if tier_of[client] == tier) for tier in range(len(TIERS))]


def federated(case: Case, seed: int, method: str, *changes: str) -> Row:
    """A run; accuracies, downloads of a round and the largest networks, by tier."""
    settings, folder = (
        case.settings(f"seed={seed}", f"method={method}", case.budget, *changes),
        Path("runs") / case.name / f"{method}-{seed}",
    )
    with LiveView(Console(quiet=True)) as view:
        result = resume_run(folder, view) if (folder / "config.toml").exists() else new_run(settings, folder, view)
        ledger = list(Store(folder).read_ledger())
    tier_of = {entry.client: entry.tier for entry in ledger}
    macs = {client.name: client.macs for client in result.clients}
    accuracies = {client.name: client.test_accuracy for client in result.clients}
    return {
        "accuracy": by_tier(accuracies, tier_of),
        "clients": accuracies,
        "most_macs": [max(value for client, value in macs.items() if tier_of[client] == tier) for tier in range(len(TIERS))],
        "bytes_down": [_most([entry for entry in ledger if entry.tier == tier]) for tier in range(len(TIERS))],
        "seconds": json.loads(result.to_json())["cost"]["seconds"],
    }


def _most(entries: Sequence[LedgerEntry]) -> int:
    return max((entry.bytes_down for entry in entries if not entry.final), default=0)


def alone(case: Case, seed: int, architectures: Sequence[Architecture]) -> Row:
    """Every client trains its tier's network; nobody needs a round."""
    accuracies, macs, tier_of = {}, [], {}
    for tier, architecture in enumerate(architectures):
        settings, made, federation = built(case, f"seed={seed}", "method=local", f"local.architecture={architecture.id}")
        known = config.tier_of_each(case.settings(f"seed={seed}", case.budget), federation.names)
        tier_of |= {client: own.tier for client, own in known.items()}
        state = made.method.start(settings.seed)
        for client in (client for client, own in known.items() if own.tier == tier):
            answer = made.method.answer(made.method.farewell(state, client), ClientSite(client, federation.data_of(client)))
            assert answer.diary.test_accuracy is not None
            accuracies[client] = answer.diary.test_accuracy
        macs.append(made.tools.space.cost(architecture).macs)
    return {"accuracy": by_tier(accuracies, tier_of), "clients": accuracies, "most_macs": macs, "bytes_down": [0] * len(TIERS)}


def row_of(case: Case, seed: int, method: str) -> Row:
    _, made, _ = built(case, f"seed={seed}", "method=fedavg", "fedavg.architecture=smallest", case.budget)
    fleet, whole = made.tools.fleet, made.tools.supernet.space
    assert fleet
    held = [holds(tier.space, whole.named["medium"]) for tier in fleet.tiers]
    if method == "perfedsde":
        return federated(case, seed, method, case.part)
    if method in ("fedavg", "scaffold"):
        return federated(case, seed, method, f"{method}.architecture={held[0].id}")
    if method == "heterofl":
        network, share = widest(fleet.tiers[0].space, whole)
        shares = [share] + [next(s for s in (1.0, 0.67, share) if _fits(tier.space, network, s)) for tier in fleet.tiers[1:]]
        return federated(case, seed, method, f"heterofl.architecture={network.id}", f"heterofl.widths={shares}")
    return alone(case, seed, held)


def _fits(space: SearchSpace, network: Architecture, share: float) -> bool:
    """Whether a share of a network's channels does: the next number that the space has, as HeteroFL takes it."""
    choices = list(network.choices)
    for number, gene in enumerate(space.genes):
        if gene.channels:
            wanted = share * gene.values[choices[number]]  # type: ignore[operator]
            choices[number] = next(choice for choice, value in enumerate(gene.values) if value >= wanted)  # type: ignore[operator]
    return space.fits(space.canonical(choices))


def table(record: Mapping[str, Any]) -> str:
    """For the page: means over seeds."""
    lines = ["| | weak | middle | strong | all |", "|---|---|---|---|---|"]
    for method, name in NAMES.items():
        rows = [row for row in record["rows"] if row["method"] == method]
        if not rows:
            continue
        found = [mean(row["accuracy"][tier] for row in rows) for tier in range(len(TIERS))]
        lines.append(f"| {name} | {' | '.join(f'{value:.1%}' for value in [*found, mean(found)])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", choices=list(CASES), default="quickstart")
    parser.add_argument("--seeds", default="3,4,5,6,7")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="for all runs")
    parser.add_argument("--only", choices=list(NAMES))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    case = CASES[arguments.preset]
    case = replace(case, common=(*case.common, *arguments.set))
    place = arguments.record or RESULTS / f"{case.name}.json"
    record = json.loads(place.read_text()) if place.exists() else {"rows": []}
    if arguments.table:
        print(table(record))
        return
    for seed in map(int, arguments.seeds.split(",")):
        for method in [arguments.only] if arguments.only else NAMES:
            row = {"seed": seed, "method": method, **row_of(case, seed, method)}
            print(f"seed {seed}  {method:10} " + "  ".join(f"{value:.2%}" for value in row["accuracy"]), flush=True)
            kept = [known for known in record["rows"] if (known["seed"], known["method"]) != (seed, method)]
            rows = sorted([*kept, row], key=lambda one: (one["seed"], list(NAMES).index(one["method"])))
            record = {
                "command": " ".join(["python", *sys.argv]),
                "budget": [case.budget, case.part],
                "environment": environment(torch.device("cuda" if torch.cuda.is_available() and case.preset != "quickstart" else "cpu")),
                "rows": rows,
            }
            place.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
