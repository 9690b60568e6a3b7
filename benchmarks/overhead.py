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
from torch import Tensor, nn

from fedloom import config
from fedloom.assemble import environment, make_bench, new_run
from fedloom.core.client_site import ClientData, Examples
from fedloom.core.seeds import derive_seed, rng
from fedloom.data.augment import Augmentation, augment
from fedloom.data.readers import read
from fedloom.data.splits import Federation, make_split
from fedloom.report.live import LiveView
from fedloom.training.bench import Bench

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
    bench = make_bench(settings, dataset, torch.device("cpu"))
    times: dict[str, list[float]] = {"engine": [], "bare": []}
    for repeat in range(arguments.repeats + 1):  # the first warms up
        with tempfile.TemporaryDirectory() as folder, LiveView(Console(quiet=True)) as view:
            start = time.perf_counter()
            result = new_run(settings, Path(folder) / "run", view)
            engine = time.perf_counter() - start
        start = time.perf_counter()
        read(settings.data)
        make_split(settings.split, dataset.train.labels, dataset.test.labels, settings.clients, settings.seed)
        accuracy = bare_fedavg(bench, federation, settings.seed)
        bare = time.perf_counter() - start
        engine_accuracy = statistics.fmean(client.test_accuracy for client in result.clients)
        assert abs(accuracy - engine_accuracy) < 0.1, (accuracy, engine_accuracy)  # the same work, not a lighter one
        if repeat:
            times["engine"].append(engine)
            times["bare"].append(bare)
            print(f"engine {engine:.2f} s, bare loop {bare:.2f} s, accuracy {engine_accuracy:.3f} and {accuracy:.3f}", flush=True)
    ratio = statistics.median(times["engine"]) / statistics.median(times["bare"])
    print(f"ratio of medians {ratio:.3f}")
    record = {"command": "python benchmarks/overhead.py", "ratio": ratio, "seconds": times, "environment": environment(torch.device("cpu"))}
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


def bare_fedavg(bench: Bench, federation: Federation, seed: int) -> float:
    """FedAvg as one would write it for one experiment: plain modules, torch.optim, nothing saved. Returns the mean test accuracy."""
    settings, architecture = bench.training, bench.space.named["medium"]
    network = bench.supernet.network(architecture)
    initial = bench.supernet.plain(bench.supernet.initial(derive_seed(seed, "weights")), architecture)
    weights = {name: tensor.clone() for name, tensor in initial.items()}
    parameters = dict(network.named_parameters())

    def load(values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(values[name])

    for round in range(bench.rounds):
        drawn = bench.draw_participants(seed, round, federation.names)
        total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        count = 0
        for client in drawn:
            data = federation.data_of(client)
            load(weights)
            train(network, data.train, bench, bench.rates(round, settings.epochs), rng(derive_seed(seed, round, client), "train"))
            evaluate(network, data, bench)
            for name, parameter in parameters.items():
                total[name] += len(data.train) * parameter.detach()
            count += len(data.train)
        weights = {name: tensor / count for name, tensor in total.items()}
    accuracies = []
    for client in federation.names:
        load(weights)
        # The engine scores without fine-tuning twice: to choose, and to report.
        evaluate(network, federation.data_of(client), bench)
        accuracies.append(evaluate(network, federation.data_of(client), bench))
    return statistics.fmean(accuracies)


def train(network: nn.Module, examples: Examples, bench: Bench, rates: list[float], draw: np.random.Generator) -> None:
    settings = bench.training
    decay = [p for p in network.parameters() if p.ndim > 1]
    rest = [p for p in network.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimiser = torch.optim.SGD(groups, lr=rates[0], momentum=settings.momentum)
    augmentation = Augmentation(settings.crop, settings.flip, settings.cutout)
    batch = min(settings.batch, len(examples))
    network.train()
    for rate in rates:
        for group in optimiser.param_groups:
            group["lr"] = rate
        order = torch.as_tensor(draw.permutation(len(examples)))
        images, labels = augment(examples.images[order], augmentation, draw, bench.pixels.mean), examples.labels[order]
        for start in range(0, len(examples) // batch * batch, batch):
            logits = network(bench.pixels.normalise(images[start : start + batch]))
            loss = F.cross_entropy(logits, labels[start : start + batch], label_smoothing=settings.label_smoothing)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()


@torch.no_grad()
def evaluate(network: nn.Module, data: ClientData, bench: Bench) -> float:
    """Statistics from calibration images, then validation and test accuracy, as the engine does at every participation."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
    network.train()
    network(bench.scorer.calibration_images(data.train))
    network.eval()
    accuracies = []
    for examples in (data.validation, data.test):
        logits = network(bench.pixels.normalise(examples.images))
        F.cross_entropy(logits, examples.labels)
        accuracies.append((logits.argmax(1) == examples.labels).double().mean().item())
    return accuracies[1]


if __name__ == "__main__":
    main()
