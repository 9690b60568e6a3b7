"""Is guidance real? True accuracy of guided architectures on tasks of classes that the predictor never saw, against every cheap rival.

Needs a folder of `fedloom pretrain` with its supernet and labels, and the public images it was trained on:

    python benchmarks/guidance.py pretrain/mobilenetv3 mobilenetv3 [key=value…] [--device cuda] [--out benchmarks/results]

Every arm is scored with the same supernet on the same images of the held-out classes, taken as the task says; a third of the images
select (population, RBF), the others report. Differences are paired over tasks, with a 95 % t interval. `--sweep` measures strengths of
guidance on tasks of the classes that the predictor knows; unless `--strength` says otherwise, the best of them is then used.
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
from fedloom.generator.conditions import taken
from fedloom.generator.denoiser import Denoiser
from fedloom.generator.generator import Gain, Generator
from fedloom.generator.labels import LabelSettings, score_architectures, task_measure
from fedloom.generator.predictor import ArchitectureNetwork, PredictorSettings, behind_noise, falling_rate, levels
from fedloom.generator.pretrain import Pretraining
from fedloom.generator.proxy import Proxy, Subset, Task, class_likeness, draw_tasks, make_proxy
from fedloom.generator.quality import unique_share
from fedloom.generator.tokens import Tokens
from fedloom.maths.paired import paired_difference
from fedloom.spaces.base import SearchSpace
from fedloom.supernets.base import Supernet
from fedloom.surrogates.base import SURROGATES, choose

POPULATION = 3  # times the number of genes
CANDIDATES, PICKED = 100, 10  # of the paper
GUIDED, OTHERS, EVOLUTION = "guided by its data", "guided by another task's data", "crossover and mutation"
UNIQUE = 0.95  # of 500 drawn, at least; a strength that leaves less variety is not chosen
OTHER_TASKS = 4  # whose architectures a task is compared with


def size_gain(tokens: Tokens, denoiser: Denoiser, size: Callable[[Architecture], int], steps: int, device: torch.device) -> Gain:
    """A predictor of size alone, made and trained like the predictor of accuracy: guidance without any data."""
    space = tokens.space
    choices = space.sample_many(rng("sizes"), 20_000)
    sizes = torch.tensor([float(size(a)) for a in tokens.architectures(choices)], device=device).log()
    target, symbols = (sizes - sizes.mean()) / sizes.std(), tokens.encode(choices).to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ArchitectureNetwork(tokens, PredictorSettings())
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
    """Accuracies of architectures on a task, from the trained supernet."""

    def __init__(self, supernet: Supernet[Any], proxy: Proxy, weights: dict[str, Tensor], settings: LabelSettings) -> None:
        self.supernet, self.proxy, self.weights, self.settings = supernet, proxy, weights, settings

    def __call__(self, architectures: Sequence[Architecture], images: slice, tasks: Sequence[Task]) -> np.ndarray:
        """(architectures, tasks); only images of classes in some task are looked at, once for every condition."""
        classes = np.unique(np.concatenate([task.classes for task in tasks]))
        among = [Task(np.searchsorted(classes, task.classes), task.condition) for task in tasks]
        columns = torch.from_numpy(classes).to(self.proxy.scoring.device)
        found = np.full((len(architectures), len(tasks)), np.nan)
        for condition in sorted({task.condition for task in tasks}):
            measure = task_measure(among, condition, columns.device)
            rows = score_architectures(
                self.supernet,
                self.weights,
                self.proxy,
                list(architectures),
                self.proxy.scoring[columns][:, images],
                lambda logits, measure=measure: measure(logits[..., columns]),  # type: ignore[misc]
                self.settings,
                condition,
            )
            own = [number for number, task in enumerate(tasks) if task.condition == condition]
            found[:, own] = torch.stack(list(rows)).double().cpu().numpy()[:, own]
        return found


def evolved(space: SearchSpace, parents: Sequence[Architecture], count: int, draw: np.random.Generator) -> list[Architecture]:
    """Children by crossover and mutation, none of them a parent or twice."""
    known: set[Architecture] = set(parents)
    children: list[Architecture] = []
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
    return choose(candidates, population, predicted, PICKED)


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
    truth = Truth(supernet, proxy, weights, work.settings.labels)
    space, tokens = training.space, training.tokens
    per_class = proxy.scoring.shape[1]
    select, report = slice(0, per_class // 3), slice(per_class // 3, per_class)
    likeness = class_likeness(extractor(proxy.train.images), proxy.train.labels, proxy.image.classes)

    def some_tasks(classes: Subset, count: int, name: str) -> list[Task]:
        return draw_tasks(work.settings.proxy, classes, count, likeness, rng(arguments.seed, name))

    def vector(task: Task, number: int) -> Tensor:
        """The condition of a client that has some training images of these classes."""
        draw, rows = rng(arguments.seed, "images", number), []
        for label in task.classes:
            own = torch.nonzero(proxy.train.labels == label)[:, 0].cpu().numpy()
            rows.append(draw.permutation(own)[:20])
        chosen = torch.from_numpy(np.concatenate(rows)).to(device)
        found = generator.task(taken(proxy.train.images[chosen], task.condition), proxy.train.labels[chosen])
        assert found is not None
        return found

    def guided(task: Task, number: int, count: int, strength: float) -> list[Architecture]:
        return generator.draw(count, rng(arguments.seed, "guided", number), vector(task, number), strength)

    def random(count: int, *name: str | int) -> list[Architecture]:
        return tokens.architectures(space.sample_many(rng(arguments.seed, *name), count))

    found: dict[str, Any] = {"space": arguments.space, "each": arguments.each, "seed": arguments.seed}
    count = arguments.each

    if arguments.sweep:  # on classes the predictor knows, so that the held-out ones choose nothing
        tasks = some_tasks(proxy.shown, 18, "sweep")
        found["sweep"] = {"random": summary(truth(random(60, "sweep"), report, tasks).mean(0))}
        for value in arguments.sweep:
            sets = [guided(task, number, 16, value) for number, task in enumerate(tasks)]
            own = np.array([truth(members, report, [task]).mean() for members, task in zip(sets, tasks, strict=True)])
            many = [guided(task, 100 + number, 500, value) for number, task in enumerate(tasks[:2])]
            unique = float(np.mean([unique_share(np.array([a.choices for a in drawn])) for drawn in many]))
            found["sweep"][str(value)] = {**summary(own), "uniqueness_in_500": unique}
            print("strength", value, found["sweep"][str(value)], flush=True)
    varied = {value: found["sweep"][str(value)] for value in arguments.sweep if found["sweep"][str(value)]["uniqueness_in_500"] >= UNIQUE}
    best = max(varied, key=lambda value: varied[value]["mean"], default=generator.strength)
    strength = best if arguments.strength is None else arguments.strength

    tasks = some_tasks(proxy.held_out, arguments.tasks, "guidance")
    shared = {
        "random": random(3 * count, "random"),
        "unguided": generator.draw(3 * count, rng(arguments.seed, "unguided")),
        "largest": [space.named["largest"]],
    }
    for name, size in (("parameters", lambda a: space.cost(a).parameters), ("macs", lambda a: space.cost(a).macs)):
        gain = size_gain(tokens, denoiser, size, min(1500, work.settings.predictor.steps), device)
        choices = generator.draw_choices(3 * count, rng(arguments.seed, "size", name), gain, strength)
        shared[f"guided by {name}"] = tokens.architectures(choices)
    arms = {name: truth(drawn, report, tasks).mean(0) for name, drawn in shared.items()}  # each (tasks,)
    costs = {name: float(np.mean([space.cost(a).parameters for a in drawn])) for name, drawn in shared.items()}
    print("shared arms", {name: round(float(values.mean()), 4) for name, values in arms.items()}, flush=True)

    sets = [guided(task, number, count, strength) for number, task in enumerate(tasks)]
    costs[GUIDED] = float(np.mean([space.cost(a).parameters for drawn in sets for a in drawn]))
    arms |= {GUIDED: np.empty(len(tasks)), OTHERS: np.empty(len(tasks))}
    shifts = sorted({max(1, round((turn + 0.5) * len(tasks) / OTHER_TASKS)) for turn in range(OTHER_TASKS)})
    for number, task in enumerate(tasks):  # what is drawn for this task, and for others elsewhere in the list
        others = [sets[(number + shift) % len(tasks)] for shift in shifts]
        arms[GUIDED][number] = truth(sets[number], report, [task]).mean()
        arms[OTHERS][number] = np.mean([truth(drawn, report, [task]).mean() for drawn in others])
    print({name: round(float(arms[name].mean()), 4) for name in (GUIDED, OTHERS)}, flush=True)

    population = random(POPULATION * len(space.genes), "population")
    scores = truth(population, select, tasks)  # (population, tasks)
    rivals: dict[str, list[float]] = {}
    for number, task in enumerate(tasks):
        children = evolved(space, population, CANDIDATES, rng(arguments.seed, "children", number))
        sources = {EVOLUTION: children, "random": random(CANDIDATES, "fresh", number)}
        sources[GUIDED] = guided(task, 1000 + number, CANDIDATES, strength)
        groups = {f"{name} + RBF": picked(space, population, scores[:, number], drawn) for name, drawn in sources.items()}
        for name, drawn in {EVOLUTION: children[:PICKED], **groups}.items():
            rivals.setdefault(name, []).append(float(truth(drawn, report, [task]).mean()))
    arms |= {name: np.array(values) for name, values in rivals.items()}

    def difference(ours: str, theirs: str) -> dict[str, float | None]:
        paired = paired_difference(arms[theirs], arms[ours])
        return {"mean": paired.mean, "low": paired.low, "high": paired.high, "p": paired.p}

    pairs = [(GUIDED, name) for name in arms if not name.startswith(GUIDED)] + [(GUIDED, OTHERS)]
    pairs += [(f"{GUIDED} + RBF", f"{name} + RBF") for name in (EVOLUTION, "random")]
    found |= {
        "strength": strength,
        "tasks": len(tasks),
        "conditions": list(work.settings.proxy.conditions),
        "images_per_class": {"selecting": select.stop, "reporting": per_class - select.stop},
        "arms": {name: summary(values) for name, values in arms.items()},
        "parameters": costs,
        "differences": {f"{ours} - {theirs}": difference(ours, theirs) for ours, theirs in pairs},
        "uniqueness": float(np.mean([unique_share(np.array([a.choices for a in drawn])) for drawn in sets])),
        "seconds": round(time.perf_counter() - start, 1),
        "environment": environment(device),
    }
    print(json.dumps(found, indent=2))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"guidance-{arguments.space}.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
