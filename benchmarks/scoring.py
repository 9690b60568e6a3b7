"""How much faster does scoring get by computing once what architectures have in common?

    python benchmarks/scoring.py [--spaces mobilenetv3 nasvit darts] [--device cuda] [--architectures 135] [--images 256] [--repeats 3]

Random images of 32 pixels, ten classes, each space's default instance; statistics of 100 images. Two populations: random architectures,
and a converged one, children of five parents by mutation of a gene in twenty. Ways: *plain* runs each network alone, *tree* is
one by one with common beginnings run once, *groups* (on a GPU) runs all nodes with one piece as one call. In DARTS only groups share: a
node is an operation on an edge, and a call serves all edges of a level of a cell. The ways take turns within one process. Milliseconds an
architecture are medians, on a CPU of the process's own time, so that other work on the machine counts less; the ratio is plain to the
other way. Nodes and multiply-accumulates are counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from spaces import IMAGE, PIXELS, RESULTS

from fedloom import config
from fedloom.assemble.environment import environment
from fedloom.core.architecture import Architecture
from fedloom.core.client_site import Examples
from fedloom.core.seeds import rng
from fedloom.spaces.base import SPACES, SearchSpace
from fedloom.supernets.base import Supernet, make_supernet
from fedloom.supernets.darts import DARTSSupernet
from fedloom.supernets.darts_many import Plan
from fedloom.training.prefixes import Network, grow, nodes_below
from fedloom.training.recipe import TrainingSettings
from fedloom.training.scoring import Request, Scorer, _measure

CALIBRATION, PARENTS, MUTATION = 100, 5, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spaces", nargs="+", default=list(SPACES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--architectures", type=int, default=135)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    device = torch.device(given.device)
    for name in given.spaces:
        supernet = make_supernet(name, config.load(None, [f"space={name}"]).components[name], IMAGE)
        counts = f"--architectures {given.architectures} --images {given.images} --repeats {given.repeats}"
        record: dict[str, Any] = {"command": f"python benchmarks/scoring.py --spaces {name} --device {device.type} {counts}"}
        for kind, architectures in populations(supernet.space, given.architectures).items():
            found = {**shared(supernet, architectures), **measured(supernet, architectures, device, given.images, given.repeats)}
            print(f"{device.type:5} {name:12} {kind:10} {json.dumps(found)}", flush=True)
            record[kind] = found
        record |= {"threads": torch.get_num_threads(), "environment": environment(device)}
        (given.out / f"scoring-{name}-{device.type}.json").write_text(json.dumps(record, indent=2) + "\n")


def populations(space: SearchSpace, count: int) -> dict[str, list[Architecture]]:
    draw = rng("benchmark")
    random = [space.sample(draw) for _ in range(count)]
    parents = random[:PARENTS]
    return {"random": random, "converged": [space.mutate(parents[n % PARENTS], draw, MUTATION) for n in range(count)]}


def shared(supernet: Supernet[Any], architectures: list[Architecture]) -> dict[str, float]:
    """What has to be done against every network alone."""
    if isinstance(supernet, DARTSSupernet):
        plan, alone = Plan(supernet.space, [(0, architecture) for architecture in architectures]), 0
        for architecture in architectures:
            alone += sum(bool(part.layers) for part in supernet.space.parts(architecture))
        macs = sum(supernet.space.cost(architecture).macs for architecture in architectures)
        nodes = sum(rows for _, rows in plan.parts)
        return {"pieces": alone, "nodes": nodes, "calls_in_groups": plan.calls, "macs_saved": round(1 - plan.macs / macs, 4)}
    chains = [supernet.pieces(architecture) for architecture in architectures]
    nodes = list(nodes_below(grow(Network(0, place, pieces) for place, pieces in enumerate(chains))))
    macs = sum(supernet.piece_cost(piece).macs for chain in chains for piece in chain)
    return {
        "pieces": sum(map(len, chains)),
        "nodes": len(nodes),
        "calls_in_groups": len({node.piece for node in nodes}),
        "macs_saved": round(1 - sum(supernet.piece_cost(node.piece).macs for node in nodes) / macs, 4),
    }


def measured(
    supernet: Supernet[Any], architectures: list[Architecture], device: torch.device, count: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Milliseconds an architecture, ratios, and on a GPU the peak of memory in MB, of every way."""
    weights = {name: tensor.to(device) for name, tensor in supernet.initial(0).items()}
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, IMAGE.channels, IMAGE.size, IMAGE.size), generator=generator, dtype=torch.uint8)
    examples = Examples(images.to(device), torch.randint(0, IMAGE.classes, (count,), generator=generator).to(device))
    whole, few = (Request(weights, some, examples, examples) for some in (architectures, architectures[:2]))
    settings = replace(TrainingSettings(), calibration=CALIBRATION, execution="sliced")
    one_by_one = Scorer(supernet, settings, PIXELS)
    jobs: dict[str, Callable[[Request], Any]] = {
        "plain": lambda request: alone(one_by_one, request),
        "tree": lambda request: one_by_one.score_many([request]),
    }
    if device.type == "cuda" and supernet.in_groups:
        grouped = Scorer(supernet, replace(settings, execution="auto"), PIXELS)
        jobs["groups"] = lambda request: grouped.score_many([request])
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {job: [] for job in jobs}
    peaks: dict[str, float] = {}
    for turn in range(1 + repeats):  # the first warms up: on a GPU it loads the kernels of all shapes
        for job, work in jobs.items():
            request = few if turn == 0 and device.type == "cpu" else whole
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            start = clock()
            work(request)
            if device.type == "cuda":
                torch.cuda.synchronize()
                peaks[job] = round(torch.cuda.max_memory_allocated() / 1e6)
            times[job].append(1000 * (clock() - start) / len(architectures))
    medians = {job: statistics.median(values[-repeats:]) for job, values in times.items()}
    return {
        "milliseconds": {job: round(value, 2) for job, value in medians.items()},
        "ratio": {job: round(medians["plain"] / value, 2) for job, value in medians.items() if job != "plain"},
        **({"peak_mb": peaks} if peaks else {}),
    }


@torch.no_grad()
def alone(scorer: Scorer, request: Request) -> list[list[float]]:
    """Accuracy and loss of every network, nothing shared."""
    images, calibration = scorer.pixels.normalise(request.examples.images), scorer.calibration_images(request.train)
    parts = scorer.logits(request.weights, request.architectures, images, calibration)
    results: list[list[float]] = torch.stack([_measure(logits, request.examples.labels) for part in parts for logits in part]).tolist()
    return results


if __name__ == "__main__":
    main()
