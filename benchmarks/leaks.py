"""What can a server of `perfedsde` read from the reports of the first round?

    python benchmarks/leaks.py [key=value]... [--seeds 3] [--out benchmarks/results/leaks.json]

The server knows what it sent, the reports, and the seed of each client's draws, so also a client's first random population.
Attacks, each by a rule that is not tuned:

archive  A member of the first population was trained if the client's coverage contains all entries that it uses.
         Precision and recall against what the client really trained.
labels   Rank correlation, over classes, of the client's label counts and the update of the classifier's bias; mean over clients.

Last result (quickstart with all 12 clients in the first round, seeds 0, 1, 2, benchmarks/results/leaks.json): archive members with
precision 0.97 and recall 1.0 (91 guessed, 88 trained), labels with rank correlation 0.94, spread 0.05 over 36 clients.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from fedloom import config
from fedloom.assemble.builder import build
from fedloom.assemble.environment import environment
from fedloom.config import Settings
from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientSite
from fedloom.core.messages import Arrays
from fedloom.data.readers import read
from fedloom.data.splits import Federation, make_split
from fedloom.files import write_file
from fedloom.training.local import Trainer

RESULT = Path(__file__).parent / "results" / "leaks.json"


def first_round(settings: Settings) -> list[dict[str, float]]:
    """What the attacks make of every client's first report."""
    dataset = read(settings.data)
    split = make_split(settings.split, dataset.train.labels, dataset.test.labels, settings.clients, settings.seed)
    federation = Federation(dataset, split, torch.device("cpu"))
    method: Any = build(settings, dataset, torch.device("cpu")).method
    found = []
    for instruction in method.plan(method.start(settings.seed), federation.names):
        trained: Counter[Architecture] = Counter()
        data = federation.data_of(instruction.client)
        report = answered(method, instruction, ClientSite(instruction.client, data), trained)
        coverage = report.arrays["coverage"]
        population = method._random_population(instruction.seed)  # the server chose the seed
        supernet = method.tools.supernet
        guessed = [member for member in population if within(supernet, coverage, member)]
        right = [member for member in guessed if member in trained]
        there = [member for member in population if member in trained]
        counts = np.bincount(data.train.labels.numpy(), minlength=len(dataset.classes))
        bias = report.arrays["update"]["classifier.bias"]
        found.append(
            {
                "guessed": len(guessed),
                "right": len(right),
                "there": len(there),
                "labels": float(spearmanr(counts, bias).statistic),
            }
        )
    return found


def answered(method: Any, instruction: Any, site: ClientSite, trained: Counter[Architecture]) -> Any:
    """A client's report, and what it trained, which it keeps to itself."""
    train = Trainer.train_supernet

    def listening(self: Trainer, *given: Any) -> Any:
        done = train(self, *given)
        trained.update(done.steps)
        return done

    Trainer.train_supernet = listening  # type: ignore[method-assign]
    try:
        return method.answer(instruction, site).report
    finally:
        Trainer.train_supernet = train  # type: ignore[method-assign]


def within(supernet: Any, coverage: Arrays, architecture: Architecture) -> bool:
    """Whether every entry that an architecture uses was trained."""
    own = supernet.coverage({architecture: 1})
    return all(bool((np.asarray(coverage[name])[np.asarray(mine) > 0] > 0).all()) for name, mine in own.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = config.load("quickstart", ["participants=12", *arguments.overrides])
    found = [one for seed in range(arguments.seeds) for one in first_round(replace(settings, seed=seed))]
    labels = [one["labels"] for one in found]
    guessed, right, there = (sum(one[name] for one in found) for name in ("guessed", "right", "there"))
    record = {
        "command": "python benchmarks/leaks.py " + " ".join(arguments.overrides),
        "seeds": list(range(arguments.seeds)),
        "clients": len(found),
        "archive": {"precision": right / max(guessed, 1), "recall": right / max(there, 1), "guessed": guessed, "trained": there},
        "labels": {"rank_correlation": float(np.mean(labels)), "std": float(np.std(labels))},
        "environment": environment(torch.device("cpu")),
    }
    write_file(arguments.out, (json.dumps(record, indent=2) + "\n").encode())
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
