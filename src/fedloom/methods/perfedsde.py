"""PerFedSDE-NAS (Liao et al., supplement Algorithm 1): every client searches its own architecture on its own data.

A client keeps a population of architectures. At each participation it re-scores them with the received supernet, then repeats:
fit a surrogate to the population, let it pick offspring among candidates that a diffusion model draws for the client's own data,
train the supernet for one epoch on an archive of its best architectures, score the offspring, keep the best. Only the supernet's
update, which entries it trained and the number of examples leave; architectures and scores do not. The update and its coverage do
show the outline of the archive to the server.

Deviations and decisions: scores come from validation data (``protocol = paper`` uses test data as the paper did); the candidates of
all iterations are drawn in one batch, which changes nothing, because neither the generator nor the client's data do; parents are
drawn uniformly from the population; Eq. 5 is ``averaging = coverage``; normalisation statistics are measured at each client, never
averaged.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import numpy as np

from fedloom.core.architecture import Architecture
from fedloom.core.boundary import LARGEST_COUNT, Manifest, Upload
from fedloom.core.client_site import ClientMemory, ClientSite
from fedloom.core.errors import InvalidConfig
from fedloom.core.messages import FINISH, Arrays, Instruction, Report, frozen
from fedloom.core.method import Answer
from fedloom.core.seeds import rng
from fedloom.core.settings import setting
from fedloom.core.sharing import once
from fedloom.generator.files import load_generator
from fedloom.generator.generator import STRONGEST, AnyGenerator
from fedloom.maths.averaging import AVERAGING, covered_share
from fedloom.maths.samplers import SAMPLERS
from fedloom.methods.base import METHODS, AveragingMethod
from fedloom.search.base import SURROGATES
from fedloom.search.candidates import Candidates, drawn_beside
from fedloom.supernets.base import Weights
from fedloom.training.local import one_of
from fedloom.training.racing import race
from fedloom.training.scoring import Request, Scored, best_first

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
        -1.0, "how strongly the client's data guide the diffusion model; 0: not, -1: the model's own strength", low=-1, high=STRONGEST
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
        "what a step trains: one of the archive, or random subnets that together use every choice (FairNAS)",
        choices=("archive", "fair"),
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


@dataclass(frozen=True)
class PerFedSDEState:
    round: int
    seed: int
    weights: Arrays


@METHODS.add("perfedsde", PerFedSDESettings, "PerFedSDE-NAS: each client searches its own architecture; only the supernet's update leaves")
@dataclass(frozen=True)
class PerFedSDE(AveragingMethod[PerFedSDEState]):
    settings: PerFedSDESettings

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
        if -1 < self.settings.guidance < 0:
            what = f"perfedsde.guidance is {self.settings.guidance:g}. It is 0 or more, or -1 for the model's own"
            raise InvalidConfig(what, key="perfedsde.guidance")
        if self.settings.generator == "diffusion":
            _ = self._generator  # a missing or foreign file shows before the first round
        return PerFedSDEState(0, seed, frozen(self.tools.initial_supernet(seed)))

    def supernet_of(self, state: PerFedSDEState) -> Arrays:
        return state.weights

    # -- client ---------------------------------------------------------------
    def answer(self, instruction: Instruction, site: ClientSite) -> Answer:
        weights = self.tools.tensors(instruction.arrays["weights"])
        known = self._inherit(site)
        final = instruction.action == FINISH
        candidates = None if final and known else self._candidates(instruction, site)
        population = self._score(site, weights, known or self._random_population(instruction.seed), "rescore")  # best first
        if final or candidates is None:
            return self._settle(instruction, site, weights, population, candidates)
        return self._search(instruction, site, weights, population, candidates)

    def _search(
        self, instruction: Instruction, site: ClientSite, weights: Weights, population: list[Scored], candidates: Candidates
    ) -> Answer:
        """Algorithm 1, lines 8-23: search and supernet training in turn."""
        tools, settings = self.tools, self.settings
        received, size = weights, len(population)
        rates = tools.rates(instruction.round, settings.iterations)
        steps: Counter[Architecture] = Counter()
        macs, scored = 0, size
        for iteration, rate in enumerate(rates):
            draw = rng(instruction.seed, "iteration", iteration)
            offspring = candidates.choose(population, draw)
            with site.clock("train"):
                archive = [member.architecture for member in population[: settings.archive_size if settings.archive else size]]
                subnets = tools.space.fair if settings.sampling == "fair" else one_of(archive)
                trained = tools.trainer.train_supernet(weights, subnets, site.data.train, [rate], draw)
                weights, macs, steps = trained.weights, macs + trained.macs, steps + trained.steps
            new = self._score(site, weights, offspring)
            candidates.compare(new)
            population, scored = best_first([*population, *new])[:size], scored + len(new)
        best = population[0].architecture
        with site.clock("train"):
            update = tools.update(weights, received)
            coverage = self._coverage(steps)
        diary, _ = tools.test(site, best, tools.supernet.plain(weights, best), macs)
        stored = sum(tensor.numel() for tensor in weights.values())
        diary = replace(
            diary,
            evaluated_architectures=scored,
            peak_memory_mb=max(tools.training_memory_mb(a, stored, len(site.data.train)) for a in steps),
            notes={
                "covered_share": covered_share(coverage, update),
                "best_score": population[0].score.accuracy,
                "median_score": median(member.score.accuracy for member in population),
                **self._notes(candidates),
            },
        )
        facts = {"examples": len(site.data.train)}
        arrays = {name: group for name, group in (("update", update), ("coverage", coverage)) if name in self.uploads}
        report = Report(instruction.client, instruction.round, arrays, facts)
        return Answer(report, self._remember(population), diary)

    def _settle(
        self, instruction: Instruction, site: ClientSite, weights: Weights, population: list[Scored], candidates: Candidates | None
    ) -> Answer:
        """The final participation. A client that never took part searches first, with the supernet as it is."""
        size = scored = len(population)
        if candidates:
            for iteration in range(self.settings.iterations):
                new = self._score(site, weights, candidates.choose(population, rng(instruction.seed, "iteration", iteration)))
                candidates.compare(new)
                population, scored = best_first([*population, *new])[:size], scored + len(new)
        best = population[0].architecture
        model, diary = self.tools.personalise(site, best, self.tools.supernet.plain(weights, best), instruction.seed)
        diary = replace(diary, evaluated_architectures=scored, notes=self._notes(candidates) if candidates else {})
        return Answer(Report(instruction.client, instruction.round), self._remember(population), diary, model)

    # -- candidates -------------------------------------------------------------
    @cached_property
    def _generator(self) -> AnyGenerator:
        """Loaded by those who use it, once."""
        own, tools = self.settings, self.tools
        space, guided = tools.supernet.space, own.guidance != 0
        what = space, own.generator_file, own.features, tools.device, own.sampler, own.steps, guided
        found = once(lambda: load_generator(*what), "generator", *what)
        if own.guidance > 0 and not found.guided:
            raise InvalidConfig(
                f"perfedsde.guidance is {own.guidance:g}, but the generator of {space.name} has no predictor, so data cannot guide it. "
                "Set it to 0, or train one with it (fedloom pretrain)",
                key="perfedsde.guidance",
            )
        return found

    def _candidates(self, instruction: Instruction, site: ClientSite) -> Candidates:
        """Those of one participation. The diffusion model draws for all iterations at once: it is frozen and so are the client's data,
        so this equals a draw in each iteration. A GPU draws while it scores the population."""
        settings, device = self.settings, self.tools.device
        candidates = Candidates(
            space=self.tools.space,
            source=settings.generator,
            surrogate=settings.surrogate,
            offspring=settings.offspring,
            count=settings.candidates,
            mutation=settings.mutation,
            clock=site.clock,
        )
        if settings.generator != "diffusion":
            return candidates
        train, strength = site.data.train, None if settings.guidance < 0 else settings.guidance
        with site.clock("generate"):
            task = self._generator.task(train.images, train.labels) if strength != 0 else None
        draw = partial(self._generator.draw, task=task, strength=strength)

        def all_iterations() -> list[Architecture]:
            with site.clock("generate"):
                return draw(settings.iterations * candidates.per_iteration, rng(instruction.seed, "generator"))

        pool = drawn_beside(all_iterations, device) if device.type == "cuda" else all_iterations
        return replace(candidates, draw=draw, pool=pool)

    def _notes(self, candidates: Candidates) -> dict[str, float]:
        if self.settings.generator != "diffusion":
            return candidates.notes
        return {**candidates.notes, "guided": float(self._generator.guided and self.settings.guidance != 0)}

    # -- population -------------------------------------------------------------
    def _random_population(self, seed: int) -> list[Architecture]:
        draw, space = rng(seed, "population"), self.tools.space
        size = self.settings.population or 3 * len(space.genes)
        return [space.sample(draw) for _ in range(size)]

    def _inherit(self, site: ClientSite) -> list[Architecture]:
        """The population of the last participation, or nothing."""
        rows = site.memory.arrays.get("population", np.empty((0, 0), self.tools.space.compact))
        return [Architecture(self.tools.space.name, tuple(int(c) for c in row)) for row in rows]

    def _remember(self, population: list[Scored]) -> ClientMemory:
        return ClientMemory({"population": np.array([member.architecture.choices for member in population], self.tools.space.compact)})

    def _score(self, site: ClientSite, weights: Weights, architectures: Sequence[Architecture], stage: str = "score") -> list[Scored]:
        with site.clock(stage):
            scorer, data, racing = self.tools.scorer, site.data, self.settings.racing
            selecting = self.tools.selecting(data)
            if racing < 1 and stage == "rescore":  # offspring are few, and may enter the archive: they are scored in full
                return best_first(race(scorer, [Request(weights, architectures, selecting, data.train)], racing)[0])
            return best_first(scorer.score_subnets(weights, architectures, selecting, data.train))

    def _coverage(self, steps: Counter[Architecture]) -> dict[str, np.ndarray]:
        """Steps per entry where the averaging rule weighs them; otherwise only whether there were any, which says less."""
        counts = self.tools.supernet.coverage(steps)
        effort = self.settings.averaging == "coverage_effort"
        return {name: (count if effort else (count > 0)).numpy() for name, count in counts.items()}
