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
every edge carries something, and pruning is refused. After the search, validation images are added to training.

Deviations and decisions: the paper's Algorithm 2 keeps the operation whose removal leaves *most* accuracy, its code the one whose removal
leaves least, which is what is meant; equal accuracies are told apart by loss. Search rounds a client did not take part in are made up for
at its next. What is still open at the end is decided in the final participation. Validation images are added after the pruning, not before
it. Under milenas w goes on adding up with coefficient 1. The search is on validation images whatever the protocol, as in the paper: under
``protocol=paper`` test data choose only among fine-tuned networks, of which the paper has none. The final model is fine-tuned as every
method's is (``training.finetune_epochs = 0`` is the paper's). Normalisation statistics are measured at each client. ``none`` is never kept
by choice, only left by pruning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from fedloom.maths.relaxation import strongest
from fedloom.methods.base import METHODS, AveragingMethod
from fedloom.spaces.genotype import EDGES, NODES
from fedloom.supernets.base import Weights
from fedloom.training.mixtures import Mixtures
from fedloom.training.two_supernets import OwnSupernet, TwoSupernets

TARGETS = tuple(target for _, target in EDGES)
WIDE = NODES - 1  # nodes of a cell with more than two inputs: all but the first


@dataclass(frozen=True)
class SpiderSettings:
    sharing: float = setting(0.01, "lambda: how strongly the local supernet is kept near the shared one; 0: not at all", low=0)
    searcher: str = setting(
        "perturbation", "edges are decided by leaving operations out, or by gradients", choices=("perturbation", "milenas")
    )
    warmup: int = setting(30, "perturbation: rounds before the first search", low=0)
    recovery: int = setting(20, "rounds from one search to the next, for edges and for nodes", low=1)
    edges: int = setting(1, "edges (or nodes to prune) that one search decides in each kind of cell; more for short runs", low=1)
    milenas_rounds: int = setting(400, "milenas: rounds that learn weights of operations; then the strongest one stays", low=1)
    milenas_rate: float = setting(0.01, "milenas: learning rate of these weights", low=0)
    milenas_weight: float = setting(1.0, "milenas: weight of the validation loss in their gradient; the training loss has weight 1", low=0)
    prune: bool = setting(False, "after the search leave every node two inputs; needs the operation none (darts.operations=s2n or full)")
    clip: float = setting(5.0, "largest norm of a gradient of the shared supernet; 0: no clipping", low=0)
    join_validation: bool = setting(True, "add validation images to training after the search, as in the paper")
    averaging: str = setting("fedavg", "how updates are combined; all but fedavg resist a few hostile clients", choices=WHOLE)

    @classmethod
    def tiny(cls) -> SpiderSettings:
        return cls(warmup=0, recovery=1, edges=7)


@dataclass(frozen=True)
class SpiderState:
    round: int
    seed: int
    weights: Arrays
    carried: Arrays = field(default_factory=dict)  # from round to round, by [averaging]


@METHODS.add("spider", SpiderSettings, "SPIDER: a local supernet beside the shared one loses operations as rounds go by (space=darts)")
@dataclass(frozen=True)
class Spider(AveragingMethod[SpiderState]):
    settings: SpiderSettings

    search: ClassVar[str] = "client"
    spaces: ClassVar[tuple[str, ...]] = ("darts",)  # edges must be able to add up their operations
    tiny_needs: ClassVar[Mapping[str, object]] = {"darts.operations": "s2"}  # it trains all operations at once
    uploads: ClassVar[Manifest] = {
        "update": Upload("what local training changed in the shared supernet", like="weights"),
        "examples": Upload("number of training examples, the client's weight in the average", low=1, high=LARGEST_COUNT),
    }

    @cached_property
    def mixtures(self) -> Mixtures:
        return Mixtures(self.tools)

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> SpiderState:
        if self.tools.limited:
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
        joins = self.settings.join_validation and self._over(own.kept)
        train = self.tools.joined(site) if joins else site.data.train
        shared, own, macs = self._train(instruction, site, train, received, own)
        update = self.tools.update(shared, received)
        report = Report(instruction.client, instruction.round, {"update": update}, {"examples": len(train)})
        return Answer(report, self._remember(own), self._diary(site, own, macs, tried))

    def _train(
        self, instruction: Instruction, site: ClientSite, train: Examples, received: Weights, own: OwnSupernet
    ) -> tuple[Weights, OwnSupernet, int]:
        """train: the client's training images, and once the search is over its validation images, too."""
        settings, validation = self.settings, site.data.validation
        both = TwoSupernets(self.mixtures, settings.sharing, settings.clip, settings.milenas_rate, settings.milenas_weight)
        rates = self.tools.rates(instruction.round, self.tools.training.epochs)
        draws = rng(instruction.seed, "train"), rng(instruction.seed, "validation")
        with site.clock("train"):
            return both.train(received, own, train, validation, rates, draws)

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

    def _searched(self, site: ClientSite, own: OwnSupernet, edges: int, nodes: int, draw: np.random.Generator) -> tuple[OwnSupernet, int]:
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

    # -- diary ------------------------------------------------------------------------
    def _diary(self, site: ClientSite, own: OwnSupernet, macs: int, tried: int) -> Diary:
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
    def _inherit(self, site: ClientSite, received: Weights) -> OwnSupernet:
        """The local supernet of the last participation; at the first it is what was received, with all operations."""
        known, offered = site.memory.arrays, self.mixtures.offered
        learned = self.settings.searcher == "milenas"
        if "kept" not in known:
            return OwnSupernet(received, offered.copy(), np.zeros(offered.shape) if learned else None)
        local = {name: torch.tensor(known[f"local/{name}"], device=self.tools.device) for name in received}
        return OwnSupernet(local, known["kept"].astype(bool), known["alphas"] if learned else None)

    def _remember(self, own: OwnSupernet) -> ClientMemory:
        arrays = {f"local/{name}": array for name, array in self.tools.arrays(own.weights).items()}
        learned = {} if own.alphas is None else {"alphas": own.alphas}
        return ClientMemory({**arrays, "kept": own.kept.astype(np.uint8), **learned})
