"""SPIDER (Mushtaq et al., *Distributed Architecture Search Over Heterogeneous Distributions*, TMLR 2023, Algorithms 1 and 2).

A client trains two models on the same images: the shared supernet w, in which every edge adds up all its operations, and a supernet of its
own, v, which is held near the received w (lambda / 2 |v - w|^2 over the operations it still has) and loses operations as the rounds go by.
After a warm-up, at every search round, an edge of each kind of cell is decided by perturbation: each of its operations is left out in
turn, and the one whose loss costs most validation accuracy stays alone. When all edges are decided, validation images join the
training. Only the update of w leaves; v and its architecture never do.

Deviations and decisions: the paper's Algorithm 2 keeps the operation whose removal leaves *most* accuracy, its code the one whose removal
leaves least, which is what is meant; equal accuracies are told apart by loss. Search rounds a client did not take part in are made up
for at its next. Edges that are still open at the end are decided in the final participation. The final model is fine-tuned as every
method's is (``training.finetune_epochs = 0`` is the paper's). Normalisation statistics are measured at each client. On all eight
operations of DARTS ``none`` is never kept. Not here: node pruning (three rounds of the authors' code) and the MiLeNAS searcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import Manifest, Upload
from fedloom.core.client_site import ClientMemory, ClientSite, Examples
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import FINISH, TRAIN, Arrays, Instruction, Report, frozen
from fedloom.core.method import Answer
from fedloom.core.seeds import derive_seed, rng
from fedloom.core.settings import setting
from fedloom.maths import averaging
from fedloom.methods.base import METHODS
from fedloom.spaces.budget import Bounded, training_memory_mb
from fedloom.spaces.genotype import EDGES
from fedloom.supernets.base import Weights
from fedloom.training.bench import Bench
from fedloom.training.graphs import Workplace
from fedloom.training.packed import Packed, flattened, sgd

Kept = npt.NDArray[np.bool_]  # (kinds of cell, edges, operations) which operations a local supernet still has


@dataclass(frozen=True)
class SpiderSettings:
    sharing: float = setting(0.01, "lambda: how strongly the local supernet is held near the shared one; 0 lets it go its own way", low=0)
    warmup: int = setting(30, "rounds before the first search", low=0)
    recovery: int = setting(20, "rounds from one search to the next", low=1)
    edges: int = setting(1, "edges of each kind of cell that a search decides; more for short runs", low=1)
    clip: float = setting(5.0, "largest norm of a gradient of the shared supernet; 0 does not clip", low=0)
    join_validation: bool = setting(True, "train on validation images as well once all edges are decided, as the paper does")


@dataclass(frozen=True)
class SpiderState:
    round: int
    seed: int
    weights: Arrays


@METHODS.add("spider", SpiderSettings, "SPIDER: a local supernet beside the shared one loses operations as rounds go by (space=darts)")
@dataclass(frozen=True)
class Spider:
    settings: SpiderSettings
    bench: Bench

    spaces: ClassVar[tuple[str, ...]] = ("darts",)  # edges must be able to add up their operations
    uploads: ClassVar[Manifest] = {
        "update": Upload("what local training changed in the shared supernet", like="weights"),
        "examples": Upload("number of training examples, the client's weight in the average", low=1),
    }

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> SpiderState:
        if isinstance(self.bench.space, Bounded):
            cure = "Remove budget.*, or choose another method"
            raise InvalidConfig(f"spider decides edge by edge and cannot keep a budget. {cure}", key="budget")
        return SpiderState(0, seed, frozen(self.bench.initial_supernet(seed)))

    def plan(self, state: SpiderState, clients: Sequence[str]) -> list[Instruction]:
        drawn = self.bench.draw_participants(state.seed, state.round, list(clients))
        return [self._instruct(state, client, TRAIN) for client in drawn]

    def absorb(self, state: SpiderState, reports: Sequence[Report]) -> SpiderState:
        if not reports:
            return replace(state, round=state.round + 1)
        mean = averaging.fedavg([r.arrays["update"] for r in reports], [], [float(r.facts["examples"]) for r in reports])
        weights = {name: array + mean[name] for name, array in state.weights.items()}
        return replace(state, round=state.round + 1, weights=frozen(weights))

    def finished(self, state: SpiderState) -> bool:
        return state.round >= self.bench.rounds

    def farewell(self, state: SpiderState, client: str) -> Instruction:
        return self._instruct(state, client, FINISH)

    def _instruct(self, state: SpiderState, client: str, action: str) -> Instruction:
        return Instruction(client, state.round, action, derive_seed(state.seed, state.round, client), {"weights": state.weights})

    # -- client ---------------------------------------------------------------
    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        received = self.bench.tensors(instruction.arrays["weights"])
        local, kept = self._inherit(site, received)
        draw = rng(instruction.seed, "search")
        with site.clock("search"):
            due = len(EDGES) if instruction.action == FINISH else self._due(instruction.round)
            kept, scored = self._searched(site, local, kept, due, draw)
        if instruction.action == FINISH:
            architecture = self._architecture(kept)
            plain = self.bench.supernet.plain(local, architecture)
            model, diary = self.bench.personalise(site, architecture, plain, instruction.seed)
            return Answer(Report(instruction.client, instruction.round), self._remember(local, kept), diary, model)
        shared, local, macs = self._train(instruction, site, received, local, kept)
        update = self.bench.arrays({name: shared[name] - received[name] for name in received})
        architecture = self._architecture(kept)
        diary, _ = self.bench.test(site, architecture, self.bench.supernet.plain(local, architecture), macs)
        stored = 2 * sum(tensor.numel() for tensor in received.values())  # two supernets
        diary = replace(
            diary,
            evaluated_architectures=scored,
            peak_memory_mb=self._memory_mb(kept, stored, len(site.data.train)),
            notes={"decided_edges": float(decided(kept).sum())},
        )
        report = Report(instruction.client, instruction.round, {"update": update}, {"examples": len(site.data.train)})
        return Answer(report, self._remember(local, kept), diary)

    # -- search ------------------------------------------------------------------
    def _due(self, round: int) -> int:
        """How many edges of each kind of cell should be decided by this round: some at every search round so far."""
        own = self.settings
        searches = len([number for number in range(0, round + 1, own.recovery) if number >= own.warmup])
        return min(searches * own.edges, len(EDGES))

    def _searched(self, site: ClientSite, local: Weights, kept: Kept, due: int, draw: np.random.Generator) -> tuple[Kept, int]:
        """Algorithm 2: random open edges of each kind of cell are decided until so many are; also how many supernets were tried."""
        kept, tried = kept.copy(), 0
        for kind in range(len(kept)):
            open_edges = np.flatnonzero(~decided(kept)[kind])
            wanted = max(0, due - (len(EDGES) - len(open_edges)))
            for edge in draw.permutation(open_edges)[:wanted]:
                present = np.flatnonzero(kept[kind, edge])
                ranks = []
                for operation in present:
                    without = kept.copy()
                    without[kind, edge, operation] = False
                    ranks.append(self._score(site, local, without))
                kept[kind, edge] = False
                kept[kind, edge, present[ranks.index(min(ranks))]] = True
                tried += len(present)
        return kept, tried

    @torch.no_grad()
    def _score(self, site: ClientSite, weights: Weights, kept: Kept) -> tuple[float, float]:
        """(accuracy, -loss) of a mixture on validation data, normalised by their own moments: the smaller, the worse."""
        examples = self.bench.selecting(site.data)
        logits = self._mixture(self.bench.pixels.normalise(examples.images), weights, kept)
        loss = float(F.cross_entropy(logits, examples.labels))
        return float((logits.argmax(1) == examples.labels).double().mean()), -loss

    def _mixture(self, images: Tensor, weights: Weights, kept: Kept) -> Tensor:
        supernet: Any = self.bench.supernet
        logits: Tensor = supernet.mixture(images, weights, torch.ones(kept.shape, device=images.device), present=kept)
        return logits

    def _architecture(self, kept: Kept) -> Architecture:
        """One operation per edge; of an open edge the last one, so that a diary can say something before the search is over."""
        return self.bench.space.canonical([int(np.flatnonzero(row)[-1]) for row in kept.reshape(-1, kept.shape[-1])])

    # -- training ------------------------------------------------------------------
    def _train(
        self, instruction: Instruction, site: ClientSite, received: Weights, local: Weights, kept: Kept
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        """Algorithm 1: in every mini-batch a step of the shared supernet, then one of the local, held near what was received."""
        bench, own, recipe = self.bench, self.settings, self.bench.training
        train = site.data.train
        if own.join_validation and decided(kept).all() and bench.protocol == "clean":
            train = _together(train, site.data.validation)
        everything = np.broadcast_to(self._offered, kept.shape)
        shared_place, local_place = (Workplace(weights, recipe.weight_decay) for weights in (received, local))
        anchor, mask = flattened(received.values()), self._moving(kept, received)
        images_seen = 0
        with site.clock("train"):
            rates = bench.rates(instruction.round, recipe.epochs)
            for images, labels, rate in bench.trainer.batches(train, rates, rng(instruction.seed, "train")):
                pixels = bench.pixels.normalise(images)
                gradient = self._gradient(shared_place, pixels, labels, everything)
                if own.clip:
                    gradient = gradient * (own.clip / gradient.norm().clamp_min(own.clip))
                sgd(shared_place.weights.flat, shared_place.momenta, gradient, shared_place.decay, recipe.momentum, rate, None)
                gradient = self._gradient(local_place, pixels, labels, kept)
                gradient = gradient + own.sharing * (local_place.weights.flat - anchor)
                sgd(local_place.weights.flat, local_place.momenta, gradient, local_place.decay, recipe.momentum, rate, mask)
                images_seen += len(labels)
        space: Any = bench.space
        macs = images_seen * (space.mixture_cost(everything).macs + space.mixture_cost(kept).macs)
        return shared_place.weights.unpacked(), local_place.weights.unpacked(), macs

    def _gradient(self, place: Workplace, pixels: Tensor, labels: Tensor, kept: Kept) -> Tensor:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in place.weights.views.items()}
        loss = F.cross_entropy(self._mixture(pixels, leaves, kept), labels, label_smoothing=self.bench.training.label_smoothing)
        return flattened(torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True))

    def _moving(self, kept: Kept, weights: Weights) -> Tensor:
        """(entries,) bool, packed: what the local supernet still has. Operations it has lost rest."""
        space: Any = self.bench.space
        there = {name for part in space.mixture_parts(kept) for name in part.shapes}
        marks = Packed.zeros({name: tensor.shape for name, tensor in weights.items()}, torch.bool, self.bench.device)
        for name, view in marks.views.items():
            view.fill_(name in there or name.startswith("classifier."))
        return marks.flat

    def _memory_mb(self, kept: Kept, stored: int, examples: int) -> float:
        """The step of the shared supernet is the larger one."""
        space: Any = self.bench.space
        everything = space.mixture_cost(np.broadcast_to(self._offered, kept.shape))
        return training_memory_mb(everything, stored, min(self.bench.training.batch, examples))

    # -- memory -----------------------------------------------------------------------
    @property
    def _offered(self) -> Kept:
        """(operations,) all but ``none``."""
        space: Any = self.bench.space
        return np.array([name != "none" for name in space.operations])

    def _inherit(self, site: ClientSite, received: Weights) -> tuple[dict[str, Tensor], Kept]:
        """The local supernet of the last participation; at the first it is what was received, with all operations."""
        known = site.memory.arrays
        if "kept" not in known:
            shape = (2, len(EDGES), len(self._offered))
            return dict(received), np.broadcast_to(self._offered, shape).copy()
        local = {name: torch.tensor(known[f"local/{name}"], device=self.bench.device) for name in received}
        return local, known["kept"].astype(bool)

    def _remember(self, local: Weights, kept: Kept) -> ClientMemory:
        weights = {f"local/{name}": array for name, array in self.bench.arrays(local).items()}
        return ClientMemory({**weights, "kept": kept.astype(np.uint8)})


def decided(kept: Kept) -> Kept:
    """(kinds, edges) whether one operation is left."""
    alone: Kept = kept.sum(-1) == 1
    return alone


def _together(first: Examples, second: Examples) -> Examples:
    return Examples(torch.cat([first.images, second.images]), torch.cat([first.labels, second.labels]))
