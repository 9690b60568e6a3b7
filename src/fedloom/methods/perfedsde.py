"""PerFedSDE-NAS (Liao et al., supplement Algorithm 1): every client searches its own architecture on its own data.

A client keeps a population of architectures. At each participation it re-scores them with the received supernet, then repeats:
fit a surrogate to the population, let it pick offspring among candidates that a diffusion model draws for the client's own data,
train the supernet for one epoch on an archive of its best architectures, score the offspring, keep the best. Only the supernet's
update, which entries it trained and the number of examples leave; architectures and scores do not. The update and its coverage do
show the outline of the archive to the server.

Searched like this, a subnet shares its weights with many others, is compared by scores of different ages and chosen by luck on few
images. A second course, beside the published one, repairs this. An ``anchor`` is trained on the labels in every step and teaches the
drawn subnet (in-place distillation, Yu et al., ECCV 2020); it trains alone at first (``warmup``), then candidates move away from it
(``distance``). All who are compared are scored with the same weights (``same_weights``), and at the end the anchor and ``finalists``
are tuned before one of them is chosen. ``drift`` corrects the anchor's steps as SCAFFOLD does (``training/drift.py``); a frozen
``classifier`` stays as it was drawn until fine-tuning, as in FedBABU.

Deviations and decisions: scores come from validation data (``protocol = paper`` uses test data as the paper did); the candidates of
all iterations are drawn in one batch, which changes nothing, because neither the generator nor the client's data do; parents are
drawn uniformly from the population; Eq. 5 is ``averaging = coverage``; normalisation statistics are measured at each client, never
averaged.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, ClassVar

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import LARGEST_COUNT, Manifest, Upload
from fedloom.core.client_site import ClientMemory, ClientSite
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import FINISH, TRAIN, Arrays, Instruction, Report, frozen
from fedloom.core.method import Answer
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.generator.generator import STRONGEST
from fedloom.maths.averaging import AVERAGING, covered_share
from fedloom.maths.samplers import SAMPLERS
from fedloom.methods.base import METHODS, AveragingMethod
from fedloom.search.base import SURROGATES
from fedloom.search.candidates import Candidates
from fedloom.search.diffusion import Diffusion
from fedloom.search.near import Near, grown
from fedloom.search.standings import CRITERIA, best_of, in_order, inherited, memory_of, relative, running, standing
from fedloom.training.drift import Drift, remembered, to_remember
from fedloom.training.epochs import Epochs
from fedloom.training.finetuning import Finalist
from fedloom.training.holds import CLASSIFIER, CLASSIFIERS
from fedloom.training.local import Draw, beside, one_of
from fedloom.training.scoring import Scored

NONE: dict[str, Any] = {"none": None}


@dataclass(frozen=True)
class PerFedSDESettings:
    generator: str = setting(
        "diffusion",
        "source of candidates: a diffusion model guided by the client's data, crossover and mutation, or random draws",
        choices=("diffusion", "evolution", "random"),
    )
    surrogate: str = setting(
        "rbf", "what picks the offspring among the candidates; none: make no more than are scored", choices=ChainMap(NONE, SURROGATES)
    )
    iterations: int = setting(5, "search iterations per participation, one epoch of supernet training each", low=1)
    population: int = setting(0, "architectures that a client keeps; 0: three times the number of genes", low=0)
    candidates: int = setting(100, "architectures per iteration from which the surrogate picks; at least as many as offspring", low=1)
    offspring: int = setting(10, "new architectures scored per iteration", low=1)
    guidance: float = setting(
        -1.0,
        "how strongly the client's data guide the diffusion model; 0: not, -1: the model's own strength; the predictor behind it learned "
        "from data whose classes have equal shares",
        low=-1,
        high=STRONGEST,
    )
    sampler: str = setting("", f"how the diffusion model draws: {', '.join(SAMPLERS)}; empty: the model's own")
    steps: int = setting(0, "steps of the sampler; 0: its own number", low=0)
    generator_file: str = setting("", "trained diffusion model, a file written by pretrain; empty: the one included in Fedloom", path=True)
    features: str = setting(
        "", "image feature weights that generator_file was trained with; empty: those beside it, or Fedloom's", path=True
    )
    archive: bool = setting(True, "train the supernet on the best of the population; false: on all of it")
    archive_size: int = setting(10, "architectures in the archive, the best of the population", low=1)
    sampling: str = setting(
        "archive",
        "what a step trains: one of the archive, random subnets that together use every choice (FairNAS), or a random one near the anchor",
        choices=("archive", "fair", "near"),
    )
    anchor: str = setting(
        "", "a network that every step trains and that teaches the others: smallest, medium, largest or an id, reduced to the budget"
    )
    lesson: float = setting(1.0, "how much the loss of those whom the anchor teaches counts beside its own", low=0.01, high=10)
    warmup: float = setting(0.0, "share of the rounds in which the anchor trains alone and nothing is searched", low=0, high=1)
    distance: float = setting(
        1.0,
        "probability that a candidate's gene may differ from the anchor's; grows to this from warm-up to the last round; 1: as drawn",
        low=0,
        high=1,
    )
    same_weights: bool = setting(
        False, "train all epochs first, then score population and offspring once, with the same weights; false: as they come"
    )
    criterion: str = setting("accuracy", "what orders architectures on validation data", choices=CRITERIA)
    renewal: float = setting(
        1.0, "same_weights: share of the newest score in an architecture's mean over participations; 1: only the newest", low=0.01, high=1
    )
    restarts: bool = setting(True, "momentum starts at zero in every iteration; false: once a participation")
    classifier: str = setting("trained", CLASSIFIER, choices=CLASSIFIERS)
    drift: bool = setting(
        False, "steps of the anchor are corrected for the client's own drift, as in SCAFFOLD; nothing more leaves a client"
    )
    finalists: int = setting(
        0, "architectures that are fine-tuned at the end and compared with the anchor, or with the best; 0: only the best is tuned", low=0
    )
    racing: float = setting(
        1.0,
        "share of the validation images on which a population is re-scored first; then its better third on all of them; 1: off",
        low=0.05,
        high=1,
    )
    mutation: float = setting(0.1, "evolution: probability that a gene of a child is redrawn", low=0, high=1)
    averaging: str = setting("coverage", "how updates are combined", choices=AVERAGING)

    @classmethod
    def tiny(cls) -> PerFedSDESettings:
        return cls(iterations=1, population=4, candidates=6, offspring=2, archive_size=2)

    def check(self) -> None:
        """Refuses what does not go together."""
        if -1 < self.guidance < 0:
            what = f"perfedsde.guidance is {self.guidance:g}. It is 0 or more, or -1 for the model's own"
            raise InvalidConfig(what, key="perfedsde.guidance")
        of_an_anchor = {"warmup": self.warmup > 0, "distance": self.distance < 1, "sampling": self.sampling == "near", "drift": self.drift}
        if given := [name for name, speaks in of_an_anchor.items() if speaks and not self.anchor]:
            what = f"perfedsde.{given[0]} speaks of an anchor, and there is none. Set perfedsde.anchor, for example to medium"
            raise InvalidConfig(what, key=f"perfedsde.{given[0]}")
        if self.racing < 1 and (self.same_weights or self.criterion != "accuracy"):
            what = "perfedsde.racing compares accuracies on a part of the images"
            raise InvalidConfig(f"{what}. Set it to 1 with same_weights, or with another criterion", key="perfedsde.racing")


@dataclass(frozen=True)
class PerFedSDEState:
    round: int
    seed: int
    weights: Arrays
    carried: Arrays = field(default_factory=dict)  # from round to round, by [averaging]


@dataclass(frozen=True)
class Visit:
    """One participation of a client. training: the supernet at the client, which at the end stays as it was received; drift: what
    corrects the anchor's steps, if anything does."""

    instruction: Instruction
    site: ClientSite
    training: Epochs
    drift: Drift | None

    @property
    def trains(self) -> bool:
        return self.instruction.action == TRAIN

    @property
    def round(self) -> int:
        return self.instruction.round


@dataclass(frozen=True)
class Found:
    """What a search left: a population, best first; how many were scored; where candidates came from; and what to remember."""

    population: list[Scored]
    scored: int
    candidates: Candidates | None
    memory: ClientMemory

    @property
    def scores(self) -> dict[str, float]:
        accuracies = [member.score.accuracy for member in self.population]
        return {"best_score": accuracies[0], "median_score": median(accuracies)} if accuracies else {}


@METHODS.add("perfedsde", PerFedSDESettings, "PerFedSDE-NAS: each client searches its own architecture; only the supernet's update leaves")
@dataclass(frozen=True)
class PerFedSDE(AveragingMethod[PerFedSDEState]):
    settings: PerFedSDESettings

    search: ClassVar[str] = "client"
    in_parts: ClassVar[bool] = True

    @property
    def uploads(self) -> Manifest:
        manifest = {
            "update": Upload("what local training changed in the supernet", like="weights"),
            "coverage": Upload("which entries of the supernet were trained; the archive's outline", like="weights", counts=True),
            "examples": Upload("number of training examples, the client's weight in the average", low=1, high=LARGEST_COUNT),
        }
        if self.settings.averaging == "fedavg":  # does not read it
            del manifest["coverage"]
        return manifest

    def epochs(self, usual: int) -> int:
        return self.settings.iterations

    # -- server ---------------------------------------------------------------
    def start(self, seed: int) -> PerFedSDEState:
        own, training = self.settings, self.tools.training
        own.check()
        _ = self._anchor  # a wrong name shows before the first round
        if own.drift and not (training.rate and training.optimiser == "sgd"):
            raise InvalidConfig("perfedsde.drift needs training.optimiser=sgd and a training.rate above 0", key="perfedsde.drift")
        if own.generator == "diffusion":
            _ = self._diffusion.generator  # and so does a missing or foreign file
        weights = self.tools.initial_supernet(seed)
        if own.classifier == "frozen":
            weights = self.tools.with_random_classifier(weights, seed)
        return PerFedSDEState(0, seed, frozen(weights))

    def instruct(self, state: PerFedSDEState, client: str, action: str) -> Instruction:
        usual, control, anchor = super().instruct(state, client, action), remembered(state.carried), self.at(client)._anchor
        if not (control and anchor and action == TRAIN):
            return usual
        return replace(usual, arrays={**usual.arrays, "control": self.tools.part_of(control, anchor)})

    def kept(self, state: PerFedSDEState, change: Arrays | None) -> Arrays:
        known, last = remembered(state.carried), state.round + 1 == self.tools.rounds
        if not self.settings.drift or last:
            return {}
        return to_remember(known if change is None else self._drift(state.round, known).mixed(change))

    def supernet_of(self, state: PerFedSDEState) -> Arrays:
        return state.weights

    # -- client ---------------------------------------------------------------
    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        visit = self._visit(instruction, site)
        if instruction.action == FINISH:
            return self._settle(visit)
        return self._report(visit, self._warm_up(visit) if visit.round < self._warm_rounds else self._course(visit))

    def _visit(self, instruction: Instruction, site: ClientSite) -> Visit:
        """The received supernet, ready to be trained."""
        settings, received = self.settings, self.tools.received(instruction.arrays["weights"])
        drift = slope = None
        if settings.drift and instruction.action == TRAIN:
            drift = self._drift(instruction.round, instruction.arrays.get("control", {}), remembered(site.memory.arrays))
            slope = drift.slope(self.tools.trainer.steps(site.data.train))
        taught, part = settings.lesson if settings.anchor else 0.0, CLASSIFIERS[settings.classifier]
        return Visit(instruction, site, Epochs(self.tools, site, received, taught, settings.restarts, slope, part), drift)

    def _course(self, visit: Visit) -> Found:
        """At the end without training. Who has searched before only scores its population again; who has not searches then."""
        return self._search_with_same_weights(visit) if self.settings.same_weights else self._search(visit)

    def _search(self, visit: Visit) -> Found:
        """Algorithm 1, lines 8-23: search and supernet training in turn."""
        settings, space, known = self.settings, self.tools.space, inherited(self.tools.space, visit.site.memory)
        candidates = self._candidates(visit, searched=bool(known))
        population = self._scored(visit, known or self._first_population(visit.instruction), "rescore")  # lines 9 and 10
        size, scored = self._size, len(population)
        for rate, draw in self._iterations(visit) if candidates else ():
            assert candidates
            offspring = candidates.choose(population, draw)  # lines 12 to 14
            if visit.trains:
                visit.training.train(self._subnets(population, visit.round), rate, draw)  # lines 16 and 17
            new = self._scored(visit, offspring)  # line 19
            candidates.compare(new)
            population, scored = in_order([*population, *new], settings.criterion)[:size], scored + len(new)  # line 20
        return Found(population, scored, candidates, memory_of(space, population, scores=False))

    def _search_with_same_weights(self, visit: Visit) -> Found:
        """The same parts in another order: offspring are chosen by what members scored before, all epochs are trained, then members and
        offspring are scored together. Members stand by their means over participations, against the anchor's."""
        settings, space, memory, iterations = self.settings, self.tools.space, visit.site.memory, self._iterations(visit)
        members = known = standing(space, memory)
        candidates = self._candidates(visit, searched=bool(known))
        if not known:  # scores for the surrogate; a memory without scores may have an architecture twice
            first = dict.fromkeys(inherited(space, memory) or self._first_population(visit.instruction))
            members = self._scored(visit, [*first], "rescore")
        offspring = candidates.choose(members, iterations[0][1]) if candidates else []
        for rate, draw in iterations if visit.trains else ():
            visit.training.train(self._subnets(members, visit.round), rate, draw)
        now = self._scored(visit, [*(member.architecture for member in members), *offspring])
        if candidates:
            candidates.compare([one for one in now if one.architecture in set(offspring)])
        means = running({one.architecture: one.score for one in known}, relative(now, self._anchor), settings.renewal)
        best = best_of(in_order(means, settings.criterion), self._size, self._anchor)
        newest, scored = {one.architecture: one for one in now}, len(now) + (0 if known else len(members))
        return Found([newest[one.architecture] for one in best], scored, candidates, memory_of(space, best, scores=True))

    def _warm_up(self, visit: Visit) -> Found:
        """The anchor alone."""
        assert self._anchor
        for rate, draw in self._iterations(visit):
            visit.training.train(beside(self._anchor), rate, draw)
        return Found([], 0, None, visit.site.memory)

    def _report(self, visit: Visit, found: Found) -> Answer:
        """What leaves: update, coverage and the number of examples."""
        tools, settings, site, training, memory = self.tools, self.settings, visit.site, visit.training, found.memory
        with site.clock("train"):
            update = training.update()
            coverage = training.coverage(effort=settings.averaging == "coverage_effort")  # the only rule that weighs steps
        if visit.drift:
            memory = replace(memory, arrays={**memory.arrays, **to_remember(visit.drift.own_way(update))})
        best = found.population[0].architecture if found.population else self._anchor
        assert best
        diary, _ = tools.test(site, best, tools.supernet.plain(training.weights, best), training.macs)
        notes = {"covered_share": covered_share(coverage, update), **found.scores, **self._notes(found, best)}
        diary = replace(diary, evaluated_architectures=found.scored, peak_memory_mb=training.peak_memory_mb, notes=notes)
        arrays = {name: tools.returned(group) for name, group in (("update", update), ("coverage", coverage)) if name in self.uploads}
        return Answer(Report(visit.instruction.client, visit.round, arrays, {"examples": len(site.data.train)}), memory, diary)

    def _settle(self, visit: Visit) -> Answer:
        """The final participation: the best, or the anchor and the finalists, are tuned, and one of them becomes the client's own."""
        found, weights, plain = self._course(visit), visit.training.weights, self.tools.supernet.plain
        order = [member.architecture for member in found.population]
        if self.settings.finalists and self._anchor:
            order = [self._anchor, *(one for one in order if one != self._anchor)]
        first, *others = (Finalist(one, plain(weights, one)) for one in order[: 1 + self.settings.finalists])
        model, diary = self.tools.personalise(visit.site, first.architecture, first.plain, visit.instruction.seed, others)
        notes = {**diary.notes, **self._notes(found, Architecture.parse(model.architecture))}
        diary = replace(diary, evaluated_architectures=found.scored, notes=notes)
        return Answer(Report(visit.instruction.client, visit.round), found.memory, diary, model)

    def _notes(self, found: Found, chosen: Architecture) -> dict[str, float]:
        notes, near = found.candidates.notes if found.candidates else {}, self._near(0)
        return {**notes, "genes_from_anchor": float(near.genes(chosen))} if near else notes

    # -- the anchor -------------------------------------------------------------
    @cached_property
    def _anchor(self) -> Architecture | None:
        """Reduced where it is over budget, by all clients of that budget alike."""
        space, name = self.tools.space, self.settings.anchor
        return space.decode(space.encode(self.tools.supernet.space.find(name, rng("anchor")))) if name else None

    @property
    def _warm_rounds(self) -> int:
        return round(self.settings.warmup * self.tools.rounds)

    def _near(self, round: int) -> Near | None:
        """Where candidates lie in this round, or at the end; anywhere without an anchor."""
        distance = grown(self.settings.distance, round, self._warm_rounds, self.tools.rounds)
        return Near(self.tools.space, self._anchor, distance) if self._anchor else None

    def _drift(self, round: int, shared: Arrays, own: Arrays | None = None) -> Drift:
        """shared: the mean way of all clients; own: that of this client."""
        assert self._anchor
        return Drift(self.tools, self._anchor, self.tools.rates(round, self.settings.iterations), self.settings.restarts, shared, own or {})

    # -- what is trained ----------------------------------------------------------
    def _iterations(self, visit: Visit) -> list[tuple[float, np.random.Generator]]:
        """Of each iteration the learning rate of its epoch, and what it draws by."""
        rates = self.tools.rates(visit.round, self.settings.iterations)
        return [(rate, rng(visit.instruction.seed, "iteration", iteration)) for iteration, rate in enumerate(rates)]

    def _subnets(self, population: Sequence[Scored], round: int) -> Draw:
        """What a step trains: with an anchor, the anchor and then what is drawn."""
        settings, near = self.settings, self._near(round)
        archive = [member.architecture for member in population[: settings.archive_size if settings.archive else None]]
        draw = self.tools.space.fair if settings.sampling == "fair" else one_of(archive)
        if near is None:
            return draw
        return beside(near.anchor, near.one if settings.sampling == "near" else draw)

    # -- candidates and population ----------------------------------------------
    @cached_property
    def _diffusion(self) -> Diffusion:
        own = self.settings
        return Diffusion(self.tools, own.generator_file, own.features, own.sampler, own.steps, own.guidance)

    def _candidates(self, visit: Visit, searched: bool) -> Candidates | None:
        """Those of one participation; none at the end where a client has searched before. A GPU draws while it scores the population."""
        if searched and not visit.trains:
            return None
        settings = self.settings
        at_once, times = (settings.iterations, 1) if settings.same_weights else (1, settings.iterations)
        candidates = Candidates(
            space=self.tools.space,
            source=settings.generator,
            surrogate=settings.surrogate,
            offspring=at_once * settings.offspring,
            count=at_once * settings.candidates,
            mutation=settings.mutation,
            clock=visit.site.clock,
            criterion=settings.criterion,
            near=self._near(visit.round),
        )
        if settings.generator != "diffusion":
            return candidates
        return candidates.drawn_by(self._diffusion, visit.site, times, rng(visit.instruction.seed, "generator"))

    @property
    def _size(self) -> int:
        return self.settings.population or 3 * len(self.tools.space.genes)

    def _first_population(self, instruction: Instruction) -> list[Architecture]:
        draw, near = rng(instruction.seed, "population"), self._near(instruction.round)
        return near.population(self._size, draw) if near else [self.tools.space.sample(draw) for _ in range(self._size)]

    def _scored(self, visit: Visit, architectures: Sequence[Architecture], stage: str = "score") -> list[Scored]:
        """Best first. Offspring do not race: they are few, and may enter the archive."""
        racing = self.settings.racing if stage == "rescore" else 1.0
        with visit.site.clock(stage):
            return in_order(self.tools.score(visit.site, visit.training.weights, architectures, racing), self.settings.criterion)
