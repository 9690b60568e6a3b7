"""Does the generator draw what it was trained on, and does the fast sampler draw as well as the 1000 steps of the papers?

    python benchmarks/generator_quality.py mobilenetv3 [other spaces…] [--device cpu] [--file GENERATOR] [--drawn 20000] [--few 200]

Unguided samples of one network through every sampler against the 500,000 training architectures: validity, uniqueness among 500, novelty,
and total variation of the marginals of single genes and of pairs of genes; `drawn` samples of the fast samplers, `few` of those with
1000 steps (1000 on a GPU, 200 on a CPU if not said). What chance alone leaves between so many exact draws from the space and the
training architectures is measured with 20 repeats ("exact"): a sampler is not expected to be nearer. A control is the network
without what it learned. Then 500 samples guided by data sets that are there (digits always is).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom import config
from fedloom.assemble.environment import environment, usable_device
from fedloom.core.errors import FedloomError
from fedloom.core.seeds import rng
from fedloom.data.readers import DataSettings, read
from fedloom.generator.files import load_generator
from fedloom.generator.generator import AnyGenerator, Generator
from fedloom.generator.quality import BATCH, sample_quality
from fedloom.generator.tokens import Tokens
from fedloom.spaces.base import ImageShape
from fedloom.supernets.base import make_supernet

RESULTS = Path(__file__).parent / "results"
TRAINING = 500_000  # architectures that pretrain samples with seed 0
REPEATS = 20  # of exact draws
GUIDES = ("digits", "cifar10")


def pair_shares(tokens: Tokens, choices: np.ndarray) -> np.ndarray:
    """(rows, symbols, rows, symbols) how often two symbols come together."""
    shown = tokens.one_hot(tokens.encode(choices)).gt(0).flatten(1).float()  # (n, rows * symbols)
    return (shown.T @ shown / len(choices)).numpy().reshape(len(tokens), tokens.symbols, len(tokens), tokens.symbols)


def apart(tokens: Tokens, choices: np.ndarray, of_training: np.ndarray) -> dict[str, dict[str, float]]:
    """Total variation of genes and of pairs of genes."""
    both = 0.5 * np.abs(pair_shares(tokens, choices) - of_training).sum((1, 3))  # (rows, rows), single genes on the diagonal
    found = {"genes": np.diag(both), "pairs": both[np.triu_indices(len(tokens), 1)]}
    return {name: {"largest": float(values.max()), "mean": float(values.mean())} for name, values in found.items()}


def exact(tokens: Tokens, of_training: np.ndarray, count: int, seed: int) -> dict[str, Any]:
    """The same distances of exact draws: mean over repeats, and the worst repeat."""
    draws = [tokens.space.sample_many(rng(seed, "exact", count, repeat), count) for repeat in range(REPEATS)]
    found = [apart(tokens, choices, of_training) for choices in draws]
    table: dict[str, Any] = {"drawn": count, "repeats": REPEATS}
    for name in ("genes", "pairs"):
        table[name] = {
            which: {"mean": float(np.mean([one[name][which] for one in found])), "worst": max(one[name][which] for one in found)}
            for which in ("largest", "mean")
        }
    return table


def basics(tokens: Tokens, choices: np.ndarray, training: np.ndarray) -> dict[str, float]:
    quality = sample_quality(tokens, choices, training)
    return {key: quality[key] for key in ("validity", "uniqueness_in_500", "novelty")}


def drawn_quality(generator: AnyGenerator, count: int, training: np.ndarray, of_training: np.ndarray, seed: int) -> dict[str, Any]:
    generator.sampled_by(steps=2).draw_choices(2, rng("warm"))
    start = time.perf_counter()
    choices = generator.draw_choices(count, rng(seed, "quality"))  # ends on the CPU, so the device has finished
    seconds = time.perf_counter() - start
    return {
        "drawn": count,
        "steps": len(generator.levels()) - 1,
        **basics(generator.tokens, choices, training),
        "total_variation": apart(generator.tokens, choices, of_training),
        "seconds_per_100": 100 * seconds / count,
    }


def uncorrected(generator: Generator) -> Generator:
    """The same without what its network learned: Bayes' rule for independent genes. Shows whether these figures could be bad."""
    denoiser = deepcopy(generator.denoiser)
    for parameter in denoiser.write.parameters():
        parameter.zero_()
    return replace(generator, denoiser=denoiser)


def guided_quality(generator: AnyGenerator, training: np.ndarray, seed: int) -> dict[str, Any]:
    found = {}
    for name in GUIDES:
        try:
            pool = read(DataSettings(name=name)).train
        except FedloomError:
            print(f"{name} is not there")
            continue
        task = generator.task(torch.from_numpy(pool.images), torch.from_numpy(pool.labels))
        choices = np.array([a.choices for a in generator.draw(BATCH, rng(seed, "guided", name), task)])
        found[name] = basics(generator.tokens, choices, training)
    return found


def measured(space_name: str, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    space = make_supernet(space_name, config.load(None, [f"space={space_name}"]).components[space_name], ImageShape(3, 32, 10)).space
    generator = load_generator(space, arguments.file, "", device)
    tokens = generator.tokens
    training = space.sample_many(rng(0, "architectures"), TRAINING)
    of_training = pair_shares(tokens, training)
    found: dict[str, Any] = {"model": generator.model, "strength": generator.strength, "samplers": {}}
    for sampler in arguments.samplers:
        count = arguments.drawn if sampler.startswith("dpm") else arguments.few
        found["samplers"][sampler] = drawn_quality(generator.sampled_by(sampler), count, training, of_training, arguments.seed)
        print(space_name, sampler, json.dumps(found["samplers"][sampler]), flush=True)
    if isinstance(generator, Generator):
        found["without_the_learned_correction"] = drawn_quality(
            uncorrected(generator), arguments.drawn, training, of_training, arguments.seed
        )
        print(space_name, "uncorrected", json.dumps(found["without_the_learned_correction"]), flush=True)
    found["exact"] = [exact(tokens, of_training, count, arguments.seed) for count in (arguments.drawn, arguments.few)]
    print(space_name, "exact", json.dumps(found["exact"]), flush=True)
    if generator.guided:
        found["guided"] = guided_quality(generator, training, arguments.seed)
        print(space_name, "guided", json.dumps(found["guided"]), flush=True)
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spaces", nargs="+")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--file", default="", help="a generator of `fedloom pretrain` (seed 0); the shipped one if not said")
    parser.add_argument("--samplers", nargs="+", default=["dpm", "dpm_sde", "sde", "pc"])
    parser.add_argument("--drawn", type=int, default=20_000)
    parser.add_argument("--few", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(given)
    device = usable_device(arguments.device)
    arguments.few = arguments.few or (1000 if device.type == "cuda" else 200)
    for space in arguments.spaces:
        start, load, made_by = time.perf_counter(), os.getloadavg()[0], environment(device)  # of the code that is loaded now
        record = {
            "command": f"python benchmarks/generator_quality.py {space} --device {device.type} "
            f"--drawn {arguments.drawn} --few {arguments.few} --seed {arguments.seed}",
            "space": space,
            "seed": arguments.seed,
            **measured(space, arguments, device),
            "seconds": round(time.perf_counter() - start, 1),
            "load_average_at_start": load,
            "cores": os.cpu_count(),
            "environment": made_by,
        }
        (arguments.out / f"generator-quality-{space}-{device.type}.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
