"""HAPFNAS (Yang and Liu, *Heterogeneity-Aware Personalized Federated Neural Architecture Search*, Entropy 2025, 27(7), 759).

Supernet rounds: clients train a knowledge model, the smallest network of the space, with balanced softmax; the server averages these models
and distils their ensemble's logits, on images of its own without labels, into a supernet that no client trains (sandwich rule). Search: at
its first training round a client receives the supernet, scores a population within its budget, fits a random forest to the losses, lets
evolution run on the forest's predictions, and scores the finalists. Training rounds (heteroFedAvg): a client receives its own part of the
supernet and trains it; every entry becomes the mean over the clients that have it, weighted by examples. So the server knows architectures
and numbers of examples.

Deviations and decisions. Of the paper, abstract and section titles were at hand; the rest follows its authors' code. That code searches on
test data and returns one of its first random architectures, because its last evaluation is switched off: here validation data score
(``protocol = paper``: test data), and the finalists really are scored. Entries that no client has keep their value (code: 0). A client that
was not there when others searched does so when it is first drawn, or at the end. The budget by size of data is the code's, with the space's
own smallest and largest network as its ends; ``budget.*`` takes its place. SGD with momentum that starts anew each round (code: Nesterov,
warm-up, clipping, dropout). Normalisation statistics do not travel: the server measures those of knowledge models on its own images, where
the code's clients measure them too; clients measure all others on theirs. The final model is fine-tuned as every method's is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import LARGEST_COUNT, Manifest, Upload
from fedloom.core.client_site import ClientSite
from fedloom.core.errors import BadReport, InvalidArchitecture, InvalidConfig
from fedloom.core.messages import FINISH, TRAIN, Arrays, Instruction, Report, frozen
from fedloom.core.method import Answer, per_client
from fedloom.core.seeds import rng
from fedloom.core.server_site import ServerImages
from fedloom.core.settings import setting
from fedloom.maths import averaging
from fedloom.maths.distillation import balanced_softmax
from fedloom.methods.base import METHODS, FederatedMethod, message
from fedloom.search.forest import fit_forest
from fedloom.search.guided import Found, GuidedSearch, Scores
from fedloom.spaces.budget import Bounded, macs_by_data, macs_limit
from fedloom.supernets.base import Weights
from fedloom.training.local import Trainer, sandwich
from fedloom.training.server import Carried

KNOWLEDGE, SEARCH, SUBNET = "knowledge", "search", "subnet"  # what a client gets: the knowledge model, the supernet to search, its own part


@dataclass(frozen=True)
class HapfnasSettings:
    supernet_share: float = setting(
        0.667, "share of the rounds that train the supernet, at least one round; the others train subnets", low=0, high=1
    )
    distil_epochs: int = setting(5, "epochs over the server's images after each supernet round", low=1)
    distil_rate: float = setting(0.1, "learning rate of the supernet; training.schedule says how it falls over the supernet rounds", low=0)
    random_subnets: int = setting(2, "random subnets in each step of the supernet, besides the smallest and the largest", low=0)
    budget_steps: int = setting(
        4,
        "without budget.*: steps in which a client's limit on macs rises with its data, from the smallest network to the largest",
        low=1,
    )
    macs: tuple[float, ...] = setting(
        (), "limits on macs that replace those by data: one for each tier of clients (hardware.*), or one for all", low=1
    )
    population: int = setting(256, "random architectures that a client scores first, to train the predictor", low=2)
    generations: int = setting(20, "generations of the evolution on predictions; 0: take the best of the population", low=0)
    mutation_size: int = setting(128, "mutants per generation", low=0)
    crossover_size: int = setting(64, "children of two parents per generation", low=0)
    mutation: float = setting(0.2, "probability of redrawing a gene of a mutant", low=0, high=1)
    finalists: int = setting(256, "architectures with the best predictions, which are scored at the end", low=1)

    @classmethod
    def tiny(cls) -> HapfnasSettings:
        return cls(0.5, distil_epochs=1, population=4, generations=2, mutation_size=2, crossover_size=2, finalists=2)


@dataclass(frozen=True)
class HapfnasState:
    round: int
    seed: int
    knowledge: Arrays  # the average knowledge model, a plain network
    supernet: Arrays
    architectures: Arrays = per_client()  # (genes,) choices, of clients that have searched
    examples: Arrays = per_client()  # () the latest it reported
    carried: Arrays = field(default_factory=dict)  # from round to round, by [averaging]


@METHODS.add(
    "hapfnas",
    HapfnasSettings,
    "HAPFNAS: small models teach the server's supernet, clients search it with a predictor; architectures leave the clients",
)
@dataclass(frozen=True)
class Hapfnas(FederatedMethod[HapfnasState]):
    settings: HapfnasSettings

    uploads: ClassVar[Manifest] = {
        "update": Upload("what local training changed in the knowledge model, later in the client's subnet", like="weights", part=True),
        "architecture": Upload("the choices of the network it belongs to: the server cuts the client's part by them", like="architecture"),
        "examples": Upload("number of training examples, the client's weight in averages", low=1, high=LARGEST_COUNT),
    }
    search: ClassVar[str] = "client"
    tiny_needs: ClassVar[Mapping[str, object]] = {"split.server": 0.02}

    @staticmethod
    def check_tiers(settings: HapfnasSettings, tiers: int) -> None:
        if len(settings.macs) not in (0, 1, tiers):
            what = f"hapfnas.macs has {len(settings.macs)} limits where there are {tiers} tiers (hardware.*)"
            raise InvalidConfig(f"{what}. Give one for each tier, or one for all", key="hapfnas.macs")

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> HapfnasState:
        self._images()  # refuses to start without
        if self.settings.macs and self.tools.limited:
            raise InvalidConfig("hapfnas.macs and budget.* both limit what clients may have. Set one of them", key="hapfnas.macs")
        for limit in self.settings.macs:
            self._within(limit)  # refuses limits that nothing keeps
        return self.initial(seed)

    def initial(self, seed: int) -> HapfnasState:
        """Without the server's images, which a newcomer does not have."""
        knowledge, supernet = self.tools.initial_network(seed, self._smallest), self.tools.initial_supernet(seed)
        return HapfnasState(0, seed, frozen(knowledge), frozen(supernet))

    def instruct(self, state: HapfnasState, client: str, action: str) -> Instruction:
        """The knowledge model in supernet rounds. Then the client's own part, or the whole supernet to one that has not searched; at the
        end a part is a network of its own."""
        task, architecture, facts = SEARCH, self._smallest, {}
        known = state.architectures.get(client)
        if action == TRAIN and state.round < self.supernet_rounds:
            task, weights = KNOWLEDGE, state.knowledge
        elif known is None:
            weights, numbers = self.tools.within_reach(state.supernet, client), [int(count) for count in state.examples.values()]
            facts = {"fewest": min(numbers, default=0), "most": max(numbers, default=0)}
        else:
            task, architecture = SUBNET, self.tools.space.canonical(known)
            weights = (self.tools.network_of if action == FINISH else self.tools.part_of)(state.supernet, architecture)
        return message(state, client, action, {"weights": weights, "architecture": _choices(architecture)}, {"task": task, **facts})

    def absorb(self, state: HapfnasState, reports: Sequence[Report]) -> HapfnasState:
        after, change = replace(state, round=state.round + 1), None
        if reports:
            counts = [float(report.facts["examples"]) for report in reports]
            known = {report.client: np.array(count) for report, count in zip(reports, counts, strict=True)}
            after = replace(after, examples=frozen({**state.examples, **known}))
            if state.round < self.supernet_rounds:
                models = [averaging.moved(state.knowledge, _whole(report, state.knowledge)) for report in reports]
                knowledge, supernet = frozen(averaging.fedavg(models, [], counts)), self._taught(state, models, counts)
                after = replace(after, knowledge=knowledge, supernet=supernet)
            else:
                found = {report.client: report.arrays["architecture"]["choices"] for report in reports}
                after, change = replace(after, architectures=frozen({**state.architectures, **found})), self._change(state, reports, counts)
        moved = self.tools.server_steps.after(state.round, Carried(after.supernet, state.carried), change)
        return replace(after, supernet=moved.weights, carried=moved.memory)

    def supernet_of(self, state: HapfnasState) -> Arrays:
        return state.supernet

    @property
    def supernet_rounds(self) -> int:
        return max(1, round(self.settings.supernet_share * self.tools.rounds))

    @property
    def _smallest(self) -> Architecture:
        return self.tools.space.named["smallest"]

    # -- what the server learns -------------------------------------------------
    def _images(self) -> ServerImages:
        images = self.tools.server
        if images is None or len(images) < 2:
            what = "hapfnas distils on images that the server holds, and it has none"
            raise InvalidConfig(f"{what}. Set split.server=0.1 (of sites: data.server)", key="split.server")
        return images

    def _taught(self, state: HapfnasState, models: Sequence[Arrays], counts: Sequence[float]) -> Arrays:
        """The supernet after lessons from these knowledge models."""
        tools, own, images = self.tools, self.settings, self._images()
        rates = tools.rates(state.round, own.distil_epochs, self.supernet_rounds, own.distil_rate)
        teacher = tools.scorer.ensemble([tools.tensors(model) for model in models], self._smallest, images, counts)
        subnets, draw = sandwich(tools.space, own.random_subnets), rng(state.seed, state.round, "distil")
        taught = tools.arrays(tools.trainer.distil(tools.tensors(state.supernet), teacher, subnets, images, rates, draw))
        if not all(np.isfinite(array).all() for array in taught.values()):
            raise InvalidConfig(f"The supernet diverged after round {state.round}. Lower hapfnas.distil_rate", key="hapfnas.distil_rate")
        return frozen(taught)

    def _change(self, state: HapfnasState, reports: Sequence[Report], counts: Sequence[float]) -> Arrays:
        """heteroFedAvg: since all began with the same entries, the mean of trained entries is the entry plus the mean of updates."""
        updates = [(self._checked(report), report.arrays["update"]) for report in reports]
        return self.tools.change(state.supernet, updates, counts, averaging.coverage)

    def _checked(self, report: Report) -> Architecture:
        architecture = Architecture(self.tools.space.name, tuple(report.arrays["architecture"]["choices"].tolist()))
        try:
            self.tools.space.check(architecture)
        except InvalidArchitecture as error:
            raise BadReport(f"{report.client}, round {report.round}: {error}", client=report.client) from error
        return architecture

    # -- client ---------------------------------------------------------------
    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        tools, data, final = self.tools, site.data, instruction.action == FINISH
        task = str(instruction.facts["task"])
        own: Weights = (tools.received if task == SEARCH else tools.tensors)(instruction.arrays["weights"])
        architecture = tools.space.canonical(instruction.arrays["architecture"]["choices"])
        notes, scored = {"knowledge": float(task == KNOWLEDGE)}, 0
        if task == SEARCH:
            with site.clock("search"):
                fewest, most = (int(instruction.facts[name]) for name in ("fewest", "most"))
                space = self.allowed(len(data.train), fewest, most, site.hardware.tier)
                found = self._search(space, site, own, rng(instruction.seed, "search"))
            architecture, scored = found.architecture, found.scored
            notes |= _notes(found, space)
            own = (tools.supernet.plain if final else tools.supernet.take)(own, architecture)
        if final:
            model, diary = tools.personalise(site, architecture, own, instruction.seed)
            diary = replace(diary, evaluated_architectures=scored, notes={**diary.notes, **notes})
            return Answer(Report(instruction.client, instruction.round), diary=diary, model=model)
        with site.clock("train"):
            rates = self._rates(instruction.round, knowledge=task == KNOWLEDGE)
            trained = self._trainer.train_network(own, architecture, data.train, rates, rng(instruction.seed, "train"))
        update = tools.update(trained.weights, own)
        diary, _ = tools.test(site, architecture, trained.weights, trained.macs)
        arrays = {"update": update, "architecture": _choices(architecture)}
        report = Report(instruction.client, instruction.round, arrays, {"examples": len(data.train)})
        return Answer(report, diary=replace(diary, evaluated_architectures=scored, notes=notes))

    @cached_property
    def _trainer(self) -> Trainer:
        return Trainer(self.tools.supernet, self.tools.training, self.tools.pixels, balanced_softmax)

    def _rates(self, round: int, knowledge: bool) -> list[float]:
        """The rate falls once over the supernet rounds, and once more over the training rounds."""
        first, epochs = self.supernet_rounds, self.tools.training.epochs
        return self.tools.rates(round, epochs, first) if knowledge else self.tools.rates(round - first, epochs, self.tools.rounds - first)

    # -- search -----------------------------------------------------------------
    def allowed(self, examples: int, fewest: int, most: int, tier: int = 0) -> Bounded:
        """What a client may have: the budget that is set, its tier's, or one by the size of its data among the clients'."""
        space, limits = self.tools.space, self.settings.macs
        if isinstance(space, Bounded):
            return space
        if limits:
            return self._within(limits[tier % len(limits)])
        return self._within(macs_by_data(space, examples, fewest, most, self.settings.budget_steps))

    def _within(self, macs: float) -> Bounded:
        return Bounded(self.tools.space, (macs_limit(self.tools.space, macs, "hapfnas"),))

    def _search(self, space: Bounded, site: ClientSite, supernet: Weights, draw: np.random.Generator) -> Found:
        """A score is minus the loss on validation data, with weights as they are in the supernet."""
        tools, own = self.tools, self.settings

        def score(architectures: Sequence[Architecture]) -> Scores:
            return {one.architecture: -one.score.loss for one in tools.score(site, supernet, architectures)}

        sizes = (own.population, own.generations, own.mutation_size, own.crossover_size, own.mutation, own.finalists)
        return GuidedSearch(*sizes).run(space, score, fit_forest, draw)


def _notes(found: Found, space: Bounded) -> dict[str, float]:
    """What a search came to, for the diary: numbers that there are."""
    notes = {"search_loss": -found.score, "predicted_architectures": float(found.predicted)}
    notes |= {f"{limit.name}_limit": float(limit.most) for limit in space.limits}
    notes |= {} if found.agreement is None else {"predictor_rank_correlation": found.agreement}
    return {name: value for name, value in notes.items() if np.isfinite(value)}


def _whole(report: Report, weights: Arrays) -> Arrays:
    """Its update, which must be of all these weights: the door also lets parts pass."""
    update = report.arrays["update"]
    if {name: array.shape for name, array in update.items()} != {name: array.shape for name, array in weights.items()}:
        raise BadReport(f"{report.client}, round {report.round}: update must be of the whole knowledge model", client=report.client)
    return update


def _choices(architecture: Architecture) -> Arrays:
    return {"choices": np.array(architecture.choices, np.int32)}
