"""Is guidance real? True accuracy of guided architectures on tasks of classes that the predictor never saw, against every cheap rival.

Needs a folder of `fedloom pretrain` with its supernet and labels, and the public images it was trained on:

    python benchmarks/guidance.py pretrain/mobilenetv3 mobilenetv3 [key=value…] [--device cuda] [--out benchmarks/results]

Every arm is scored with the same supernet on the same images of the held-out classes; half of the images select (population, RBF),
the other half report. Differences are paired over tasks, with a 95 % t interval. `--sweep` measures strengths of guidance on tasks
of the classes that the predictor knows, which is where the default is chosen.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import surrogates, workshop  # noqa: F401 - fills the registry
from fedloom.assemble import environment, usable_device
from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.data.readers import read
from fedloom.generator.denoiser import Denoiser
from fedloom.generator.generator import Gain, Generator
from fedloom.generator.labels import score_architectures, task_measure
from fedloom.generator.predictor import ArchitectureNetwork, PredictorSettings, behind_noise, falling_rate, levels
from fedloom.generator.pretrain import Pretraining
from fedloom.generator.proxy import Proxy, Subset, class_likeness, draw_tasks, make_proxy
from fedloom.generator.quality import unique_share
from fedloom.generator.tokens import Tokens
from fedloom.maths.paired import paired_difference
from fedloom.spaces.base import SearchSpace
from fedloom.surrogates.base import SURROGATES

POPULATION = 3  # times the number of genes
CANDIDATES, PICKED = 100, 10  # of the paper


def size_gain(tokens: Tokens, denoiser: Denoiser, size: Callable[[Architecture], int], steps: int, device: torch.device) -> Gain:
    """A predictor of size alone, made and trained like the predictor of accuracy: guidance without any data."""
    space = tokens.space
    choices = space.sample_many(rng("sizes"), 20_000)
    sizes = torch.tensor([float(size(a)) for a in tokens.architectures(choices)], device=device).log()
    target, symbols = (sizes - sizes.mean()) / sizes.std(), tokens.encode(choices).to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ArchitectureNetwork(tokens, 0, PredictorSettings())
    network = network.to(device).train()
    draw = torch.Generator(device).manual_seed(0)
    optimiser = torch.optim.AdamW(network.parameters(), 1e-3, weight_decay=0.02)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = falling_rate(step, steps, 1e-3)
        rows = torch.randint(len(symbols), (1024,), generator=draw, device=device)
        sigma = levels(len(rows), draw, device)
        with torch.no_grad():
            shares = behind_noise(denoiser, tokens.one_hot(symbols[rows]), sigma, draw)
        loss = F.mse_loss(network(shares, sigma), target[rows])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
    frozen = network.eval().requires_grad_(False)
    return lambda shares, sigma: frozen(shares, sigma)


class Truth:
    """Accuracies of architectures on tasks, from the trained supernet."""

    def __init__(self, work: Any, training: Pretraining, proxy: Proxy, weights: dict[str, Tensor]) -> None:
        self.supernet, self.proxy, self.weights, self.settings = work.supernet(proxy.image), proxy, weights, training.settings.labels

    def __call__(self, architectures: Sequence[Architecture], images: slice, tasks: Sequence[Subset]) -> np.ndarray:
        """(architectures, tasks); only images of classes in some task are looked at."""
        classes = np.unique(np.concatenate(tasks))
        place = {label: number for number, label in enumerate(classes)}
        measure = task_measure([np.array([place[label] for label in task]) for task in tasks], self.proxy.scoring.device)
        columns = torch.from_numpy(classes).to(self.proxy.scoring.device)
        rows = score_architectures(
            self.supernet,
            self.weights,
            self.proxy,
            list(architectures),
            self.proxy.scoring[columns][:, images],
            lambda logits: measure(logits[..., columns]),
            self.settings,
        )
        return torch.stack(list(rows)).double().cpu().numpy()


def evolved(space: SearchSpace, parents: Sequence[Architecture], count: int, draw: np.random.Generator) -> list[Architecture]:
    """Children by crossover and mutation, none of them a parent or twice."""
    known, children = set(parents), []
    while len(children) < count:
        first, second = draw.integers(len(parents), size=2)
        child = space.mutate(space.crossover(parents[first], parents[second], draw), draw, 0.1)
        if child not in known:
            known.add(child)
            children.append(child)
    return children


def picked(
    space: SearchSpace, population: Sequence[Architecture], scores: np.ndarray, candidates: Sequence[Architecture]
) -> list[Architecture]:
    """The best candidates by the RBF that was fitted to the population."""
    model = SURROGATES["rbf"](np.stack([space.encode(a) for a in population]), scores)
    predicted = model.predict(np.stack([space.encode(a) for a in candidates]))
    return [candidates[place] for place in np.argsort(-predicted, kind="stable")[:PICKED]]


def summary(values: np.ndarray) -> dict[str, float]:
    return {"mean": float(values.mean()), "std_over_tasks": float(values.std(ddof=1))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("space")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--each", type=int, default=30, help="architectures per arm and task")
    parser.add_argument("--strength", type=float, default=None)
    parser.add_argument("--sweep", type=float, nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    start = time.perf_counter()
    device = usable_device(arguments.device)
    work = workshop.plan(arguments.space, arguments.overrides)
    proxy = make_proxy(read(work.data), work.settings.proxy, device)
    training = Pretraining(work.supernet(workshop.ANY_IMAGE).space, work.settings, arguments.folder, device, lambda *_: None)
    denoiser, extractor = training.denoiser(), training.features(proxy)
    supernet = work.supernet(proxy.image)
    weights = training.supernet(supernet, proxy)
    labels = training.labels(supernet, weights, proxy, extractor)
    predictor = training.predictor(denoiser, labels, proxy, extractor)
    generator = Generator(training.tokens, denoiser, predictor, extractor, work.settings.strength)
    truth = Truth(work, training, proxy, weights)
    space = training.space
    per_class = proxy.scoring.shape[1]
    select, report = slice(0, per_class // 3), slice(per_class // 3, per_class)
    likeness = class_likeness(extractor(proxy.train.images), proxy.train.labels, proxy.image.classes)

    def some_tasks(classes: Subset, count: int, name: str) -> list[Subset]:
        return draw_tasks(work.settings.proxy, classes, count, likeness, rng(arguments.seed, name))

    def vector(task: Subset, number: int) -> Tensor:
        """The condition of a client that has some training images of these classes."""
        draw, rows = rng(arguments.seed, "images", number), []
        for label in task:
            own = torch.nonzero(proxy.train.labels == label)[:, 0].cpu().numpy()
            rows.append(draw.permutation(own)[:20])
        chosen = torch.from_numpy(np.concatenate(rows)).to(device)
        found = generator.task(proxy.train.images[chosen], proxy.train.labels[chosen])
        assert found is not None
        return found

    def guided(task: Subset, number: int, count: int, strength: float) -> list[Architecture]:
        return generator.draw(count, rng(arguments.seed, "guided", number), vector(task, number), strength)

    found: dict[str, Any] = {"space": arguments.space, "each": arguments.each, "seed": arguments.seed}
    strength = generator.strength if arguments.strength is None else arguments.strength
    size_steps = min(1500, work.settings.predictor.steps)

    if arguments.sweep:  # on classes the predictor knows, so that the held-out ones choose nothing
        tasks = some_tasks(proxy.shown, 16, "sweep")
        random = truth(training.tokens.architectures(space.sample_many(rng(arguments.seed, "sweep"), 60)), report, tasks).mean(0)
        found["sweep"] = {"random": summary(random)}
        for value in arguments.sweep:
            sets = [guided(task, number, 16, value) for number, task in enumerate(tasks)]
            own = np.array([truth(members, report, [task]).mean() for members, task in zip(sets, tasks, strict=True)])
            unique = [
                unique_share(np.array([a.choices for a in guided(task, 100 + number, 500, value)])) for number, task in enumerate(tasks[:2])
            ]
            found["sweep"][str(value)] = {**summary(own), "uniqueness_in_500": float(np.mean(unique))}
            print("strength", value, found["sweep"][str(value)], flush=True)
        strength = max(arguments.sweep, key=lambda value: found["sweep"][str(value)]["mean"]) if arguments.strength is None else strength

    tasks = some_tasks(proxy.held_out, arguments.tasks, "guidance")
    count = arguments.each
    shared = {
        "random": training.tokens.architectures(space.sample_many(rng(arguments.seed, "random"), 4 * count)),
        "unguided": generator.draw(4 * count, rng(arguments.seed, "unguided")),
        "largest": [space.named["largest"]],
    }
    for name, size in (("parameters", lambda a: space.cost(a).parameters), ("macs", lambda a: space.cost(a).macs)):
        gain = size_gain(training.tokens, denoiser, size, size_steps, device)
        draw = rng(arguments.seed, "size", name)
        shared[f"guided by {name}"] = training.tokens.architectures(generator.draw_choices(4 * count, draw, gain, strength))
    arms = {name: truth(members, report, tasks).mean(0) for name, members in shared.items()}  # each (tasks,)
    costs = {name: float(np.mean([space.cost(a).parameters for a in members])) for name, members in shared.items()}
    print("shared arms", {name: round(float(values.mean()), 4) for name, values in arms.items()}, flush=True)

    sets = [guided(task, number, count, strength) for number, task in enumerate(tasks)]
    cross = np.stack([truth(members, report, tasks).mean(0) for members in sets])  # (guided for, measured on)
    arms["guided"] = np.diag(cross).copy()
    arms["guided by another task's data"] = (cross.sum(0) - np.diag(cross)) / (len(tasks) - 1)
    costs["guided"] = float(np.mean([space.cost(a).parameters for members in sets for a in members]))
    print(
        "guided",
        round(float(arms["guided"].mean()), 4),
        "others",
        round(float(arms["guided by another task's data"].mean()), 4),
        flush=True,
    )

    population = training.tokens.architectures(space.sample_many(rng(arguments.seed, "population"), POPULATION * len(space.genes)))
    scores = truth(population, select, tasks)  # (population, tasks)
    rivals: dict[str, list[float]] = {
        "crossover and mutation": [],
        "crossover and mutation + RBF": [],
        "guided + RBF": [],
        "random + RBF": [],
    }
    for number, task in enumerate(tasks):
        children = evolved(space, population, CANDIDATES, rng(arguments.seed, "children", number))
        own = [a for a in dict.fromkeys(guided(task, 1000 + number, CANDIDATES, strength)) if a not in set(population)]
        fresh = training.tokens.architectures(space.sample_many(rng(arguments.seed, "fresh", number), CANDIDATES))
        groups = {
            "crossover and mutation": children[:PICKED],
            "crossover and mutation + RBF": picked(space, population, scores[:, number], children),
            "guided + RBF": picked(space, population, scores[:, number], own),
            "random + RBF": picked(space, population, scores[:, number], fresh),
        }
        for name, members in groups.items():
            rivals[name].append(float(truth(members, report, [task]).mean()))
    arms |= {name: np.array(values) for name, values in rivals.items()}

    differences = {}
    for name, values in arms.items():
        if name in ("guided", "guided + RBF"):
            continue
        difference = paired_difference(values, arms["guided"])
        differences[f"guided - {name}"] = {"mean": difference.mean, "low": difference.low, "high": difference.high, "p": difference.p}
    difference = paired_difference(rivals["crossover and mutation + RBF"], rivals["guided + RBF"])
    differences["guided + RBF - crossover and mutation + RBF"] = {
        "mean": difference.mean,
        "low": difference.low,
        "high": difference.high,
        "p": difference.p,
    }
    found |= {
        "strength": strength,
        "tasks": len(tasks),
        "images_per_class": {"selecting": select.stop, "reporting": per_class - select.stop},
        "arms": {name: summary(values) for name, values in arms.items()},
        "parameters": costs,
        "differences": differences,
        "uniqueness_guided": float(np.mean([unique_share(np.array([a.choices for a in members])) for members in sets])),
        "seconds": round(time.perf_counter() - start, 1),
        "environment": environment(device),
    }
    print(json.dumps(found, indent=2))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"guidance-{arguments.space}.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
