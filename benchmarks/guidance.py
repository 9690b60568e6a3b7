"""Is guidance real? True accuracy of guided architectures on tasks of classes that the predictor never saw, against every cheap rival.

Needs a folder of `fedloom pretrain` with its supernet and generator, the settings they were made with, and the public images:

    python benchmarks/guidance.py pretrain/mobilenetv3 mobilenetv3 [key=value…] [--device cuda] [--sweep 4 8 16] [--out FOLDER]

Every arm is scored with the same supernet on the same images of the held-out classes, taken as the task says; a third of the images
select (population, RBF), the others report. Differences are paired over tasks, with a 95 % t interval. `--sweep` measures strengths of
guidance on tasks of the classes that the predictor knows; unless `--strength` says otherwise, the best of them is then used.
What was measured is kept in FOLDER as it comes; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.analyses.figure3 import new_ones
from fedloom.assemble import pretraining
from fedloom.assemble.environment import environment, usable_device
from fedloom.core.architecture import Architecture
from fedloom.core.seeds import rng
from fedloom.data.readers import read
from fedloom.files import write_file
from fedloom.generator.conditions import taken
from fedloom.generator.denoiser import Denoiser
from fedloom.generator.files import digest_of, load_generator
from fedloom.generator.generator import Gain, Generator
from fedloom.generator.labels import LabelSettings, score_architectures, task_measure
from fedloom.generator.predictor import ArchitectureNetwork, PredictorSettings, behind_noise, falling_rate, levels
from fedloom.generator.pretrain import Pretraining, result_file
from fedloom.generator.proxy import Proxy, Subset, Task, class_likeness, draw_tasks, make_proxy
from fedloom.generator.quality import unique_share
from fedloom.generator.tokens import Tokens
from fedloom.maths.paired import paired_difference
from fedloom.search.base import choose, predicted
from fedloom.search.candidates import children
from fedloom.search.rbf import fit_rbf
from fedloom.spaces.base import SearchSpace
from fedloom.supernets.base import Supernet

SIZE_STEPS = 1500  # of training a predictor of size
POPULATION = 3  # times the number of genes
CANDIDATES, PICKED = 100, 10  # of the paper
GUIDED, OTHERS, EVOLUTION = "guided by its data", "guided by another task's data", "crossover and mutation"
UNIQUE = 0.95  # of 500 drawn, at least; a strength that leaves less variety is not chosen
OTHER_TASKS = 4  # with the data of so many others a task is compared
SWEPT, SWEPT_EACH = 18, 16  # tasks, and architectures for each of them


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


def picked(
    space: SearchSpace, population: Sequence[Architecture], scores: np.ndarray, candidates: Sequence[Architecture]
) -> list[Architecture]:
    """The best candidates by the RBF that was fitted to the population."""
    return choose(candidates, population, predicted(space, fit_rbf, population, scores, candidates), PICKED)


def summary(values: np.ndarray) -> dict[str, float]:
    return {"mean": float(values.mean()), "std_over_tasks": float(values.std(ddof=1))}


class Kept:
    """What has been measured, in a file from which the same measurement goes on."""

    def __init__(self, file: Path, setting: dict[str, Any]) -> None:
        self.file, self.setting = file, json.loads(json.dumps(setting))
        self.found: dict[str, Any] = {}
        if file.exists():
            known = json.loads(file.read_text())
            if known["setting"] != self.setting:
                raise SystemExit(f"{file} is of a measurement with other settings or another generator. Remove it, or name another --out")
            self.found = known["found"]

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        if name not in self.found:
            self.found[name] = json.loads(json.dumps(work()))
            write_file(self.file, json.dumps({"setting": self.setting, "found": self.found}).encode())
            print(name, _short(self.found[name]), flush=True)
        return self.found[name]


def _short(value: Any) -> Any:
    """For the screen: means of lists."""
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    return round(float(np.mean(value)), 4)


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
    parser.add_argument("--out", type=Path, default=Path("."))
    arguments = parser.parse_args()
    start = time.perf_counter()
    device = usable_device(arguments.device)
    work = pretraining.plan(arguments.space, arguments.overrides)
    proxy = make_proxy(read(work.data), work.settings.proxy, device)
    space = work.supernet(pretraining.ANY_IMAGE).space
    features = work.settings.features.file
    generator = load_generator(space, str(result_file(arguments.folder, Generator.model)), features, device)
    assert isinstance(generator, Generator) and generator.predictor is not None and generator.extractor is not None
    supernet = work.supernet(proxy.image)
    weights = Pretraining(space, work.settings, arguments.folder, device, lambda *_: None).supernet(supernet, proxy)
    truth = Truth(supernet, proxy, weights, work.settings.labels)
    tokens, denoiser, count, seed = generator.tokens, generator.denoiser, arguments.each, arguments.seed
    per_class = proxy.scoring.shape[1]
    select, report = slice(0, per_class // 3), slice(per_class // 3, per_class)
    likeness = class_likeness(generator.extractor(proxy.train.images), proxy.train.labels, proxy.image.classes)
    setting = {"space": arguments.space, "tasks": arguments.tasks, "each": count, "seed": seed, "strength": arguments.strength}
    setting |= {"sweep": arguments.sweep, "generator": digest_of(generator.predictor), "images_per_class": per_class}
    arguments.out.mkdir(parents=True, exist_ok=True)
    kept = Kept(arguments.out / f"guidance-{arguments.space}.part.json", setting)

    def some_tasks(classes: Subset, wanted: int, name: str) -> list[Task]:
        return draw_tasks(work.settings.proxy, classes, wanted, likeness, rng(seed, name))

    def vector(task: Task, number: int) -> Tensor:
        """The condition of a client that has some training images of these classes."""
        draw, rows = rng(seed, "images", number), []
        for label in task.classes:
            own = torch.nonzero(proxy.train.labels == label)[:, 0].cpu().numpy()
            rows.append(draw.permutation(own)[:20])
        chosen = torch.from_numpy(np.concatenate(rows)).to(device)
        found = generator.task(taken(proxy.train.images[chosen], task.condition), proxy.train.labels[chosen])
        assert found is not None
        return found

    def guided(task: Task, number: int, wanted: int, strength: float) -> list[Architecture]:
        return generator.draw(wanted, rng(seed, "guided", number), vector(task, number), strength)

    def random(wanted: int, *name: str | int) -> list[Architecture]:
        return tokens.architectures(space.sample_many(rng(seed, *name), wanted))

    # -- which strength: on classes the predictor knows, so that the held-out ones choose nothing
    swept = some_tasks(proxy.shown, SWEPT, "sweep")

    def of_strength(value: float) -> dict[str, float]:
        sets = [guided(task, number, SWEPT_EACH, value) for number, task in enumerate(swept)]
        own = np.array([truth(members, report, [task]).mean() for members, task in zip(sets, swept, strict=True)])
        many = [guided(task, 100 + number, 500, value) for number, task in enumerate(swept[:2])]
        return summary(own) | {"uniqueness_in_500": float(np.mean([unique_share(np.array([a.choices for a in drawn])) for drawn in many]))}

    sweep = {str(value): kept.once(f"strength {value}", lambda value=value: of_strength(value)) for value in arguments.sweep}  # type: ignore[misc]
    varied = [value for value in arguments.sweep if sweep[str(value)]["uniqueness_in_500"] >= UNIQUE]
    best = max(varied, key=lambda value: sweep[str(value)]["mean"], default=generator.strength)
    strength = best if arguments.strength is None else arguments.strength
    if sweep:
        sweep["random"] = kept.once("strength 0", lambda: summary(truth(random(2 * count, "sweep"), report, swept).mean(0)))

    # -- architectures that are the same for every task
    tasks = some_tasks(proxy.held_out, arguments.tasks, "guidance")

    def by_size(size: Callable[[Architecture], int], name: str) -> list[Architecture]:
        gain = size_gain(tokens, denoiser, size, SIZE_STEPS, device)
        return tokens.architectures(generator.draw_choices(2 * count, rng(seed, "size", name), gain, strength))

    shared: dict[str, Callable[[], list[Architecture]]] = {
        "random": lambda: random(2 * count, "random"),
        "unguided": lambda: generator.draw(2 * count, rng(seed, "unguided")),
        "largest": lambda: [space.named["largest"]],
        "guided by parameters": lambda: by_size(lambda a: space.cost(a).parameters, "parameters"),
        "guided by macs": lambda: by_size(lambda a: space.cost(a).macs, "macs"),
    }

    def of_all(drawn: list[Architecture]) -> dict[str, Any]:
        return {"accuracies": truth(drawn, report, tasks).mean(0).tolist(), "parameters": parameters(drawn)}

    def parameters(drawn: Sequence[Architecture]) -> float:
        return float(np.mean([space.cost(a).parameters for a in drawn]))

    alike = {name: kept.once(name, lambda draw=draw: of_all(draw())) for name, draw in shared.items()}  # type: ignore[misc]

    # -- those for a task
    population = random(POPULATION * len(space.genes), "population")
    scores = np.array(kept.once("population", lambda: truth(population, select, tasks).tolist()))  # (population, tasks)
    shifts = sorted({max(1, round((turn + 0.5) * len(tasks) / OTHER_TASKS)) for turn in range(OTHER_TASKS)})

    @cache
    def own(number: int) -> list[Architecture]:
        return guided(tasks[number], number, count, strength)

    def of_task(number: int) -> dict[str, float]:
        task = tasks[number]
        evolved = new_ones(children(space, population, 0.1, rng(seed, "children", number)), population, CANDIDATES)
        candidates = {EVOLUTION: evolved, "random": random(CANDIDATES, "fresh", number)}
        candidates[GUIDED] = guided(task, 1000 + number, CANDIDATES, strength)
        others = [own((number + shift) % len(tasks)) for shift in shifts]  # for tasks elsewhere in the list
        drawn = {GUIDED: own(number), OTHERS: [a for members in others for a in members[: -(-count // len(others))]]}
        drawn |= {EVOLUTION: evolved[:PICKED]}
        drawn |= {f"{name} + RBF": picked(space, population, scores[:, number], some) for name, some in candidates.items()}
        found = {name: float(truth(some, report, [task]).mean()) for name, some in drawn.items()}
        return found | {"unique": unique_share(np.array([a.choices for a in own(number)])), "parameters": parameters(own(number))}

    rows = [kept.once(f"task {number}", lambda number=number: of_task(number)) for number in range(len(tasks))]  # type: ignore[misc]
    arms = {name: np.array(found["accuracies"]) for name, found in alike.items()}  # each (tasks,)
    arms |= {name: np.array([row[name] for row in rows]) for name in rows[0] if name not in ("unique", "parameters")}

    def difference(ours: str, theirs: str) -> dict[str, float | None]:
        paired = paired_difference(arms[theirs], arms[ours])
        return {"mean": paired.mean, "low": paired.low, "high": paired.high, "p": paired.p}

    pairs = [(GUIDED, name) for name in arms if not name.startswith(GUIDED)]
    pairs += [(f"{GUIDED} + RBF", f"{name} + RBF") for name in (EVOLUTION, "random")]
    record = {
        "space": arguments.space,
        "each": count,
        "seed": seed,
        "sweep": sweep,
        "strength": strength,
        "tasks": len(tasks),
        "conditions": list(work.settings.proxy.conditions),
        "images_per_class": {"selecting": select.stop, "reporting": per_class - select.stop},
        "arms": {name: summary(values) for name, values in arms.items()},
        "parameters": {name: found["parameters"] for name, found in alike.items()} | {GUIDED: _mean(rows, "parameters")},
        "differences": {f"{ours} - {theirs}": difference(ours, theirs) for ours, theirs in pairs},
        "uniqueness": _mean(rows, "unique"),
        "seconds_of_the_last_command": round(time.perf_counter() - start, 1),
        "environment": environment(device),
    }
    print(json.dumps(record, indent=2))
    write_file(arguments.out / f"guidance-{arguments.space}.json", (json.dumps(record, indent=2) + "\n").encode())
    kept.file.unlink()


def _mean(rows: Sequence[dict[str, float]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


if __name__ == "__main__":
    main()
