"""What does the federation cost on top of the training? FedAvg through the engine against a bare PyTorch loop doing the same steps.

    python benchmarks/overhead.py [--repeats 7]

Both do the same batches, steps, evaluations and averages on digits, in turn within one process, so that noise of the machine hits both.
The loop keeps everything in memory; the engine also checks messages, writes state, ledger and result to disk after every round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from fedloom import config
from fedloom.assemble import new_run
from fedloom.assemble.builder import make_tools
from fedloom.assemble.environment import environment
from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientData, Examples
from fedloom.core.seeds import derive_seed, rng
from fedloom.data.augment import Augmentation, augment
from fedloom.data.readers import read
from fedloom.data.splits import Federation, make_split
from fedloom.report.terminal.live import LiveView
from fedloom.supernets.base import Weights
from fedloom.supernets.normalisation import Statistics
from fedloom.training.tools import Tools

RESULT = Path(__file__).parent / "results" / "overhead.json"
SETTINGS = ["method=fedavg", "rounds=3", "training.finetune_epochs=0", "inline.device=cpu", "inline.threads=1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    settings = config.load("quickstart", SETTINGS)
    dataset = read(settings.data)
    split = make_split(settings.split, dataset.train.labels, dataset.test.labels, settings.clients, settings.seed)
    federation = Federation(dataset, split, "cpu")
    tools = make_tools(settings, dataset, torch.device("cpu"))
    times: dict[str, list[float]] = {"engine": [], "bare": []}
    for repeat in range(arguments.repeats + 1):  # the first warms up
        with tempfile.TemporaryDirectory() as folder, LiveView(Console(quiet=True)) as view:
            start = time.perf_counter()
            result = new_run(settings, Path(folder) / "run", view)
            engine = time.perf_counter() - start
        start = time.perf_counter()
        read(settings.data)
        make_split(settings.split, dataset.train.labels, dataset.test.labels, settings.clients, settings.seed)
        accuracy = bare_fedavg(tools, federation, settings.seed)
        bare = time.perf_counter() - start
        engine_accuracy = statistics.fmean(client.test_accuracy for client in result.clients)
        assert abs(accuracy - engine_accuracy) < 0.1, (accuracy, engine_accuracy)  # the same work; rounding grows in early training
        if repeat:
            times["engine"].append(engine)
            times["bare"].append(bare)
            print(f"engine {engine:.2f} s, bare loop {bare:.2f} s, accuracy {engine_accuracy:.3f} and {accuracy:.3f}", flush=True)
    ratio = statistics.median(times["engine"]) / statistics.median(times["bare"])
    print(f"ratio of medians {ratio:.3f}")
    record = {"command": "python benchmarks/overhead.py", "ratio": ratio, "seconds": times, "environment": environment(torch.device("cpu"))}
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


def bare_fedavg(tools: Tools, federation: Federation, seed: int) -> float:
    """FedAvg as one would write it for one experiment: one loop, torch.optim, nothing checked or saved. Returns the mean test accuracy.

    It computes with our layers: with plain torch modules the loop would be twice as slow, and the engine would hide behind that.
    """
    architecture = tools.space.named["medium"]
    weights = tools.supernet.plain(tools.supernet.initial(derive_seed(seed, "weights")), architecture)
    for round in range(tools.rounds):
        drawn = tools.draw_participants(seed, round, federation.names)
        total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        count = 0
        for client in drawn:
            data = federation.data_of(client)
            rates = tools.rates(round, tools.training.epochs)
            trained = train(weights, architecture, data.train, tools, rates, rng(derive_seed(seed, round, client), "train"))
            evaluate(trained, architecture, data, tools)
            for name, tensor in trained.items():
                total[name] += len(data.train) * tensor.detach()
            count += len(data.train)
        weights = {name: tensor / count for name, tensor in total.items()}
    accuracies = []
    for client in federation.names:
        # The engine scores without fine-tuning twice: to choose, and to report.
        evaluate(weights, architecture, federation.data_of(client), tools)
        accuracies.append(evaluate(weights, architecture, federation.data_of(client), tools))
    return statistics.fmean(accuracies)


def train(
    start: Weights, architecture: Architecture, examples: Examples, tools: Tools, rates: list[float], draw: np.random.Generator
) -> dict[str, Tensor]:
    settings = tools.training
    weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in start.items()}
    groups = [
        {"params": [w for w in weights.values() if w.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [w for w in weights.values() if w.ndim <= 1], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.SGD(groups, lr=rates[0], momentum=settings.momentum)
    augmentation = Augmentation(settings.crop, settings.flip, settings.cutout)
    batch = min(settings.batch, len(examples))
    for rate in rates:
        for group in optimiser.param_groups:
            group["lr"] = rate
        order = torch.as_tensor(draw.permutation(len(examples)))
        images, labels = augment(examples.images[order], augmentation, draw, tools.pixels.mean), examples.labels[order]
        for first in range(0, len(examples) // batch * batch, batch):
            logits = tools.supernet.forward(tools.pixels.normalise(images[first : first + batch]), weights, architecture)
            loss = F.cross_entropy(logits, labels[first : first + batch], label_smoothing=settings.label_smoothing)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return weights


@torch.no_grad()
def evaluate(weights: Weights, architecture: Architecture, data: ClientData, tools: Tools) -> float:
    """Statistics from calibration images, then validation and test accuracy, as the engine does at every participation."""
    images = tools.scorer.calibration_images(data.train)
    moments = Statistics(rows=len(images))
    tools.supernet.forward(images, weights, architecture, moments)
    moments.rows = 0
    accuracies = []
    for examples in (data.validation, data.test):
        logits = tools.supernet.forward(tools.pixels.normalise(examples.images), weights, architecture, moments)
        F.cross_entropy(logits, examples.labels)
        accuracies.append((logits.argmax(1) == examples.labels).double().mean().item())
    return accuracies[1]


if __name__ == "__main__":
    main()
