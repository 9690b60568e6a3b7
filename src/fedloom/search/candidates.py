"""Where a client's new architectures come from: none of them known, twice or over budget, and which of them are worth scoring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np
import torch

from fedloom.core.architecture import Architecture
from fedloom.core.client_site import ClientSite, Stopwatch
from fedloom.maths.ranking import spearman
from fedloom.search.base import SURROGATES, choose, predicted
from fedloom.search.diffusion import Diffusion, Draw
from fedloom.search.draws import PATIENCE, children, new_ones, samples
from fedloom.search.near import Near
from fedloom.search.standings import value
from fedloom.spaces.base import SearchSpace
from fedloom.spaces.budget import Bounded
from fedloom.training.scoring import Scored
from fedloom.training.together import answers, together

Pool = Callable[[], Sequence[Architecture]]  # what was, or is, drawn for all iterations


def batches(draw: Draw, rng: np.random.Generator) -> Iterator[Architecture]:
    """One batch after the other, without end."""
    while True:
        yield from draw(PATIENCE, rng)


def drawn_beside(work: Pool, device: torch.device) -> Pool:
    """What ``work`` draws, begun at once in a thread and, on a GPU, a stream of its own, while the caller goes on; asking for it waits.
    What clients that are served together draw is begun together, and drawn as one."""
    return together(_begin, [(work, device)])[0]


def _begin(requests: Sequence[tuple[Pool, torch.device]]) -> list[Pool]:
    device, stream = requests[0][1], None
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))  # what it reads is there

    def draw(work: Pool) -> Sequence[Architecture]:
        with torch.cuda.stream(stream):
            return work()

    def draw_all() -> list[Sequence[Architecture]]:
        with torch.cuda.stream(stream):
            return answers([partial(draw, work) for work, _ in requests])

    def wait_for(number: int) -> Sequence[Architecture]:
        return drawn.result()[number]

    executor = ThreadPoolExecutor(1)
    drawn = executor.submit(copy_context().run, draw_all)
    executor.shutdown(wait=False)
    return [partial(wait_for, number) for number in range(len(requests))]


@dataclass
class Candidates:
    """The candidates of one participation.

    ``source``: evolution, random or diffusion. ``surrogate``: a name, or none; with one, ``count`` candidates are made per iteration and
    it picks ``offspring`` of them by what the population scored; without, exactly ``offspring`` are made. Where too few new ones are
    found, the source is asked again, then architectures are drawn at random; fewer than ``offspring`` only where the space is exhausted.

    near: moves every candidate, whatever its source, towards an anchor; near it there may be too few that are new.

    diffusion: ``pool`` gives what is drawn for all iterations at once, each of which takes its part of it; ``draw`` draws more;
    ``guided`` says whether the client's data guide it.
    """

    space: SearchSpace  # with its budget
    source: str
    surrogate: str
    offspring: int
    count: int
    mutation: float
    clock: Stopwatch
    criterion: str = "accuracy"  # what the surrogate predicts
    near: Near | None = None
    pool: Pool = tuple
    draw: Draw | None = None
    guided: bool | None = None
    _left: Iterator[Architecture] | None = None  # of the pool
    _predicted: dict[Architecture, float] = field(default_factory=dict)  # of the offspring of this iteration
    _correlations: list[float] = field(default_factory=list)
    _distinct: set[Architecture] = field(default_factory=set)
    _drawn: int = 0
    _known: int = 0
    _over_budget: int = 0

    @property
    def per_iteration(self) -> int:
        """How many candidates an iteration looks at."""
        return self.offspring if self.surrogate == "none" else max(self.count, self.offspring)

    def drawn_by(self, diffusion: Diffusion, site: ClientSite, times: int, rng: np.random.Generator) -> Candidates:
        """The same with a diffusion model, which draws for so many iterations at once: it is frozen and so are the client's data, so this
        equals a draw in each iteration. A GPU begins at once, beside other work."""
        draw, device = diffusion.draw_for(site), diffusion.tools.device
        all_iterations = partial(draw, times * self.per_iteration, rng)
        pool = drawn_beside(all_iterations, device) if device.type == "cuda" else all_iterations
        return replace(self, draw=draw, pool=pool, guided=diffusion.guided)

    # -- one iteration -------------------------------------------------------
    def choose(self, population: Sequence[Scored], rng: np.random.Generator) -> list[Architecture]:
        """The offspring of this iteration, to be scored; none of them in the population."""
        members = [member.architecture for member in population]
        with self.clock("generate"):
            if self._left is None:
                self._left = iter(self.pool())
            found = self._new(members, self._left, rng)
        self._predicted = {}
        if self.surrogate == "none":
            return found
        with self.clock("surrogate"):
            scores = [value(member.score, self.criterion) for member in population]
            predictions = predicted(self.space, SURROGATES[self.surrogate].make, members, scores, found)
            chosen = choose(found, members, predictions, self.offspring)
            of = dict(zip(found, predictions.tolist(), strict=True))
            self._predicted = {architecture: of[architecture] for architecture in chosen}
        return chosen

    def compare(self, scored: Sequence[Scored]) -> None:
        """The true scores of this iteration's offspring, for ``notes``."""
        if self._predicted:
            pairs = [(self._predicted[one.architecture], value(one.score, self.criterion)) for one in scored]
            correlation = spearman([predicted for predicted, _ in pairs], [true for _, true in pairs])
            if correlation is not None:
                self._correlations.append(correlation)

    @property
    def notes(self) -> dict[str, float]:
        """Numbers for the client's diary: what was drawn, and how well the surrogate ordered the offspring."""
        found = {}
        if self._drawn:
            found = {"unique_share": len(self._distinct) / self._drawn, "known_share": self._known / self._drawn}
            if isinstance(self.space, Bounded):
                found["over_budget_share"] = self._over_budget / self._drawn
        if self._correlations:
            found[f"{self.surrogate}_rank_correlation"] = float(np.mean(self._correlations))
        if self.guided is not None:
            found["guided"] = float(self.guided)
        return found

    # -- parts -----------------------------------------------------------------
    def _new(self, members: Sequence[Architecture], pool: Iterator[Architecture], rng: np.random.Generator) -> list[Architecture]:
        found: list[Architecture] = []
        known = set(members)
        for source, wanted in self._sources(members, pool, rng):
            if len(found) < wanted:
                moved = self.near.moved(source, rng) if self.near else source
                found += new_ones(self.space, self._counted(moved, known), wanted - len(found), known.union(found))
        return found

    def _sources(
        self, members: Sequence[Architecture], pool: Iterator[Architecture], rng: np.random.Generator
    ) -> Iterator[tuple[Iterator[Architecture], int]]:
        """Sources in turn, and how many candidates there should be after each."""
        if self.source == "evolution":
            yield children(self.space, members, self.mutation, rng), self.per_iteration
        if self.source == "random":
            yield samples(self.space, rng), self.per_iteration
        if self.draw is not None:
            yield islice(pool, self.per_iteration), self.per_iteration
            yield batches(self.draw, rng), self.offspring
        yield samples(self.space, rng), self.offspring

    def _counted(self, source: Iterator[Architecture], members: set[Architecture]) -> Iterator[Architecture]:
        """The same source, with what is drawn from it counted for ``notes``."""
        for architecture in map(self.space.near, source):
            self._distinct.add(architecture)
            self._drawn += 1
            self._known += architecture in members
            self._over_budget += not self.space.fits(architecture)
            yield architecture
