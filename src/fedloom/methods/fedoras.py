"""FedorAS (Dudziak, Laskaridis and Fernandez-Marques, *FedorAS: Federated Architecture Search under System Heterogeneity*, 2022).

Clients belong to tiers of devices with limits on multiply-accumulates. Three stages. First all train one supernet: every step of a client
trains one random architecture within its tier's limit, and every entry becomes the mean over the clients that trained it, weighted by
the images that did (OPA, per-operation averaging). Then an architecture is searched for each tier, by evolution. Last, clients train
their tier's architecture, from the supernet's weights.

Deviations and decisions: the whole supernet travels in the first two stages, not a random part within a limit on messages; the paper's
server searches on labelled images of its own, and ours has none, so participants score the candidates of their tier on validation
images and report accuracies; tiers have no lower limits; tiers share the entries that their architectures have in common also in the last
stage; every client fine-tunes at the end. Normalisation statistics are measured at each client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import Manifest, Upload
from fedloom.core.client_site import ClientSite
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import TRAIN, Array, Arrays, Fact, Instruction, Report, frozen
from fedloom.core.method import Answer, per_client
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.maths import averaging
from fedloom.methods import tiers
from fedloom.methods.base import METHODS, message
from fedloom.methods.subnets import SubnetMethod, SubnetState
from fedloom.search.draws import children, new_ones, samples
from fedloom.spaces.budget import Bounded, macs_limit
from fedloom.training.local import Trained

NOTHING: Arrays = {}


@dataclass(frozen=True)
class FedorASSettings:
    limits: tuple[float, ...] = setting(
        (1.0, 0.75, 0.5, 0.25),
        "limit on macs of each tier, as a share of the way from the smallest to the largest network; without tiers of hardware.* "
        "each client draws one",
        low=0,
        high=1,
    )
    supernet: float = setting(0.5, "share of the rounds that train the supernet, at least one round", low=0, high=1)
    search: float = setting(
        0.1, "share of the rounds that search, a generation each, at least one; the others train what was found", low=0, high=1
    )
    population: int = setting(32, "architectures of a tier in a generation; the better half are parents of the next", low=2)
    mutation: float = setting(0.1, "probability of redrawing a gene of a child", low=0, high=1)
    averaging: str = setting("coverage", "how updates are combined in the last stage", choices=averaging.AVERAGING)

    @classmethod
    def tiny(cls) -> FedorASSettings:
        return cls(supernet=0.3, population=3)


@dataclass(frozen=True)
class FedorASState(SubnetState):
    choices: Arrays = field(default_factory=dict)  # (population, genes) of each tier by number; its best first once they were scored
    tiers: Arrays = per_client()  # () of those who took part, where hardware has tiers


@METHODS.add(
    "fedoras", FedorASSettings, "FedorAS: a supernet is trained within tiers' limits, then an architecture for each tier; accuracies leave"
)
@dataclass(frozen=True)
class FedorAS(SubnetMethod[FedorASState]):
    settings: FedorASSettings

    search: ClassVar[str] = "server"
    state: ClassVar[type[Any]] = FedorASState

    @property
    def uploads(self) -> Manifest:
        return {
            **super().uploads,
            "update": Upload("what local training changed in the supernet, later in the tier's subnet", like="weights", part=True),
            "coverage": Upload("how many images trained each entry of the supernet", like="weights", counts=True, part=True),
            "accuracies": Upload("of the tier's candidates on the client's own validation data, in search rounds", like="accuracies"),
            **tiers.uploads(self.tools),
        }

    @staticmethod
    def check_tiers(settings: FedorASSettings, count: int) -> None:
        tiers.check("fedoras.limits", len(settings.limits), count)

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> FedorASState:
        if self.tools.limited:
            cure = "Remove budget.*, and set fedoras.limits"
            raise InvalidConfig(f"fedoras has limits of its own, one for each tier. {cure}", key="budget")
        if not self.settings.limits:
            raise InvalidConfig("fedoras.limits is empty. Give one for each tier, such as [0.25, 0.5, 1]", key="fedoras.limits")
        choices = {}
        for tier in range(len(self.settings.limits)):
            space = self.within(tier)
            drawn = new_ones(space, samples(space, rng(seed, "population", tier)), self.settings.population)
            choices[str(tier)] = _choices(drawn)
        return replace(super().start(seed), choices=frozen(choices))

    def within(self, tier: int) -> Bounded:
        """What a tier can have."""
        space = self.tools.space
        least, most = (space.cost(space.named[name]).macs for name in ("smallest", "largest"))
        return Bounded(space, (macs_limit(space, least + self.settings.limits[tier] * (most - least), "fedoras"),))

    def stage(self, round: int) -> int:
        """0: the supernet, 1: search, 2: what was found."""
        first = max(1, _share(self.settings.supernet, self.tools.rounds))
        return int(round >= first) + int(round >= first + max(1, _share(self.settings.search, self.tools.rounds)))

    def tier(self, state: FedorASState, client: str) -> int:
        """The one with the lowest limit for a client that has not said its own."""
        limits = self.settings.limits
        known = tiers.tier_of(self.tools, state.tiers, state.seed, client, len(limits))
        return limits.index(min(limits)) if known is None else known

    def subnet(self, state: FedorASState, client: str, final: bool) -> Architecture:
        return self.tools.space.canonical(state.choices[str(self.tier(state, client))][0])

    def instruct(self, state: FedorASState, client: str, action: str) -> Instruction:
        stage, tier = self.stage(state.round), self.tier(state, client)
        if action != TRAIN or stage == 2:
            usual = super().instruct(state, client, action)
            return replace(usual, arrays={**usual.arrays, "candidates": NOTHING, "accuracies": NOTHING})
        candidates, accuracies = NOTHING, NOTHING
        if stage == 1:
            candidates = {"choices": state.choices[str(tier)]}
            accuracies = {"accuracy": np.zeros(len(candidates["choices"]))}
        arrays = {"weights": state.weights, "candidates": candidates, "accuracies": accuracies}
        return message(state, client, action, arrays, {"tier": tier})

    def change(self, state: FedorASState, reports: Sequence[Report]) -> Arrays | None:
        stage = self.stage(state.round)
        if stage == 1:
            return None
        if stage == 2:
            return super().change(state, reports)
        updates, coverage = ([report.arrays[name] for report in reports] for name in ("update", "coverage"))
        return averaging.coverage_effort(updates, coverage, [1.0] * len(reports))

    def learned(self, state: FedorASState, reports: Sequence[Report]) -> FedorASState:
        after = replace(state, tiers=frozen(tiers.reported(state.tiers, reports)))
        if self.stage(state.round) != 1:
            return after
        found = dict(state.choices)
        for tier in found:
            own = [report.arrays["accuracies"]["accuracy"] for report in reports if str(self.tier(state, report.client)) == tier]
            if own:
                found[tier] = self._next(state, int(tier), np.mean(np.clip(own, 0.0, 1.0), axis=0))  # who claims more says 1
        return replace(after, choices=frozen(found))

    def _next(self, state: FedorASState, tier: int, accuracies: Array) -> Array:
        """The better half, best first, and their children; after the last generation nobody looks at these."""
        space, known = self.within(tier), state.choices[str(tier)]
        order = np.argsort(-accuracies, kind="stable")[: max(1, len(known) // 2)]
        parents = [self.tools.space.canonical(known[place]) for place in order]
        born = children(space, parents, self.settings.mutation, rng(state.seed, state.round, "children", tier))
        return _choices([*parents, *new_ones(space, born, len(known) - len(parents), parents)])

    # -- client ---------------------------------------------------------------
    def facts(self, site: ClientSite, architecture: Architecture, trained: Trained) -> dict[str, Fact]:
        return {**tiers.facts(self.tools, site)}

    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        if "architecture" in instruction.facts:
            answer = super().answer(instruction, site)
            return self._with(answer, {"coverage": NOTHING, "accuracies": NOTHING}) if instruction.action == TRAIN else answer
        candidates = instruction.arrays["candidates"]
        return self._score(instruction, site, candidates["choices"]) if candidates else self._train_supernet(instruction, site)

    @staticmethod
    def _with(answer: Answer, more: dict[str, Arrays]) -> Answer:
        return replace(answer, report=replace(answer.report, arrays={**answer.report.arrays, **more}))

    def _train_supernet(self, instruction: Instruction, site: ClientSite) -> Answer:
        """Stage 1: a random architecture within the limit in every step (single path, one shot)."""
        tools, train, space = self.tools, site.data.train, self.within(int(instruction.facts["tier"]))
        received, rates = tools.tensors(instruction.arrays["weights"]), tools.rates(instruction.round, tools.training.epochs)
        draw = rng(instruction.seed, "train")
        with site.clock("train"):
            trained = tools.trainer.train_supernet(received, lambda draw: [space.sample(draw)], train, rates, draw)
            update, batch = tools.update(trained.weights, received), min(tools.training.batch, len(train))
            coverage = tools.arrays(tools.supernet.coverage({one: steps * batch for one, steps in trained.steps.items()}))
        usual = max(trained.steps, key=lambda one: (tools.space.cost(one).macs, one.choices))
        diary, _ = tools.test(site, usual, tools.supernet.plain(trained.weights, usual), trained.macs)
        arrays = {"update": update, "coverage": coverage, "accuracies": NOTHING}
        return Answer(Report(instruction.client, instruction.round, arrays, self._told(site)), diary=diary)

    def _score(self, instruction: Instruction, site: ClientSite, choices: Array) -> Answer:
        """Stage 2: candidates with the supernet's weights."""
        tools, weights = self.tools, self.tools.tensors(instruction.arrays["weights"])
        candidates = [tools.space.canonical(row) for row in choices]
        with site.clock("score"):
            scored = tools.score(site, weights, candidates)
        best = max(scored, key=lambda one: one.score.accuracy).architecture
        diary, _ = tools.test(site, best, tools.supernet.plain(weights, best), 0)
        arrays = {"update": NOTHING, "coverage": NOTHING, "accuracies": {"accuracy": np.array([one.score.accuracy for one in scored])}}
        report = Report(instruction.client, instruction.round, arrays, self._told(site))
        return Answer(report, diary=replace(diary, evaluated_architectures=len(candidates)))

    def _told(self, site: ClientSite) -> dict[str, Fact]:
        return {"examples": len(site.data.train), **tiers.facts(self.tools, site)}


def _choices(architectures: Sequence[Architecture]) -> Array:
    """(architectures, genes)"""
    return np.array([architecture.choices for architecture in architectures])


def _share(share: float, rounds: int) -> int:
    return round(share * rounds)
