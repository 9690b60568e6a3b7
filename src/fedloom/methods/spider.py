"""SPIDER (Mushtaq et al., *Distributed Architecture Search Over Heterogeneous Distributions*, TMLR 2023, Algorithms 1 and 2).

A client trains two models on the same images: the shared supernet w, in which every edge adds up all its operations, and a supernet of its
own, v, which is held near the received w (lambda / 2 |v - w|^2 over the operations it still has) and loses operations as the rounds go by.
Only the update of w leaves; v and its architecture never do. Two searchers:

* perturbation (Algorithm 2): after a warm-up, at every search round, an edge of each kind of cell is decided: each of its operations is
  left out in turn, and the one whose loss costs most validation accuracy stays alone.
* milenas (appendix C): the operations of v count softmax(alpha). Every training step also moves alpha, by the gradients of the training
  and of the validation loss; after so many rounds the strongest operation of each edge stays.

With ``prune`` (three steps of the authors' code that the paper does not mention) every node then loses input edges until two are left. An
edge without operation is ``none`` in the architecture, so the space must have that: ``darts.operations`` s2n or full. On s2, the paper's,
every edge carries something, and pruning is refused. When the search is over, validation images join the training.

Deviations and decisions: the paper's Algorithm 2 keeps the operation whose removal leaves *most* accuracy, its code the one whose removal
leaves least, which is what is meant; equal accuracies are told apart by loss. Search rounds a client did not take part in are made up
for at its next. What is still open at the end is decided in the final participation. Validation images join after the pruning, not
before it. Under milenas w goes on adding up with coefficient 1, and alpha learns from validation images also where test data select
(``protocol=paper``). The final model is fine-tuned as every method's is (``training.finetune_epochs = 0`` is the paper's). Normalisation
statistics are measured at each client. ``none`` is never kept by choice, only left by pruning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import ClassVar

import numpy as np
import torch

from fedloom.core.boundary import LARGEST_COUNT, Manifest, Upload
from fedloom.core.client_site import ClientMemory, ClientSite, Diary, Examples
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import FINISH, Arrays, Instruction, Report, frozen
from fedloom.core.method import Answer
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.maths.averaging import WHOLE
from fedloom.maths.perturbation import Kept, Rank, decide_edges, decided, prune_nodes
from fedloom.maths.relaxation import Table, mixed_level_step, softmax, strongest
from fedloom.methods.base import METHODS, AveragingMethod
from fedloom.spaces.budget import Bounded
from fedloom.spaces.genotype import EDGES, NODES
from fedloom.supernets.base import Weights
from fedloom.training.graphs import WeightsInTraining
from fedloom.training.mixtures import Mixtures
from fedloom.training.packed import flattened, sgd

TARGETS = tuple(target for _, target in EDGES)
WIDE = NODES - 1  # nodes of a cell with more than two inputs: all but the first


@dataclass(frozen=True)
class SpiderSettings:
    sharing: float = setting(0.01, "lambda: how strongly the local supernet is held near the shared one; 0 lets it go its own way", low=0)
    searcher: str = setting("perturbation", "what decides edges: leaving operations out, or gradients", choices=("perturbation", "milenas"))
    warmup: int = setting(30, "perturbation: rounds before the first search", low=0)
    recovery: int = setting(20, "rounds from one search to the next, also of nodes", low=1)
    edges: int = setting(1, "edges, or nodes to prune, of each kind of cell that a search decides; more for short runs", low=1)
    milenas_rounds: int = setting(400, "milenas: rounds in which weights of operations are learned; then the strongest stay", low=1)
    milenas_rate: float = setting(0.01, "milenas: learning rate of these weights", low=0)
    milenas_weight: float = setting(1.0, "milenas: what the validation loss counts in their gradient, beside the training loss", low=0)
    prune: bool = setting(False, "then leave every node two inputs; needs darts.operations s2n or full, which have none")
    clip: float = setting(5.0, "largest norm of a gradient of the shared supernet; 0 does not clip", low=0)
    join_validation: bool = setting(True, "train on validation images as well once the search is over, as the paper does")
    averaging: str = setting("fedavg", "how updates are combined; the others hold against a few hostile clients", choices=WHOLE)


@dataclass(frozen=True)
class SpiderState:
    round: int
    seed: int
    weights: Arrays


@dataclass(frozen=True)
class Own:
    """A client's own supernet: weights, what is left of it, and under milenas how strong its operations are."""

    weights: Weights
    kept: Kept
    alphas: Table | None = None

    @property
    def coefficients(self) -> Table | None:
        """While milenas searches."""
        return None if self.alphas is None or decided(self.kept).all() else softmax(self.alphas, self.kept)


@METHODS.add("spider", SpiderSettings, "SPIDER: a local supernet beside the shared one loses operations as rounds go by (space=darts)")
@dataclass(frozen=True)
class Spider(AveragingMethod[SpiderState]):
    settings: SpiderSettings

    spaces: ClassVar[tuple[str, ...]] = ("darts",)  # edges must be able to add up their operations
    uploads: ClassVar[Manifest] = {
        "update": Upload("what local training changed in the shared supernet", like="weights"),
        "examples": Upload("number of training examples, the client's weight in the average", low=1, high=LARGEST_COUNT),
    }

    @cached_property
    def mixtures(self) -> Mixtures:
        return Mixtures(self.tools)

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> SpiderState:
        if isinstance(self.tools.space, Bounded):
            cure = "Remove budget.*, or choose another method"
            raise InvalidConfig(f"spider decides edge by edge and cannot keep a budget. {cure}", key="budget")
        if self.settings.prune and not self.mixtures.has_none:
            cure = "Set darts.operations=s2n (s2 and none) or full, or leave spider.prune out"
            raise InvalidConfig(f"spider.prune leaves edges out, and the space has no operation none to say so. {cure}", key="prune")
        return SpiderState(0, seed, frozen(self.tools.initial_supernet(seed)))

    def supernet_of(self, state: SpiderState) -> Arrays:
        return state.weights

    # -- client ---------------------------------------------------------------
    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        received, final = self.tools.tensors(instruction.arrays["weights"]), instruction.action == FINISH
        with site.clock("search"):
            due = (len(EDGES), WIDE * self.settings.prune) if final else self._due(instruction.round)
            own, tried = self._searched(site, self._inherit(site, received), *due, rng(instruction.seed, "search"))
        if final:
            architecture = self.mixtures.architecture(own.kept)
            plain = self.tools.supernet.plain(own.weights, architecture)
            model, diary = self.tools.personalise(site, architecture, plain, instruction.seed)
            return Answer(Report(instruction.client, instruction.round), self._remember(own), diary, model)
        shared, own, macs = self._train(instruction, site, received, own)
        update = self.tools.update(shared, received)
        report = Report(instruction.client, instruction.round, {"update": update}, {"examples": len(site.data.train)})
        return Answer(report, self._remember(own), self._diary(site, own, macs, tried))

    # -- search ------------------------------------------------------------------
    def _due(self, round: int) -> tuple[int, int]:
        """How many edges, and how many nodes, of each kind of cell should be decided by this round."""
        own = self.settings
        if own.searcher == "milenas":
            first, last = own.milenas_rounds, own.milenas_rounds
            edges = len(EDGES) * (round >= first)
        else:
            first = -(-own.warmup // own.recovery) * own.recovery  # search rounds are multiples of it
            last = first + own.recovery * (-(-len(EDGES) // own.edges) - 1)
            edges = min(own.edges * self._searches(first, round), len(EDGES))
        return edges, min(own.edges * self._searches(last, round), WIDE) * own.prune

    def _searches(self, first: int, round: int) -> int:
        """So far, from the first on."""
        return max(0, (round - first) // self.settings.recovery + 1)

    def _searched(self, site: ClientSite, own: Own, edges: int, nodes: int, draw: np.random.Generator) -> tuple[Own, int]:
        """Edges and nodes are decided until so many are; also how many mixtures were tried for that."""

        def score(kept: Kept) -> Rank:
            return self.mixtures.score(site, own.weights, kept)

        if own.alphas is None:
            kept, tried = decide_edges(own.kept, edges, score, draw)
        else:
            kept, tried = strongest(own.alphas, own.kept) if edges else own.kept, 0
        kept, more = prune_nodes(kept, TARGETS, nodes, score, draw)
        return replace(own, kept=kept), tried + more

    def _over(self, kept: Kept) -> bool:
        left = len(EDGES) if not self.settings.prune else 2 * NODES  # edges of a kind of cell
        return bool(decided(kept).all() and (kept.any(-1).sum(-1) <= left).all())

    # -- training ------------------------------------------------------------------
    def _train(self, instruction: Instruction, site: ClientSite, received: Weights, own: Own) -> tuple[Weights, Own, int]:
        """Algorithm 1: in every mini-batch a step of the shared supernet, then one of the local, held near what was received."""
        tools, settings, recipe, mixtures = self.tools, self.settings, self.tools.training, self.mixtures
        kept, alphas, searching = own.kept, own.alphas, own.coefficients is not None
        train = site.data.train
        if settings.join_validation and self._over(kept) and tools.protocol == "clean":
            train = _together(train, site.data.validation)
        shared_place, local_place = (WeightsInTraining(weights, recipe.weight_decay) for weights in (received, own.weights))
        anchor, mask = flattened(received.values()), mixtures.moving(kept, received)
        images_seen = validation_seen = 0
        with site.clock("train"):
            epochs = repeat(0.0) if searching else ()  # without end
            held_out = tools.trainer.batches(site.data.validation, epochs, rng(instruction.seed, "validation"))
            rates = tools.rates(instruction.round, recipe.epochs)
            for images, labels, rate in tools.trainer.batches(train, rates, rng(instruction.seed, "train")):
                pixels = tools.pixels.normalise(images)
                gradient = mixtures.gradient(shared_place.weights.views, pixels, labels, mixtures.offered)
                if settings.clip:
                    gradient = gradient * (settings.clip / gradient.norm().clamp_min(settings.clip))
                sgd(shared_place.weights.flat, shared_place.momenta, gradient, shared_place.decay, recipe.momentum, rate, None)
                views = local_place.weights.views
                if searching and alphas is not None:
                    coefficients = softmax(alphas, kept)
                    others, other_labels, _ = next(held_out)
                    validation_seen += len(other_labels)
                    gradient, on_train = mixtures.gradient_of_both(views, pixels, labels, kept, coefficients)
                    others = tools.pixels.normalise(others)
                    on_validation = mixtures.gradient_of_coefficients(views, others, other_labels, kept, coefficients)
                    alphas = mixed_level_step(alphas, kept, on_train, on_validation, settings.milenas_rate, settings.milenas_weight)
                else:
                    gradient = mixtures.gradient(views, pixels, labels, kept)
                gradient = gradient + settings.sharing * (local_place.weights.flat - anchor)
                sgd(local_place.weights.flat, local_place.momenta, gradient, local_place.decay, recipe.momentum, rate, mask)
                images_seen += len(labels)
        macs = images_seen * mixtures.macs(mixtures.offered) + (images_seen + validation_seen) * mixtures.macs(kept)
        return shared_place.weights.unpacked(), Own(local_place.weights.unpacked(), kept, alphas), macs

    # -- diary ------------------------------------------------------------------------
    def _diary(self, site: ClientSite, own: Own, macs: int, tried: int) -> Diary:
        """Accuracies are those of the local supernet as it is: while edges are open it adds up what they have."""
        mixtures, kept, examples = self.mixtures, own.kept, len(site.data.train)
        strengths = np.zeros(kept.shape) if own.alphas is None else own.alphas
        stored = 2 * sum(tensor.numel() for tensor in own.weights.values())  # two supernets
        searching = own.alphas is not None or decided(kept).any()
        diary = Diary(
            architecture=mixtures.architecture(strongest(strengths, kept)).id,  # of open edges the operation that leads, or the first
            trained_macs=macs,
            evaluated_architectures=tried,
            peak_memory_mb=mixtures.step_memory_mb(mixtures.offered, stored, examples),  # the step of the shared supernet
            notes={
                "phase": 3.0 if self._over(kept) else 2.0 if searching else 1.0,
                "decided_edges": float(decided(kept).sum()),
                "absent_edges": float((~kept.any(-1)).sum()),
                "local_step_mb": mixtures.step_memory_mb(kept, stored, examples),
            },
        )
        return mixtures.test(site, own.weights, kept, own.coefficients, diary)

    # -- memory -----------------------------------------------------------------------
    def _inherit(self, site: ClientSite, received: Weights) -> Own:
        """The local supernet of the last participation; at the first it is what was received, with all operations."""
        known, offered = site.memory.arrays, self.mixtures.offered
        learned = self.settings.searcher == "milenas"
        if "kept" not in known:
            return Own(received, offered.copy(), np.zeros(offered.shape) if learned else None)
        local = {name: torch.tensor(known[f"local/{name}"], device=self.tools.device) for name in received}
        return Own(local, known["kept"].astype(bool), known["alphas"] if learned else None)

    def _remember(self, own: Own) -> ClientMemory:
        arrays = {f"local/{name}": array for name, array in self.tools.arrays(own.weights).items()}
        learned = {} if own.alphas is None else {"alphas": own.alphas}
        return ClientMemory({**arrays, "kept": own.kept.astype(np.uint8), **learned})


def _together(first: Examples, second: Examples) -> Examples:
    return Examples(torch.cat([first.images, second.images]), torch.cat([first.labels, second.labels]))
